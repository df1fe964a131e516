"""`edgert quantize` as a user runs it, on the shapes and values that other quantizers tripped over."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import ggml
import gguf
import numpy as np
import pytest
from checkpoints import logits_of, write_checkpoint
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Type
from llama_oracle import llama_cpp_logits
from reference import Reference, kl_divergence

from edgert import backends, cli
from edgert.backends.base import Batch
from edgert.cli.verbs.quantize import command
from edgert.quantize.gguf_file import GGUFFile

TOKENS = np.random.default_rng(3).integers(6, 370, 60).tolist()


def run(*arguments: object) -> dict[str, Any]:
    """The report of a run that succeeds."""
    result = CliRunner().invoke(command, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def ours(path: Path) -> np.ndarray:
    options = {"cache_type_k": "f16", "cache_type_v": "f16"}  # the cache's own rounding is no fault of the file
    with closing(backends.load(path, backend="cpu", n_ctx=128, n_threads=1, **options)) as backend:
        return backend.forward(Batch.of(TOKENS, 0, 0, "all")).copy()


@pytest.mark.parametrize("hidden", [576, 640, 896])
def test_widths_that_no_block_of_256_divides(hidden: int, tmp_path: Path):
    """Fall-backs are told with what they cost, and both runtimes read the file as the quantizer meant it."""
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_attention_heads": 4}
    write_checkpoint(tmp_path / "hf", "llama-head", num_hidden_layers=1, **sizes)
    out = tmp_path / "out.gguf"
    report = run(tmp_path / "hf", "-o", out, "--fast", "--type", "q4_k_m", "-t", 1)
    fallen = {row["tensor"]: row for row in report["fallbacks"]}
    narrow = [name for name, shape in report["shapes"].items() if len(shape) == 2 and shape[1] % 256]
    assert narrow and set(narrow) == set(fallen)
    assert all(row["bits_added"] > 0 and "no blocks of 256" in row["reason"] for row in fallen.values())
    reader = gguf.GGUFReader(out)
    assert {tensor.name: tensor.tensor_type.name for tensor in reader.tensors} == report["types"]
    expected = Reference(out).logits(TOKENS)
    scale = np.abs(expected).max()
    assert np.abs(ours(out) - expected).max() < 0.05 * scale
    assert np.abs(llama_cpp_logits(out, TOKENS) - expected).max() < 0.05 * scale


def test_rows_of_33_stay_floats(tmp_path: Path):
    sizes = {"hidden_size": 33, "intermediate_size": 66, "num_attention_heads": 3, "num_key_value_heads": 1}
    write_checkpoint(tmp_path / "hf", "llama-head", num_hidden_layers=1, **sizes)
    out = tmp_path / "out.gguf"
    report = run(tmp_path / "hf", "-o", out, "--fast", "--type", "q4_k_m", "-t", 1)
    assert {report["types"][name] for name, shape in report["shapes"].items() if shape[-1] in (33, 66)} <= {
        "F16",
        "F32",
    }
    assert report["types"]["blk.0.attn_output.weight"] not in ("F16", "F32")  # 96 columns
    np.testing.assert_allclose(llama_cpp_logits(out, TOKENS), Reference(out).logits(TOKENS), atol=0.2)


@pytest.mark.parametrize("budget", ["q4_k_m", "q4_0", "iq4_nl", 6.5])
def test_tensors_of_odd_shapes(tiny_model: Callable[..., Path], tmp_path: Path, budget: str | float):
    """1, 14, 31, 32, 33 columns, vectors, three and four dimensions: kept, each as a type that fits it."""
    from edgert.quantize import quantizer
    from edgert.quantize.planning import Planner
    from edgert.quantize.source import open_source

    rng = np.random.default_rng(0)
    shapes = {f"extra.w{n}.weight": (6, n) for n in (1, 14, 31, 32, 33)}
    shapes |= {"extra.vector.weight": (14,), "extra.four.weight": (2, 3, 4, 32), "extra.stack.weight": (2, 4, 33)}
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
    with GGUFFile.open(tiny_model("llama", quant=Type.BF16)) as file:
        for key, value in file.metadata.items():
            if isinstance(value, int) and not isinstance(value, bool) and key.startswith("llama."):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
        names = {name: tensor.dequantize() for name, tensor in file.tensors.items()}
    for name, values in names.items():
        writer.add_tensor(name, values)
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    out = tmp_path / "out.gguf"
    with open_source(tmp_path / "odd.gguf") as source:
        assert set(shapes) <= set(Planner(source, quantizer.Pins()).floats().types)
    flag = "--bpw" if isinstance(budget, float) else "--type"
    report = run(tmp_path / "odd.gguf", "-o", out, "--fast", flag, budget, "-t", 1)
    with GGUFFile.open(out) as file, GGUFFile.open(tmp_path / "odd.gguf") as before:
        assert file.tensors.keys() == before.tensors.keys()
        for name in shapes:
            loose = 0.5 if report["types"][name] not in ("F32", "F16", "BF16") else 2e-3
            difference = np.abs(file.tensors[name].dequantize() - before.tensors[name].dequantize()).max()
            assert difference < loose, name


def test_a_value_beyond_f16_never_becomes_infinite(tmp_path: Path):
    model = write_checkpoint(tmp_path / "hf", "llama", dtype="bfloat16")
    import torch

    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = 1e5
    model.save_pretrained(tmp_path / "hf")
    for kind in ("f16", "q4_k_m", "q8_0"):
        out = tmp_path / f"{kind}.gguf"
        report = run(tmp_path / "hf", "-o", out, "--fast", "--type", kind, "-t", 1)
        with GGUFFile.open(out) as file:
            for name, tensor in file.tensors.items():
                assert np.isfinite(tensor.dequantize()).all(), (kind, name)
            assert file.tensors["blk.1.ffn_down.weight"].dequantize()[3, 5] == pytest.approx(1e5, rel=0.05)
        if kind == "f16":
            assert report["types"]["blk.1.ffn_down.weight"] == "BF16"
            assert any(row["tensor"] == "blk.1.ffn_down.weight" for row in report["fallbacks"])


def test_gemma_from_checkpoint_to_eight_bits(tmp_path: Path):
    """Norms by one more, scaled and tied tables: transformers' logits, as floats and rounded."""
    expected = logits_of(write_checkpoint(tmp_path / "hf", "gemma3", tied=True), TOKENS)
    for kind, divergence in (("f32", 1e-4), ("q8_0", 0.01), ("q5_1", 0.1)):
        out = tmp_path / f"{kind}.gguf"
        run(tmp_path / "hf", "-o", out, "--fast", "--type", kind, "-t", 1)
        assert kl_divergence(expected, ours(out)).mean() < divergence, kind
        assert len(set(ours(out).argmax(1).tolist())) > 5


