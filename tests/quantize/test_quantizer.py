"""From source to file: llama.cpp's own bytes where nothing is measured, budgets kept, stops survived, figures true."""

from __future__ import annotations

import ctypes
import json
import math
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from edgert.errors import DoesNotFitError, EdgertError, ModelFileError, RequestError
from edgert.quantize import Report, quantize
from edgert.quantize.formats import FORMATS, Format
from edgert.quantize.gguf_file import GGUFFile
from edgert.quantize.gguf_writer import Writer
from edgert.quantize.measuring import Measuring
from edgert.quantize.report import from_metadata
from edgert.quantize.sensitivity import Sensitivity
from edgert.quantize.source import open_source

TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def floats(tiny_model: TinyModel) -> Path:
    """A llama with rows of 256, so that every type divides, and two layers that mixes treat differently."""
    return tiny_model("llama", n_embd=256, head_dim=64, n_ff=512, n_layer=4, n_vocab=384, quant=Type.BF16)


@pytest.fixture(scope="module")
def odd(tiny_model: TinyModel) -> Path:
    """Rows of 96, which no block of 256 divides."""
    return tiny_model("llama", n_embd=96, n_head=3, n_head_kv=1, n_ff=192, n_layer=2, tied=False, quant=Type.F16)


def by_llama(source: Path, out: Path, file_type: int) -> None:
    """llama.cpp's own quantizer."""
    llama_cpp = pytest.importorskip("llama_cpp")
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = file_type, 1
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(parameters)) == 0


@pytest.mark.parametrize(
    ("mix", "file_type"),
    [("q4_0", 2), ("q4_1", 3), ("q5_0", 8), ("q5_1", 9), ("q8_0", 7), ("q2_k", 10), ("q3_k_s", 11), ("q3_k_m", 12),
     ("q3_k_l", 13), ("q4_k_s", 14), ("q4_k_m", 15), ("q5_k_s", 16), ("q5_k_m", 17), ("q6_k", 18), ("iq4_nl", 25),
     ("iq4_xs", 30)],
)  # fmt: skip
@pytest.mark.parametrize("width", ["even", "odd"])
def test_mixes_without_calibration_are_llama_cpps(
    floats: Path, odd: Path, tmp_path: Path, mix: str, file_type: int, width: str
):
    """The same types, and the same bytes of every tensor."""
    source = floats if width == "even" else odd
    by_llama(source, tmp_path / "theirs.gguf", file_type)
    report = quantize(source, tmp_path / "ours.gguf", budget=mix, calibration=(), report=False, n_threads=1)
    with GGUFFile.open(tmp_path / "theirs.gguf") as theirs, GGUFFile.open(tmp_path / "ours.gguf") as ours:
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name, tensor in theirs.tensors.items():
            assert ours.tensors[name].format == tensor.format, name
            np.testing.assert_array_equal(ours.tensors[name].data, tensor.data, err_msg=name)
        assert ours.metadata["general.file_type"] == theirs.metadata["general.file_type"] == file_type
    assert bool(report.fallbacks) == (width == "odd" and mix != "q8_0")  # the head's Q6_K at least


@pytest.mark.parametrize("budget", [4.6, 5.5, 8.0, "1600kB"])
def test_a_budget_is_kept_and_used(floats: Path, tmp_path: Path, budget: float | str):
    out = tmp_path / "out.gguf"
    report = quantize(floats, out, budget=budget, calibration=())
    assert report.n_bytes == out.stat().st_size
    if isinstance(budget, str):
        assert 0.97 * 1_600_000 <= report.n_bytes <= 1_600_000
    else:
        assert 0.97 * budget <= report.bits_per_weight <= budget


def test_a_budget_beyond_all_needs_keeps_the_floats(floats: Path, tmp_path: Path):
    report = quantize(floats, tmp_path / "out.gguf", budget="900TB", calibration=())
    assert set(report.types.values()) == {"BF16", "F32"}


