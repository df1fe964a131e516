"""The onnx backend: exact weights, both profiles against the reference, the waist, and what it refuses."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from mixtures import write_mixture
from reference import Reference, kl_divergence

from edgert import backends
from edgert.backends.base import Batch
from edgert.backends.onnx import providers, store
from edgert.backends.onnx.packing import PACKINGS
from edgert.backends.onnx.style import Style
from edgert.devices import accelerators
from edgert.errors import BackendUnavailableError, DoesNotFitError, EdgertError, ModelFileError, UnsupportedFormatError
from edgert.quantize.formats import FORMATS
from edgert.quantize.gguf_file import GGUFFile

runner = pytest.importorskip(
    "edgert.backends.onnx.runner", exc_type=ImportError, reason="needs onnx and onnxruntime (pip install 'edgert[npu]')"
)
needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime")),
    reason="onnx and onnxruntime are not installed (pip install 'edgert[npu]')",
)
TOKENS = np.random.default_rng(3).integers(0, 384, 60).tolist()
MIXED = {"*attn_k*": Type.Q8_0, "*attn_v*": Type.F16, "*ffn_up*": Type.Q5_1, "*": Type.Q4_0}
EXACT = Style(accuracy_level=0)  # activations stay float32 on the CPU provider


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "onnx-cache"
    monkeypatch.setenv("EDGERT_CACHE", str(folder))
    return folder


@pytest.fixture
def make(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A backend on the CPU provider with float32 activations; profile as asked."""
    opened = []

    def load(family: str = "llama", profile: str = "fused", quant: Any = Type.Q4_1, **options: Any) -> Any:
        row = replace(providers.PROVIDERS["cpu"], profile=profile, style=EXACT)
        monkeypatch.setitem(providers.PROVIDERS, "cpu", row)
        options = {"n_ctx": 128, "n_threads": 1, "device": "cpu", **options}
        opened.append(backends.load(tiny_model(family, quant=quant), backend="onnx", **options))
        return opened[-1]

    yield load
    for backend in opened:
        backend.close()


def run(backend: Any, tokens: list[int], start: int = 0, sequence: int = 0) -> Any:
    return backend.forward(Batch.of(tokens, start, sequence, wanted="all")).copy()