def test_calibration_with_widths_of_different_blocks(tmp_path: Path):
    """Rows of 96, 160, 192 and 256 beside each other: every tensor near its source, whatever its blocks."""
    write_checkpoint(tmp_path / "hf", "llama-head", intermediate_size=256)
    text = tmp_path / "text.txt"
    rng = random.Random(5)
    text.write_text(" ".join("".join(rng.choices("the and world hello is in", k=6)) for _ in range(1500)))
    out = tmp_path / "out.gguf"
    report = run(tmp_path / "hf", "-o", out, "--calibration", text, "--type", "q4_k_m", "-t", 1, "--no-report")
    run(tmp_path / "hf", "-o", tmp_path / "f32.gguf", "--fast", "--type", "f32")
    assert {"Q4_K", "Q5_0"} <= set(report["types"].values())
    with GGUFFile.open(out) as file, GGUFFile.open(tmp_path / "f32.gguf") as before:
        for name, tensor in file.tensors.items():
            true = before.tensors[name].dequantize()
            error = np.square(tensor.dequantize() - true).mean() / np.square(true).mean()
            assert error < (0.02 if len(tensor.shape) > 1 else 1e-12), (name, report["types"][name])


def test_a_stop_by_the_user_says_how_to_go_on(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from edgert.quantize import encoding

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    source = tiny_model("llama", quant=Type.BF16)
    monkeypatch.setattr(encoding, "encode", stop)
    out = tmp_path / "out.gguf"
    assert cli.call(["quantize", str(source), "-o", str(out), "--fast", "--type", "q8_0"]) == 130
    assert "--resume" in capsys.readouterr().err
    assert not out.exists()
    monkeypatch.undo()
    assert cli.call(["quantize", str(source), "-o", str(out), "--fast", "--type", "q8_0", "--resume"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_the_source_is_never_replaced(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = tmp_path / "m-00001-of-00002.gguf"
    source.write_bytes(tiny_model("llama", quant=Type.BF16).read_bytes())
    before = source.read_bytes()
    for out in (source, tmp_path / "m.gguf"):  # the second could become shards of the source's name
        assert cli.call(["quantize", str(source), "-o", str(out), "--fast", "--type", "q8_0"]) == 2
        errors = capsys.readouterr().err
        assert "Error: --output is " in errors and "would replace" in errors
    assert source.read_bytes() == before


def test_resuming_measures_nothing_again(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Stopped when all was measured and nothing written; what goes on may neither calibrate nor probe."""
    from edgert.quantize import calibration, encoding, probing

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def passes(engine: object, chunks: object, names: set[str], max_bytes: int, statistics: object, *_: object) -> Any:
        assert not names and statistics is None
        return []

    text, out = tmp_path / "text.txt", tmp_path / "out.gguf"
    rng = random.Random(5)
    text.write_text(" ".join("".join(rng.choices("the and world hello is in", k=6)) for _ in range(1500)))
    source = tiny_model("llama", quant=Type.BF16)
    command_line = ["quantize", str(source), "-o", str(out), "--bpw", "6", "--calibration", str(text), "--no-report"]
    monkeypatch.setattr(encoding, "encode", stop)
    assert cli.call([*command_line, "-t", "1"]) == 130
    monkeypatch.undo()
    for name in ("Baseline", "errors_of"):
        monkeypatch.setattr(probing, name, stop)
    monkeypatch.setattr(calibration, "hessian_passes", passes)
    assert cli.call([*command_line, "-t", "1", "--resume"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "text.txt"]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one sentence of a run that is refused."""
    assert cli.call(["quantize", *map(str, arguments), "-t", "1"]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("edgert: ")]
    assert len(said) == 1
    return said[0]


def test_from_blocks_of_a_grid_of_signs(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """IQ3_XXS is refused as a source unless that is wanted, and then the report says what it was."""
    floats = tiny_model("llama", quant=Type.F32, n_embd=256, n_head=4, head_dim=64, n_ff=512)
    source = ggml.rounded(floats, tmp_path / "source.gguf", {"blk.*": "IQ3_XXS"})
    out = tmp_path / "out.gguf"
    flags = (source, "-o", out, "--fast", "--type", "q4_0")
    said = refusal(capsys, *flags)
    assert "IQ3_XXS" in said and "--allow-requantize" in said and not out.exists()
    report = run(*flags, "--allow-requantize", "-t", 1)
    assert report["requantized"] is True and "IQ3_XXS" in report["source_types"]
    result = CliRunner().invoke(command, [*map(str, flags), "--allow-requantize", "-t", "1"], catch_exceptions=False)
    assert result.exit_code == 0 and "IQ3_XXS" in result.output
    assert report["types"]["blk.1.ffn_up.weight"] == "Q4_0"
    with GGUFFile.open(source) as before, GGUFFile.open(out) as after:
        for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
            values, rounded = before.tensors[name].dequantize(), after.tensors[name].dequantize()
            assert np.square(rounded - values).mean() < 0.02 * np.square(values).mean()


def test_a_name_that_cannot_be_written_is_refused_before_the_work(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from edgert.quantize.measuring import Measuring

    monkeypatch.setattr(Measuring, "engine", None)  # whoever measures fails
    source = tiny_model("llama", quant=Type.BF16)
    (tmp_path / "folder").mkdir()
    assert "a folder or device has that name" in refusal(capsys, source, "-o", tmp_path / "folder")
    assert "does not exist" in refusal(capsys, source, "-o", tmp_path / "none" / "out.gguf")
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "may only be read" in refusal(capsys, source, "-o", tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_is_not_edgerts_is_never_deleted(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source, work = tiny_model("llama", quant=Type.BF16), tmp_path / "out.gguf.work"
    work.mkdir()
    (work / "precious").write_text("mine")
    assert "holds other things" in refusal(capsys, source, "-o", tmp_path / "out.gguf")
    assert (work / "precious").read_text() == "mine"
    (work / "precious").rename(tmp_path / "precious")
    work.rmdir()
    work.symlink_to(tmp_path)
    assert "must be a folder" in refusal(capsys, source, "-o", tmp_path / "out.gguf")
    work.unlink()
    work.write_text("a file")
    assert "must be a folder" in refusal(capsys, source, "-o", tmp_path / "out.gguf")
    assert work.read_text() == "a file" and (tmp_path / "precious").exists()


def test_two_runs_do_not_share_what_they_measure(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from edgert.quantize.work_folder import WorkFolder

    source = tiny_model("llama", quant=Type.BF16)
    first = WorkFolder(tmp_path / "out.gguf.work", "another run", resume=False)
    (first.path / "measured").write_text("much")
    assert "by another process" in refusal(capsys, source, "-o", tmp_path / "out.gguf")
    assert (first.path / "measured").read_text() == "much"
    first.close()
    assert (WorkFolder(first.path, "another run", resume=True).path / "measured").exists()
    assert not (WorkFolder(tmp_path / "out.gguf.work", "yet another", resume=True).path / "measured").exists()


def test_a_result_leaves_nothing_of_stopped_runs_for_its_name(tiny_model: Callable[..., Path], tmp_path: Path):
    """Even where it measured nothing itself; but what a run is at and what is a user's own stay."""
    from edgert.quantize.work_folder import WorkFolder

    source, out = tiny_model("llama", quant=Type.BF16), tmp_path / "out.gguf"
    stopped = WorkFolder(tmp_path / "out.gguf.work", "a calibrated run", resume=False)
    (stopped.path / "calibrating").mkdir()
    (stopped.path / "calibrating" / "much.npy").write_text("much")
    fast = (source, "-o", out, "--fast", "--type", "q8_0", "-t", 1)
    run(*fast)
    assert (stopped.path / "calibrating" / "much.npy").exists()
    stopped.close()
    run(*fast)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    (tmp_path / "out.gguf.work").mkdir()
    (tmp_path / "out.gguf.work" / "precious").write_text("mine")
    run(*fast)
    assert (tmp_path / "out.gguf.work" / "precious").read_text() == "mine"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_no_numbers_leave_nothing(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: float
):
    with GGUFFile.open(tiny_model("llama", quant=Type.BF16)) as file:
        values = file.tensors["blk.1.ffn_up.weight"].dequantize()
    values[3, 5] = bad
    source = tiny_model("llama", quant=Type.BF16, weights={"blk.1.ffn_up.weight": values})
    for flags in (("--fast", "--type", "q8_0"), ("--bpw", "6")):
        assert "blk.1.ffn_up.weight" in refusal(capsys, source, "-o", tmp_path / "out.gguf", *flags)
    assert not list(tmp_path.iterdir())


def test_texts_of_one_name_and_short_ones(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source, out = tiny_model("llama", quant=Type.BF16), tmp_path / "out.gguf"
    (tmp_path / "other").mkdir()
    texts = [tmp_path / "t.txt", tmp_path / "other" / "t.txt"]
    for i, text in enumerate(texts):
        text.write_text("hello world and hello in the world " * (20 + i))
    (tmp_path / "one.txt").write_text("a")
    fast = (source, "-o", out, "--fast", "--type", "q8_0", "-t", 1)
    report = run(*fast, "--report-text", texts[0], "--report-text", texts[1])
    assert list(report["domains"]) == ["t", "t-2"]
    assert report["domains"]["t-2"]["n_tokens"] > report["domains"]["t"]["n_tokens"]
    out.unlink()
    assert "too short to compare on" in refusal(capsys, *fast[:-2], "--report-text", tmp_path / "one.txt")
    assert not out.exists()
    report = run(source, "-o", out, "--bpw", "6", "--calibration", texts[0], "-t", 1)
    assert any("tokens only" in notice for notice in report["notices"])


def test_a_text_that_is_not_there_leaves_nothing(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source, out = tiny_model("llama", quant=Type.BF16), tmp_path / "out.gguf"
    assert "none.txt cannot be read" in refusal(capsys, source, "-o", out, "--calibration", "none.txt")
    assert "none.txt cannot be read" in refusal(
        capsys, source, "-o", out, "--fast", "--type", "q8_0", "--report-text", "none.txt"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flag", "value"), [("--size", "-3MB"), ("--size", ""), ("--size", "q4_0"), ("--type", "12"), ("--bpw", "nan")]
)
def test_a_budget_that_is_none_is_told_by_its_flag(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
):
    source, out = tiny_model("llama", quant=Type.BF16), tmp_path / "out.gguf"
    assert cli.call(["quantize", str(source), "-o", str(out), flag, value]) == 2
    told, shown = capsys.readouterr().err, value if flag == "--bpw" else repr(value)
    assert f"Error: {flag} must be " in told and told.endswith(f", not {shown}.\n")
    assert not out.exists()


def test_fall_backs_of_a_kind_share_a_line():
    from edgert.quantize.report import Fallback, fallback_lines

    reason = "rows of 96 are no blocks of 256"
    names = ["token_embd.weight", *(f"blk.{i}.attn_q.weight" for i in (0, 1, 2, 7)), "blk.4.attn_k.weight"]
    lines = fallback_lines([Fallback(name, "Q4_K", "Q5_0", reason, 1.0) for name in names])
    assert [text.split(":")[0] for _, text in lines] == [
        "token_embd.weight", "blk.*.attn_q.weight (0-2, 7)", "blk.4.attn_k.weight",
    ]  # fmt: skip
    assert all(f"Q4_K -> Q5_0 ({reason}; +1.00 bits a weight)" in text for _, text in lines)


@pytest.mark.parametrize("verb", ["quantize", "sensitivity", "imatrix", "prune"])
def test_nothing_that_is_read_is_replaced(
    verb: str, tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Refused before the work, under the name itself or a link to it; so are names that cannot be written."""
    model, text, link = tmp_path / "m.gguf", tmp_path / "t.txt", tmp_path / "link.gguf"
    model.write_bytes(tiny_model("llama", quant=Type.BF16).read_bytes())
    text.write_text("hello world " * 2000)
    link.symlink_to(model)
    before = model.read_bytes(), text.read_bytes()
    start = ["imatrix", "-m", str(model), "-f", str(text)]
    if verb != "imatrix":
        start = [verb, str(model), "--calibration", str(text), *(("--layers", "1") if verb == "prune" else ())]
    for out, said in (
        (model, "would replace"),
        (link, "would replace"),
        (text, "would replace"),
        (tmp_path, "a folder or device has that name"),
        (tmp_path / "none" / "x.gguf", "does not exist"),
    ):
        code = cli.call([*start, "-o", str(out), "-t", "1"])
        errors = capsys.readouterr().err
        assert code in (1, 2), (out, errors)  # 2: the value of a flag is at fault
        assert said in errors or (out == tmp_path and "is a directory" in errors), (out, errors)
    assert (model.read_bytes(), text.read_bytes()) == before
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "t.txt", "link.gguf"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sensitivity", "bad.json"], "bad.json holds no sensitivities"),
        (["--imatrix", "bad.json"], "bad.json is no sound importance matrix"),
        (["--calibration", "none.txt"], "The text none.txt cannot be read (No such file or directory): name a file"),
        (["--report-text", "."], "The text . cannot be read (Is a directory): name a file"),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_the_work(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{}")
    assert cli.call(["quantize", str(tiny_model("llama", quant=Type.F32)), "-o", "out.gguf", *flags]) == 1
    assert capsys.readouterr().err.startswith(f"edgert: {said}")  # and "loading" does not come before
