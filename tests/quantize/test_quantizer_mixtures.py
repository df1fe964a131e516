"""Mixtures of experts through the quantizer: what experts read, types by a mix and by a budget, both runtimes."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from checkpoints import CORPUS, logits_of, write_checkpoint
from gguf import GGUFReader
from llama_oracle import llama_cpp_logits
from reference import Reference, kl_divergence
from relatives import RELATIVES, write_relative

from edgert import backends
from edgert.backends.base import Batch
from edgert.quantize import feedback, probing
from edgert.quantize.calibration import Statistics, calibrate, unreached
from edgert.quantize.convert import convert
from edgert.quantize.curvatures import Curvatures
from edgert.quantize.engine import open_engine
from edgert.quantize.formats import FORMATS
from edgert.quantize.imatrix import read_imatrix, write_imatrix
from edgert.quantize.quantizer import quantize
from edgert.quantize.source_tensor import SourceTensor

N_EXPERT, N_USED = 6, 2
TOKENS = np.random.default_rng(3).integers(6, 370, 90).tolist()
LONELY = (4, 5)  # the experts of layer 1 that no token reaches


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Mixtral. In layer 1 experts 0 and 1 score s, 2 and 3 score -s, 4 and 5 nothing: these are never used."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path_factory.mktemp("mixtral") / "hf"
    write_checkpoint(folder, "mixtral", hidden_size=256, intermediate_size=256)
    weights = load_file(folder / "model.safetensors")
    (router,) = (name for name in weights if re.search(r"layers\.1\..*\.gate\.weight", name))
    weights[router][1] = weights[router][0]
    weights[router][2:4] = -weights[router][0]
    weights[router][4:] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(CORPUS * 3)
    return path


def ours(path: Path) -> np.ndarray:
    options = {"cache_type_k": "f16", "cache_type_v": "f16"}
    with closing(backends.load(path, backend="cpu", n_ctx=128, n_threads=1, **options)) as backend:
        return backend.forward(Batch.of(TOKENS, 0, 0, "all")).copy()


@pytest.mark.slow
def test_counts_of_experts_add_up(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    """Each token is counted once for each expert that it uses, in all three matrices alike."""
    convert(checkpoint, tmp_path / "m.gguf", "F32")
    with open_engine(tmp_path / "m.gguf", n_ctx=64, n_threads=1) as engine:
        chunks = engine.tokenize(text.read_text())[:256].reshape(4, 64)
        found = calibrate(engine, chunks)
    for i in range(3):
        counts = [found.counts[f"blk.{i}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")]
        np.testing.assert_array_equal(counts[0], counts[1])
        np.testing.assert_array_equal(counts[0], counts[2])
        assert len(counts[0]) == N_EXPERT and counts[0].sum() == 256 * N_USED
        assert found.counts[f"blk.{i}.ffn_gate_inp.weight"] == [256]
    layer_1 = found.counts["blk.1.ffn_up_exps.weight"]
    assert layer_1[0] == layer_1[1] and layer_1[2] == layer_1[3] and layer_1[0] + layer_1[2] == 256
    assert found.unreached("blk.1.ffn_up_exps.weight") == len(LONELY) and not layer_1[list(LONELY)].any()
    sums = found.sums["blk.1.ffn_up_exps.weight"]
    router = found.sums["blk.1.ffn_gate_inp.weight"][0]  # reads what the experts read
    np.testing.assert_allclose(sums.sum(0), N_USED * router, rtol=0.01)  # tiles may be bf16
    said = unreached(found, [f"blk.{i}.ffn_{part}_exps.weight" for i in range(3) for part in ("gate", "up", "down")])
    assert re.search(r"reached (\d+) of the 54 experts' matrices, most of them in blk\.1\.ffn_\w+_exps\.weight", said)


def test_errors_of_experts_are_judged_by_what_they_read(tmp_path: Path) -> None:
    """An error in columns that no expert reads costs next to nothing; without statistics all columns cost alike."""
    rng = np.random.default_rng(0)
    sums = np.concatenate([np.full((2, 32), 6.0), np.zeros((2, 32))], axis=1)
    sums[0] *= 3
    statistics = Statistics({"x": sums}, {"x": np.array([9, 1])})
    np.testing.assert_allclose(statistics.joint("x"), [2.4] * 32 + [0] * 32)
    values = rng.normal(size=(96, 64)).astype(np.float32)
    values[:, 32:] *= 20  # where rounding errs most
    tensor = FakeTensor("x", values.reshape(2, 48, 64))
    curvatures = Curvatures(tmp_path, {}, {"x": 64})
    alike = probing.errors_of(tensor, ["IQ4_NL"], curvatures("x"))["IQ4_NL"]
    curvatures.forget()
    curvatures.weigh(statistics)
    np.testing.assert_allclose(np.diag(curvatures("x").hessian), [2.01] * 32 + [0.01] * 32, rtol=1e-5)
    judged = curvatures("x")
    rounded = feedback.quantize(values, "IQ4_NL", judged)
    difference = FORMATS["IQ4_NL"].dequantize(rounded) - values
    expected = (difference**2 @ np.diag(judged.hessian)).sum() / (values**2 @ np.diag(judged.hessian)).sum()
    assert probing.errors_of(tensor, ["IQ4_NL"], judged)["IQ4_NL"] == pytest.approx(expected, rel=1e-3)
    assert abs(expected / alike - 1) > 1e-3


class FakeTensor(SourceTensor):
    """A tensor in memory."""

    def __init__(self, name: str, values: np.ndarray) -> None:
        super().__init__(name, values.shape, FORMATS["F32"])
        self._values = values.reshape(-1, values.shape[-1])

    def _read(self, start: int, stop: int) -> np.ndarray:
        return self._values[start:stop]


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["q4_k_m", 5.0])
def test_calibrated_and_run(budget: str | float, checkpoint: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    report = quantize(checkpoint, out, budget=budget, calibration=str(text), n_threads=1, report=False)
    (said,) = (notice for notice in report.notices if notice.startswith("no token"))
    assert "most of them in blk.1.ffn_" in said and "_exps.weight (2 of 6)" in said
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(out).tensors}
    assert types == report.types
    experts = [name for name in types if "_exps" in name]
    assert len(experts) == 9 and all(types[name].endswith("_K") or types[name] == "Q8_0" for name in experts)
    assert {report.methods[name] for name in experts} <= {"weighted", "feedback"}
    assert all(types[name] == "F32" for name in types if "ffn_gate_inp" in name)
    bpw = 8 * sum(tensor.n_bytes for tensor in GGUFReader(out).tensors) / sum(map(np.prod, report.shapes.values()))
    assert budget == "q4_k_m" or bpw <= budget

    # With its two best experts for each token, runtimes may take others where scores are nearly equal.
    logits, theirs = ours(out), llama_cpp_logits(out, TOKENS)
    assert np.median(kl_divergence(Reference(out).logits(TOKENS), logits)) < 0.02
    assert np.median(kl_divergence(theirs, logits)) < 0.03
    # With all experts there is no choice, and the same file is as near as a dense model of these types.
    use_all(out)
    expected, logits, theirs = Reference(out).logits(TOKENS), ours(out), llama_cpp_logits(out, TOKENS)
    assert kl_divergence(expected, logits).mean() < 0.005
    assert kl_divergence(theirs, logits).mean() < 0.02
    assert kl_divergence(expected, theirs).mean() < 0.02


@pytest.mark.slow
def test_error_feedback_of_experts(checkpoint: Path, tmp_path: Path) -> None:
    """Experts make up for their rounding by what they read themselves; those that read too little are left alone."""
    rng = np.random.default_rng(5)
    words = np.array(CORPUS.split())
    texts = [" ".join(rng.choice(words, n)) for n in (6000, 300)]
    (tmp_path / "text.txt").write_text(texts[0])
    convert(checkpoint, tmp_path / "float.gguf", "F32")
    with open_engine(tmp_path / "float.gguf", n_ctx=64, n_threads=1) as engine:
        unseen = [engine.tokenize(texts[1])[:200].tolist(), TOKENS]
    expected = [Reference(tmp_path / "float.gguf").logits(tokens) for tokens in unseen]
    experts = {f"blk.{i}.ffn_{part}_exps.weight": (i, part) for i in range(3) for part in ("gate", "up", "down")}
    klds, data = {}, {}
    for gptq in ("off", "auto"):
        out = tmp_path / f"{gptq}.gguf"
        report = quantize(
            checkpoint, out, budget="q4_0", keep="^(?!.*_exps)", calibration=str(tmp_path / "text.txt"), gptq=gptq,
            n_threads=1, report=False,
        )  # fmt: skip
        assert {report.methods[name] for name in experts} == {"weighted" if gptq == "off" else "feedback"}
        told = [notice for notice in report.notices if "error feedback" in notice]
        assert len(told) == (gptq == "auto") and all(re.search(r" for (4\d) of the 54 experts'", text) for text in told)
        klds[gptq] = [
            kl_divergence(one, Reference(out).logits(tokens)).mean()
            for one, tokens in zip(expected, unseen, strict=True)
        ]
        data[gptq] = {tensor.name: tensor.data for tensor in GGUFReader(out).tensors if tensor.name in experts}
    assert (np.array(klds["auto"]) < 0.9 * np.array(klds["off"])).all()
    for name, (i, _) in experts.items():
        same = [np.array_equal(a, b) for a, b in zip(data["off"][name], data["auto"][name], strict=True)]
        assert not all(same)
        if i == 1:
            assert all(same[number] for number in LONELY)


def use_all(path: Path) -> None:
    """Gives every token all experts."""
    reader = GGUFReader(path, "r+")
    field = reader.fields["llama.expert_used_count"]
    assert field.parts[field.data[0]] == N_USED
    field.parts[field.data[0]][0] = N_EXPERT
    reader.data.flush()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek", "bailingmoe", "glm4moe", "ernie4.5-moe", "hunyuan-moe", "qwen3vlmoe"])
def test_every_mixture_takes_every_feature(name: str, text: Path, tmp_path: Path) -> None:
    """Measured, counted by expert, with an importance matrix kept and given again, types by name: and it runs."""
    folder = tmp_path / "hf"
    written = write_relative(folder, name) if name in RELATIVES else write_checkpoint(folder, name)
    expected = logits_of(written, TOKENS)
    convert(folder, tmp_path / "float.gguf", "F32")
    with open_engine(tmp_path / "float.gguf", n_ctx=64, n_threads=1) as engine:
        found = calibrate(engine, engine.tokenize(text.read_text())[:256].reshape(4, 64))
    experts = [tensor for tensor in found.counts if "_exps.weight" in tensor]
    assert {tensor.split(".")[2] for tensor in experts} == {f"ffn_{part}_exps" for part in ("gate", "up", "down")}
    assert all(len(found.counts[tensor]) == N_EXPERT and found.counts[tensor].sum() == 512 for tensor in experts)
    assert any("_shexp.weight" in tensor for tensor in found.counts) == (name != "qwen3vlmoe")
    write_imatrix(tmp_path / "m.imatrix.gguf", found)
    read = read_imatrix(tmp_path / "m.imatrix.gguf")
    assert set(read.counts) == set(found.counts)
    out = tmp_path / "out.gguf"
    options = {"tensor_types": {"ffn_down_exps": "Q8_0"}, "n_threads": 1, "report": False}
    quantize(folder, out, budget="q4_0", imatrix=tmp_path / "m.imatrix.gguf", **options)
    theirs = Reference(out).logits(TOKENS)
    report = quantize(folder, out, budget=6.0, calibration=str(text), calibration_tokens=1024, **options)
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(out).tensors}
    assert types == report.types
    assert {types[tensor] for tensor in types if "ffn_down_exps" in tensor} == {"Q8_0"}
    assert len({types[tensor] for tensor in types if tensor.endswith("_exps.weight")}) > 1
    assert all(types[tensor] == "F32" for tensor in types if "ffn_gate_inp" in tensor or "exp_probs_b" in tensor)
    exact = Reference(out).logits(TOKENS)
    assert np.median(kl_divergence(expected, exact)) < np.median(kl_divergence(expected, theirs))  # more bits, measured
    assert np.median(kl_divergence(expected, exact)) < 0.2
    assert np.median(kl_divergence(exact, ours(out))) < 0.02
    assert np.median(kl_divergence(exact, llama_cpp_logits(out, TOKENS))) < 0.05
