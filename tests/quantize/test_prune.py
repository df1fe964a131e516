"""Depth pruning: the written file is the model with the layers bypassed, and the least missed ones went."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Type
from llama_oracle import llama_cpp_logits

from edgert import cli
from edgert.cli.verbs.prune import command
from edgert.errors import RequestError
from edgert.quantize.engine import open_engine
from edgert.quantize.gguf_file import GGUFFile
from edgert.quantize.probing import Baseline
from edgert.quantize.prune import OUTPUTS, REMOVED, prune, units_of

TinyModel = Callable[..., Path]
TOKENS = np.array([1, 70, 80, 75, 90, 65, 72, 81, 66, 67, 68, 100, 101, 90], np.int32)
WORDS = "the lighthouse keeper counted the ships that passed before the storm "


@pytest.fixture(scope="module")
def source(tiny_model: TinyModel) -> Path:
    return tiny_model("llama", n_layer=5, quant=Type.BF16)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(WORDS * 150)
    return path


def test_the_file_is_the_model_with_its_layers_bypassed(source: Path, text: Path, tmp_path: Path):
    told = []
    result = prune(source, tmp_path / "out.gguf", 2, calibration=[str(text)], n_threads=1, on_step=told.append)
    assert told == result.steps and len(result.removed) == len(result.steps) == 2
    assert result.steps[0].kld < result.steps[1].kld
    with open_engine(source, n_threads=1) as engine, open_engine(tmp_path / "out.gguf", n_threads=1) as pruned:
        shapes = {}
        with GGUFFile.open(source) as file:
            shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        untouched = engine.logits(TOKENS).copy()  # valid until the next call
        for layer in result.removed:
            for name in OUTPUTS:
                engine.replace(f"blk.{layer}.{name}", np.zeros(shapes[f"blk.{layer}.{name}"], np.float32))
        expected = engine.logits(TOKENS)
        np.testing.assert_array_equal(pruned.logits(TOKENS), expected)
    assert np.abs(expected - untouched).max() > 0.1
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        assert file.metadata["llama.block_count"] == 3
        assert file.metadata[REMOVED] == ", ".join(map(str, result.removed))
    # llama.cpp reads the same model
    theirs = llama_cpp_logits(tmp_path / "out.gguf", TOKENS.tolist())
    np.testing.assert_allclose(theirs, expected, atol=0.05 * np.abs(expected).max())
    assert (theirs.argmax(1) == expected.argmax(1)).mean() > 0.9


def test_the_layer_that_is_missed_least_goes_first(source: Path, text: Path, tmp_path: Path):
    """Against every single layer, tried here by the files that lack it."""
    from edgert.quantize import prune as module

    result = prune(source, tmp_path / "out.gguf", 1, calibration=[str(text)], n_threads=1)
    with open_engine(source, n_threads=1) as engine:
        texts = module.TextParts.read(engine, [str(text)], (), module.CHUNK, 2 * module.CHUNKS * module.CHUNK)
        chunks = texts.training[: module.CHUNKS]
        baseline = Baseline(engine, chunks)
    losses = []
    for layer in range(5):
        with module.open_source(source) as opened:
            module.write_without(opened, tmp_path / "one.gguf", [layer])
        with open_engine(tmp_path / "one.gguf", n_threads=1) as engine:
            baseline._engine = engine
            losses.append(baseline.divergence())
    assert result.removed == [int(np.argmin(losses))]
    assert result.steps[0].kld == pytest.approx(min(losses), rel=1e-3)


def test_periods_of_windows_go_as_a_whole(tiny_model: TinyModel, text: Path, tmp_path: Path):
    model = tiny_model("gemma3", n_layer=12, quant=Type.BF16)
    with module_source(model) as opened:
        units = units_of(opened.describe().layers)
    assert units == [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)]
    with pytest.raises(RequestError, match="multiple of 6"):
        prune(model, tmp_path / "out.gguf", 2, calibration=[str(text)])
    result = prune(model, tmp_path / "out.gguf", 6, calibration=[str(text)], n_threads=1)
    assert result.removed in ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11])
    with open_engine(tmp_path / "out.gguf", n_threads=1) as pruned:
        ours = pruned.logits(TOKENS)
    theirs = llama_cpp_logits(tmp_path / "out.gguf", TOKENS.tolist())
    np.testing.assert_allclose(theirs, ours, atol=0.05 * np.abs(ours).max())


def module_source(path: Path):
    from edgert.quantize.source import open_source

    return open_source(path)


@pytest.mark.parametrize("n", [0, 5, 99])
def test_numbers_of_layers_that_cannot_go_are_refused(source: Path, tmp_path: Path, n: int):
    with pytest.raises(RequestError, match="from 1 to 4"):
        prune(source, tmp_path / "out.gguf", n)
    assert not list(tmp_path.iterdir())


def test_what_was_written_is_named(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.call(["prune", str(source), "-o", str(tmp_path / "out.gguf"), "--layers", "9"]) == 2
    assert capsys.readouterr().err.endswith("Error: --layers must be from 1 to 4, not 9.\n")


def test_the_source_is_never_replaced(source: Path):
    with pytest.raises(RequestError, match="would replace"):
        prune(source, source, 1)


def test_the_command_prints_every_step(source: Path, text: Path, tmp_path: Path):
    out = tmp_path / "out.gguf"
    arguments = [str(source), "-o", str(out), "--layers", "2", "--calibration", str(text), "-t", "1"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("mean KLD") == 2 and "experimental" in result.stdout
    facts = json.loads(CliRunner().invoke(command, [*arguments, "--json"]).stdout)
    assert facts["n_layer"] == 3 and len(facts["removed"]) == 2 and facts["paths"] == [str(out)]