def test_a_disk_without_room_is_told_before_the_measuring(
    floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr(Measuring, "engine", None)  # whoever measures fails
    with pytest.raises(DoesNotFitError, match=r"needs 1\.\d MB more and its disk has 0\.0 MB free"):
        quantize(floats, tmp_path / "out.gguf", budget=5.0)
    with pytest.raises(DoesNotFitError, match="its disk has"):
        quantize(floats, tmp_path / "out.gguf", budget="q8_0", calibration=())
    assert not list(tmp_path.iterdir())


def test_a_budget_that_cannot_be_kept_says_so(floats: Path, tmp_path: Path):
    with pytest.raises(DoesNotFitError, match=r"cannot be made so small: .* bytes more"):
        quantize(floats, tmp_path / "out.gguf", budget="100kB", calibration=())
    with pytest.raises(DoesNotFitError, match=r"cannot be made so small: .* Give \d\.\d+ bits per weight") as refused:
        quantize(floats, tmp_path / "out.gguf", budget=4.0, calibration=())
    assert not (tmp_path / "out.gguf").exists()
    needed = re.search(r"Give (\S+) bits", str(refused.value))
    assert needed and quantize(floats, None, budget=float(needed[1]), calibration=()).types


@pytest.mark.parametrize("width", ["even", "odd"])
def test_the_bits_of_the_smallest_types_can_be_asked_for(floats: Path, odd: Path, width: str):
    """The norms, which stay floats, would make 4.5 bits per weight impossible for every model."""
    report = quantize(floats if width == "even" else odd, None, budget=4.5, calibration=())
    matrices = {name for name, shape in report.shapes.items() if len(shape) > 1}
    smallest = "Q4_K" if width == "even" else "IQ4_NL"
    assert {report.types[name] for name in matrices} == {smallest}
    n_floats = sum(math.prod(shape) for name, shape in report.shapes.items() if name not in matrices)
    assert 8 * report.tensor_bytes == 4.5 * (report.n_weights - n_floats) + 32 * n_floats


@pytest.mark.parametrize("budget", ["12", "MB", -3, 0, float("nan"), 64, "q9_x", True])
def test_budgets_that_are_none_are_refused(floats: Path, tmp_path: Path, budget: object):
    with pytest.raises((RequestError, DoesNotFitError)):
        quantize(floats, tmp_path / "out.gguf", budget=budget, calibration=())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["n_threads", "seed", "calibration_tokens"])
@pytest.mark.parametrize("value", [-1, 1.5, "two", True])
def test_numbers_that_are_none_are_refused_by_name(floats: Path, tmp_path: Path, name: str, value: object):
    with pytest.raises(RequestError, match=f"^{name}: must be an integer, [01] at least, not {value!r}$"):
        quantize(floats, tmp_path / "out.gguf", calibration=(), **{name: value})  # type: ignore[arg-type]


def test_one_text_or_pattern_needs_no_list(floats: Path, tmp_path: Path):
    missing = tmp_path / "no such text.txt"
    for text in (str(missing), missing):
        with pytest.raises(EdgertError, match=r"no such text\.txt cannot be read"):
            quantize(floats, None, calibration=text)
        with pytest.raises(EdgertError, match=r"no such text\.txt cannot be read"):
            quantize(floats, tmp_path / "out.gguf", budget="q4_0", calibration=(), report_text=text)
    plan = quantize(floats, None, budget="q4_0", calibration=(), keep="attn_v")
    assert {type_ for name, type_ in plan.types.items() if "attn_v" in name} == {"BF16"}


def test_a_tensor_larger_than_a_file_is_told(floats: Path, tmp_path: Path):
    plan = quantize(floats, None, budget="q8_0", calibration=(), split_max_size="120kB")
    large = [name for name in plan.types if plan.bytes_of(name) > 120_000]
    assert len(large) > 2
    assert any(text.startswith(f"{large[0]} and {len(large) - 1} others alone exceed") for text in plan.notices)
    assert not quantize(floats, None, budget="q8_0", calibration=(), split_max_size="400kB").notices


def test_pins_are_obeyed_and_misspelt_ones_refused(floats: Path, tmp_path: Path):
    out = tmp_path / "out.gguf"
    quantize(
        floats, out, budget="q4_0", calibration=(), tensor_types={"ffn_down": "q8_0"}, keep=[r"blk\.0\.attn_v"],
        output_type="q6_k",
    )  # fmt: skip
    with GGUFFile.open(out) as file:
        assert {t.format.name for n, t in file.tensors.items() if "ffn_down" in n} == {"Q8_0"}
        assert file.tensors["blk.0.attn_v.weight"].format.name == "BF16"
        assert file.tensors["output.weight"].format.name == "Q6_K"
        assert file.tensors["blk.1.attn_v.weight"].format.name == "Q4_0"
    with pytest.raises(RequestError, match="ffn_dwon"):
        quantize(floats, out, calibration=(), tensor_types={"ffn_dwon": "q8_0"})


def test_a_prediction_says_what_it_leaves_out(floats: Path, tmp_path: Path):
    path = tmp_path / "sensitivity.json"
    with open_source(floats) as source:
        errors = {name: dict.fromkeys(FORMATS, 0.1) for name in source.tensors}
        Sensitivity(source.fingerprint, errors, dict.fromkeys(errors, 0.01)).save(path)
    given = {"budget": 9.0, "calibration": (), "sensitivity": path, "dry_run": True}
    whole = quantize(floats, None, **given)
    assert whole.predicted_kld and not [text for text in whole.notices if "prediction" in text]
    pinned = quantize(floats, None, **given, output_type="q6_k")
    assert "the prediction leaves out the 1 tensor whose types were given" in pinned.notices


