"""`edgert imatrix`: makes, joins, converts and shows importance matrices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from edgert.cli.verbs.imatrix import command
from edgert.errors import EdgertError
from edgert.quantize.imatrix import read_imatrix


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", tied=True)


def test_make_show_join_and_convert(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Hello world, how is the world? " * 80)
    out = tmp_path / "a.gguf"
    result = run("-m", model, "-f", text, "-f", "code", "-c", 128, "--chunks", 4, "-o", out, "-t", 2)
    assert result.exit_code == 0, result.output
    assert "15 tensors, 4 chunks" in result.output
    made = read_imatrix(out)
    assert (made.n_chunks, made.chunk_size, made.datasets) == (4, 128, [text.name, "code"])
    assert made.counts["token_embd.weight"] == [512]

    shown = run("--show", out)
    assert "blk.1.ffn_down.weight" in shown.output
    assert "4 chunks of 128 tokens: text.txt, code" in shown.output
    facts = json.loads(run("--show", out, "--json").stdout)
    row = next(row for row in facts["tensors"] if row["tensor"] == "blk.1.ffn_down.weight")
    importance = made.importance("blk.1.ffn_down.weight")
    assert importance is not None
    assert row["mean_square"] == pytest.approx(float(importance.mean()), rel=1e-5)
    assert row["largest"] == pytest.approx(float(importance.max()), rel=1e-5)
    assert (row["columns"], row["tokens"], row["matrices"]) == (192, 512, 1)

    assert run("--in-file", out, "-o", tmp_path / "a.dat").exit_code == 0
    converted = read_imatrix(tmp_path / "a.dat").importance("blk.1.ffn_down.weight")
    assert converted is not None
    np.testing.assert_allclose(converted, importance, rtol=1e-5)

    joined = json.loads(run("--in-file", out, "--in-file", out, "-o", tmp_path / "b.gguf", "--json").stdout)
    assert (joined["tensors"], joined["chunks"], joined["unreached_experts"]) == (15, 8, {})
    assert read_imatrix(tmp_path / "b.gguf").counts["token_embd.weight"] == [1024]
    more = run("-m", model, "-f", text, "-c", 128, "--in-file", out, "-o", tmp_path / "c.gguf")
    assert more.exit_code == 0
    assert read_imatrix(tmp_path / "c.gguf").n_chunks > 4


def test_without_texts_the_sets_of_the_package(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.gguf"
    facts = json.loads(run("-m", model, "-c", 64, "--chunks", 6, "-o", out, "--json").stdout)
    assert {"code", "languages", "prose"} <= set(facts["texts"])
    assert read_imatrix(out).n_chunks == facts["chunks"] == 6


def test_refusals(model: Path, tmp_path: Path) -> None:
    assert "name a model" in run().output
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert "-m" in run("-f", "code", "--in-file", tmp_path / "x.gguf").output
    with pytest.raises(EdgertError, match="incomplete"):
        run("--show", tmp_path / "x.gguf")
    with pytest.raises(EdgertError, match="not an importance matrix"):
        run("--show", model)
    with pytest.raises(EdgertError, match="cannot be read"):
        run("-m", model, "-f", "absent.txt", "-o", tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()