@pytest.mark.parametrize("name", PACKINGS)
def test_codes_scales_and_rest_are_the_weights(name: str) -> None:
    packing, form = PACKINGS[name], FORMATS[name]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (6, 4, form.type_size), np.uint8)
    for offset, _ in form.floats:
        blocks[..., offset : offset + 2] = rng.uniform(0.5, 1.5, (6, 4)).astype("<f2")[..., None].view(np.uint8)
    data = blocks.reshape(6, -1)
    codes, scales, rest = packing.pack(data, form.type_size)
    if packing.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(6, -1, packing.block_size)
    values = scales[..., None] * (codes.astype(np.float32) - packing.zero_point)
    values = values if rest is None else values + rest[..., None]
    expected = form.dequantize(data)
    np.testing.assert_allclose(values.reshape(6, -1), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    assert (rest is not None) == packing.has_rest


@needs_onnx
@pytest.mark.parametrize("profile", ["fused", "static"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("quant", [Type.Q4_1, MIXED], ids=["q4_1", "mixed"])
def test_logits_are_the_reference_s(
    make: Callable[..., Any], tiny_model: Callable[..., Path], family: str, profile: str, quant: Any
) -> None:
    backend = make(family, profile, quant)
    parts = [run(backend, TOKENS[:40]), run(backend, TOKENS[40:57], 40)]
    parts += [run(backend, [token], 57 + i) for i, token in enumerate(TOKENS[57:])]
    expected = Reference(tiny_model(family, quant=quant)).logits(TOKENS)
    assert kl_divergence(expected, np.concatenate(parts)).max() < 1e-6


@needs_onnx
def test_int8_activations_stay_close(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("gemma3", quant=Type.Q4_1)
    backend = backends.load(path, backend="onnx", n_ctx=128, n_threads=1, device="cpu")
    assert kl_divergence(Reference(path).logits(TOKENS), run(backend, TOKENS)).mean() < 0.01
    backend.close()


@needs_onnx
@pytest.mark.parametrize("profile", ["fused", "static"])
def test_forks_and_cuts_go_their_own_way(make: Callable[..., Any], profile: str) -> None:
    backend = make("gemma3", profile, n_seq_max=2)
    whole = run(backend, TOKENS)
    backend.fork(0, 1, 13)
    assert (backend.length(0), backend.length(1)) == (60, 13)
    np.testing.assert_allclose(run(backend, TOKENS[13:], 13, sequence=1), whole[13:], atol=1e-3)
    backend.truncate(0, 5)
    np.testing.assert_allclose(run(backend, TOKENS[5:], 5), whole[5:], atol=1e-3)
    with pytest.raises(ValueError, match="not empty"):
        backend.fork(0, 1, 3)
    backend.free(1)
    with pytest.raises(ValueError, match="has 60 positions, not 61"):
        backend.fork(0, 1, 61)


@needs_onnx
def test_a_cache_moves_to_a_larger_bucket(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "BUCKETS", (16, 32, 64))
    small = make("llama", "static")
    pieces = [run(small, TOKENS[i : i + 12], i) for i in range(0, 60, 12)]
    np.testing.assert_allclose(np.concatenate(pieces), run(make("llama"), TOKENS), atol=1e-3)


@needs_onnx
def test_several_sequences_share_a_batch(make: Callable[..., Any]) -> None:
    backend = make(n_seq_max=3)
    alone, other = run(make(), TOKENS[:20]), run(make(), TOKENS[20:40])
    order = np.argsort(np.tile(np.arange(20), 2), kind="stable")  # interleaved token by token
    batch = Batch(
        np.array(TOKENS[:40], np.int32)[order],
        np.repeat(np.array([2, 0], np.int32), 20)[order],
        np.tile(np.arange(20, dtype=np.int32), 2)[order],
        np.ones(40, bool),
    )
    batch.wanted[4] = False
    logits = backend.forward(batch)
    rows = [i for i in range(40) if i != 4]
    expected = np.stack([alone[i // 2] if i % 2 == 0 else other[i // 2] for i in rows])
    np.testing.assert_allclose(logits, expected, atol=1e-3)
    assert [backend.length(i) for i in range(3)] == [20, 0, 20]


@needs_onnx
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1, 384]}, "token ids"),
        ({"tokens": [-1, 2]}, "token ids"),
        ({"sequences": [0, 1]}, "sequences run"),
        ({"positions": [1, 2]}, "do not follow"),
        ({"positions": [0, 2]}, "do not follow"),
        ({"positions": [0]}, "differ in length"),
        ({"tokens": [], "sequences": [], "positions": []}, "1 to"),
    ],
)
def test_wrong_batches_are_refused_and_change_nothing(
    make: Callable[..., Any], change: dict[str, list[int]], message: str
) -> None:
    backend = make()
    fields: dict[str, Any] = {"tokens": [1, 2], "sequences": [0, 0], "positions": [0, 1], **change}
    arrays = {name: np.array(values, np.int32) for name, values in fields.items()}
    with pytest.raises(ValueError, match=message):
        backend.forward(Batch(**arrays, wanted=np.ones(2, bool)))
    assert backend.length(0) == 0
    assert run(backend, [1, 2]).shape == (2, 384)


@needs_onnx
@pytest.mark.parametrize("quant", [Type.Q4_1, Type.Q8_0, MIXED], ids=["q4_1", "q8_0", "mixed"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_plan_counts_the_converted_weights(
    make: Callable[..., Any], tiny_model: Callable[..., Path], family: str, quant: Any
) -> None:
    from edgert.backends.onnx.footprint import converted_bytes

    backend = make(family, quant=quant)
    with GGUFFile.open(tiny_model(family, quant=quant)) as file:
        assert converted_bytes(file, backend.architecture) == backend.memory()["weights"]


@needs_onnx
@pytest.mark.parametrize("profile", ["fused", "static"])
def test_a_filled_sequence_goes_on_and_a_freed_one_begins_anew(make: Callable[..., Any], profile: str) -> None:
    backend = make("llama", profile, n_ctx=128, n_batch=32, n_seq_max=2)
    first = run(backend, TOKENS[:20])
    backend.fill(0, 90)
    assert backend.length(0) == 90 and run(backend, [5], 90).shape == (1, 384)
    parts = list(backend._runner.cached(0, 90))
    assert all(np.array_equal(part[:, 32:64], part[:, :32]) and part[:, :90].any(axis=(0, 2)).all() for part in parts)
    with pytest.raises(DoesNotFitError):
        make("llama", profile, n_seq_max=2, n_cached=100).fill(0, 110)
    backend.free(0)
    assert not backend._runner.keys[0], "its memory is given back"
    np.testing.assert_array_equal(run(backend, TOKENS[:20]), first)


@needs_onnx
def test_closed_is_closed(make: Callable[..., Any]) -> None:
    backend = make()
    backend.close()
    for call in (lambda: backend.length(0), lambda: run(backend, [1]), backend.memory):
        with pytest.raises(ValueError, match="closed"):
            call()


@needs_onnx
def test_the_verdict_tells_where_products_run(make: Callable[..., Any]) -> None:
    verdict = make().verdict
    assert (verdict.backend, verdict.device) == ("onnx", "CPU by CPUExecutionProvider")
    assert "100 % of products" in verdict.details["assignment"]
    assert verdict.details["weights"] == "exact"


@needs_onnx
def test_damaged_weights_are_converted_again(
    make: Callable[..., Any], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(make("qwen2"), TOKENS)
    for data in cache.glob("onnx/*/weights.bin"):
        data.write_bytes(data.read_bytes()[:-5000])
    with caplog.at_level(logging.WARNING):
        again = run(make("qwen2"), TOKENS)
    assert "converted again" in caplog.text
    np.testing.assert_array_equal(again, expected)


@needs_onnx
def test_weights_that_are_no_numbers_are_refused_by_name(tiny_model: Callable[..., Path]) -> None:
    bad = np.full((192, 128), np.nan, np.float32)
    path = tiny_model("llama", quant=Type.F32, weights={"blk.1.ffn_up.weight": bad})
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up\.weight"):
        backends.load(path, backend="onnx", device="cpu", n_ctx=64)
    assert not list(store.root().glob("new-*"))


@needs_onnx
@pytest.mark.parametrize(("here", "said"), [(True, ".*pip install"), (False, "this machine has no NPU of .*nothing")])
@pytest.mark.parametrize("device", ["qnn", "openvino:npu"])
def test_a_device_that_is_not_here_says_what_is_missing(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, device: str, here: bool, said: str
) -> None:
    if importlib.util.find_spec("onnxruntime_qnn") or "OpenVINO" in str(providers.runtime().get_available_providers()):
        pytest.skip("its package is installed")
    monkeypatch.setattr(
        accelerators,
        "lack",
        lambda *_: ("", "") if here else ("this machine has no NPU of that maker", accelerators.NOTHING),
    )
    with pytest.raises(BackendUnavailableError, match=f"cannot be used: {said}"):
        backends.load(tiny_model("llama"), backend="onnx", device=device)


@needs_onnx
@pytest.mark.parametrize(
    ("lacks", "options"),
    [
        ("rotated in part", {"metadata": {"llama.rope.dimension_count": 16}}),
        ("attn_output.bias", {"weights": {f"blk.{i}.attn_output.bias": np.ones(128, np.float32) for i in range(2)}}),
    ],
)
def test_what_the_graphs_lack_is_refused_by_name(
    lacks: str, options: dict[str, Any], tiny_model: Callable[..., Path]
) -> None:
    with pytest.raises(UnsupportedFormatError, match=lacks):
        backends.load(tiny_model("llama", **options), backend="onnx")


@needs_onnx
def test_other_families_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormatError, match=r"qwen3moe.* has .*a mixture of experts"):
        backends.load(write_mixture(tmp_path / "m.gguf", "qwen3moe"), backend="onnx", device="cpu")
    with pytest.raises(UnsupportedFormatError, match="'mamba' model"):
        backends.load(tiny_model("mamba"), backend="onnx", device="cpu")
    assert not list(store.root().glob("new-*"))


@needs_onnx
def test_a_device_that_nobody_knows_is_refused_with_the_names(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(BackendUnavailableError, match="cpu, openvino"):
        backends.load(tiny_model("llama"), backend="onnx", device="abacus")


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_without_a_package_the_command_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'edgert\[npu\]'"):
        backends.load(tiny_model("llama"), backend="onnx")


@needs_onnx
def test_a_provider_that_runs_nothing_is_found_out(
    make: Callable[..., Any], tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that silently fell back to the CPU, as ONNX Runtime makes them."""
    row = replace(
        providers.PROVIDERS["openvino"], options={"npu": {}}, style=EXACT, ep="SomeExecutionProvider", kinds=("npu",)
    )
    monkeypatch.setattr(providers, "find", lambda name: providers.Device(row, "npu"))
    original = providers.runtime().InferenceSession

    def fallen_back(path: str, options: Any, **_: Any) -> Any:
        return original(path, options, providers=[providers.CPU])

    monkeypatch.setattr(providers.runtime(), "InferenceSession", fallen_back)
    path = tiny_model("llama", quant=Type.Q4_1)
    verdict = backends.load(path, backend="onnx", n_ctx=64).verdict
    assert verdict.device == "cpu"
    assert "took no product" in verdict.reason
    with pytest.raises(BackendUnavailableError, match=r"was required and runs 0 %.*the CPU would run .*MatMul"):
        backends.load(path, backend="onnx", n_ctx=64, require=True)


@pytest.mark.slow
@needs_onnx
@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_greedy_text_is_the_cpu_backend_s(model: str, request: pytest.FixtureRequest) -> None:
    """Where the texts part, the CPU backend's two best tokens are a near tie."""
    path = request.getfixturevalue(model)
    cpu = backends.load(path, backend="cpu", n_ctx=512)
    onnx = backends.load(path, backend="onnx", n_ctx=512, device="cpu")
    start = [2, 818, 5279] if model == "gemma3_path" else [504, 3575, 282, 4649]
    tokens, agreed = list(start), 0
    logits = [backend.forward(Batch.of(start, 0))[0].copy() for backend in (cpu, onnx)]
    for _ in range(48):
        best = int(logits[0].argmax())
        if int(logits[1].argmax()) == best:
            agreed += 1
        else:
            top = np.sort(logits[0])[-2:]
            assert top[1] - logits[0][int(logits[1].argmax())] < 0.6, "no tie"
        tokens.append(best)
        step = Batch.of([best], len(tokens) - 1)
        logits = [backend.forward(step)[0].copy() for backend in (cpu, onnx)]
    assert agreed >= 43
    cpu.close()
    onnx.close()


@needs_onnx
def test_errors_are_edgert_s(tmp_path: Path) -> None:
    broken = tmp_path / "x.gguf"
    broken.write_bytes(b"GGUF and nothing more")
    with pytest.raises(EdgertError):
        backends.load(broken, backend="onnx")