def test_a_plan_writes_nothing_and_says_what_would_be(odd: Path, tmp_path: Path):
    plan = quantize(odd, None, budget="q4_k_m", calibration=(), dry_run=True)
    report = quantize(odd, tmp_path / "out.gguf", budget="q4_k_m", calibration=(), report=False)
    assert plan.types == report.types and plan.n_bytes == report.n_bytes
    assert {row.asked: row.used for row in report.fallbacks}["Q4_K"] == "Q5_0"
    assert list(tmp_path.iterdir()) == [tmp_path / "out.gguf"]


@pytest.fixture(scope="module")
def measured(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """A file made with everything: calibration, measured types, error feedback, figures."""
    out = tmp_path_factory.mktemp("measured") / "out.gguf"
    text = out.with_name("text.txt")
    rng = random.Random(5)
    text.write_text(" ".join("".join(rng.choices("the and world hello is in", k=6)) for _ in range(2500)))
    return out, quantize(floats, out, budget=5.0, calibration=[text], n_threads=2)


def test_a_measured_quantization_says_how_good_it_is(measured: tuple[Path, Report], floats: Path):
    out, report = measured
    methods = report.methods
    assert methods["token_embd.weight"] == "plain"  # rows are looked up in it
    assert {methods[name] for name in report.types if "blk" in name and "norm" not in name} <= {"feedback", "weighted"}
    (domain,) = report.domains.values()
    assert 0 < domain.kld_mean < domain.kld_99 <= domain.kld_999 and domain.n_tokens > 100
    assert report.predicted_kld is not None
    with GGUFFile.open(out) as file:
        facts, domains = from_metadata(file.metadata)
    assert facts["calibration_tokens"] == report.calibration_tokens > 0
    assert facts["rounded_feedback"] == list(report.methods.values()).count("feedback")
    assert domains["text"].kld_mean == pytest.approx(domain.kld_mean)
    assert json.loads(json.dumps(report.as_dict()))["bits_per_weight"] == report.bits_per_weight
    assert sorted(path.name for path in out.parent.iterdir()) == ["out.gguf", "text.txt"]


def test_what_is_measured_beats_what_is_guessed(measured: tuple[Path, Report], floats: Path, tmp_path: Path):
    out, report = measured
    text = out.with_name("text.txt")
    plain = quantize(
        floats, tmp_path / "plain.gguf", budget=5.0, calibration=(), report=True, report_text=[text], n_threads=2
    )
    assert report.n_bytes <= plain.n_bytes * 1.01
    assert report.domains["text"].kld_mean < 0.8 * plain.domains["text"].kld_mean


def test_every_reader_takes_it(measured: tuple[Path, Report]):
    out, report = measured
    reader = gguf.GGUFReader(out)
    assert {tensor.name: tensor.tensor_type.name for tensor in reader.tensors} == report.types


def test_shards_have_the_size_that_was_asked_for(floats: Path, tmp_path: Path):
    report = quantize(floats, tmp_path / "m.gguf", budget="q8_0", calibration=(), split_max_size="400kB", report=False)
    assert len(report.paths) > 2
    assert all(Path(path).stat().st_size < 420_000 for path in report.paths[1:])
    with GGUFFile.open(Path(report.paths[0])) as file:
        assert file.tensors.keys() == report.types.keys()


@pytest.mark.parametrize("budget", ["q4_0", 5.0])
def test_a_grid_that_weights_were_trained_for_is_kept(
    floats: Path, tiny_model: TinyModel, tmp_path: Path, budget: str | float
):
    """By the name of its type, and where types are chosen: nothing is lost there."""
    with GGUFFile.open(floats) as file:
        values = file.tensors["blk.0.ffn_up.weight"].dequantize()
    on_grid = gguf.dequantize(gguf.quantize(values * 3, Type.Q4_0), Type.Q4_0)
    weights = {"blk.0.ffn_up.weight": on_grid}
    source = tiny_model("llama", n_embd=256, head_dim=64, n_ff=512, quant=Type.BF16, weights=weights)
    report = quantize(source, tmp_path / "out.gguf", budget=budget, calibration=(), report=False)
    assert [name for name, method in report.methods.items() if method == "grid"] == ["blk.0.ffn_up.weight"]
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        np.testing.assert_allclose(
            file.tensors["blk.0.ffn_up.weight"].dequantize(), on_grid, rtol=2**-8
        )  # what bfloat16 left of it


@pytest.mark.parametrize("budget", ["q4_k_m", 4.7, 8.0])
def test_what_was_quantized_before_keeps_its_bytes_where_its_type_stays(
    floats: Path, tmp_path: Path, budget: str | float
):
    """By a mix and by budgets: below the source's size a few tensors are rounded again, above it none is."""
    source = tmp_path / "source.gguf"
    first = quantize(floats, source, budget="q4_k_m", calibration=(), report=False)
    assert first.bits_per_weight < 6 and not first.requantized
    report = quantize(source, tmp_path / "out.gguf", budget=budget, calibration=(), report=False, allow_requantize=True)
    with GGUFFile.open(source) as before, GGUFFile.open(tmp_path / "out.gguf") as after:
        same = {name for name, tensor in before.tensors.items() if after.tensors[name].format is tensor.format}
        for name in same:
            np.testing.assert_array_equal(after.tensors[name].data, before.tensors[name].data, err_msg=name)
        kept = {name for name, method in report.methods.items() if method == "kept"}
        assert kept == {name for name in same if before.tensors[name].format.block_size > 1}
        assert (same == before.tensors.keys()) == (budget != 4.7) and len(kept) >= 10
    assert report.requantized and report.bits_per_weight <= first.bits_per_weight
    said = [text for _, text in report.lines() if "quantized before" in text]
    assert len(said) == 1 and f"{len(kept)} of {len(report.types)} tensors keep their bytes" in said[0]


def test_types_that_cannot_be_made_can_be_kept(floats: Path, tmp_path: Path):
    """A tensor of MXFP4 stays one, by its name and where types are chosen."""
    source, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    rng = np.random.default_rng(5)
    name, shape = "blk.0.ffn_up.weight", (512, 256)
    blocks = rng.integers(0, 256, (512, 256 // 32 * 17), np.uint8)
    blocks[:, ::17] = 118
    rewritten(floats, source, {name: (shape, FORMATS["MXFP4"], blocks)})
    for flags in ({"budget": "q4_0", "keep": "ffn_up"}, {"budget": 5.0}):
        report = quantize(source, out, calibration=(), report=False, allow_requantize=True, **flags)  # type: ignore[arg-type]
        assert (report.types[name], report.methods[name]) == ("MXFP4", "kept")
        assert set(report.types.values()) - {"MXFP4", "F32", "BF16"}
        with GGUFFile.open(out) as file:
            np.testing.assert_array_equal(file.tensors[name].data, blocks)
        out.unlink()
    blocks[7, 17] = 255  # the scale of a block is NaN
    rewritten(floats, source, {name: (shape, FORMATS["MXFP4"], blocks)})
    with pytest.raises(ModelFileError, match=name):
        quantize(source, out, budget=5.0, calibration=(), report=False, allow_requantize=True)
    assert not out.exists()


def rewritten(source: Path, out: Path, changes: dict[str, tuple[tuple[int, ...], Format, np.ndarray]]) -> None:
    """The source's file with other tensors in the place of some: shape, format, uint8 (rows, row_bytes)."""
    with open_source(source) as opened:
        kept = {name: (t.shape, t.format, t.stored(0, t.n_rows)) for name, t in opened.tensors.items()} | changes
        with Writer(out, opened.metadata, [(name, shape, format) for name, (shape, format, _) in kept.items()]) as file:
            for name, (_, _, data) in kept.items():
                file.write(name, data)


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_nothing_and_goes_on(floats: Path, tmp_path: Path):
    """Runs killed at random moments, each going on from the one before; then one that may finish."""
    out, text = tmp_path / "out.gguf", tmp_path / "text.txt"
    rng = random.Random(6)
    text.write_text(" ".join("".join(rng.choices("the and world hello is in", k=6)) for _ in range(2500)))
    arguments = [sys.executable, "-m", "edgert", "quantize", str(floats), "-o", str(out), "--bpw", "5", "--resume"]
    arguments += ["--calibration", str(text), "-t", "1"]
    whole = quantize(floats, tmp_path / "whole.gguf", budget=5.0, calibration=[text], n_threads=1)
    expected = (tmp_path / "whole.gguf").read_bytes()[-100_000:]
    pauses = [rng.uniform(0.2, 1.2 * whole.seconds + 1) for _ in range(20)]  # fewer where a run takes long
    for pause in pauses[: max(5, int(200 / whole.seconds))]:
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if out.exists():  # it may have been whole just before the end
            assert out.read_bytes()[-100_000:] == expected
            out.unlink()
    subprocess.run(arguments, check=True, capture_output=True)
    assert out.read_bytes()[-100_000:] == expected
    assert not list(tmp_path.glob("out.gguf.*"))
