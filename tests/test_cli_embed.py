"""`edgert embed`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import edgert
from edgert.cli.verbs.embed import command


def embed(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(command, [*arguments, "-t", "1", "--backend", "cpu"], input=stdin)


@pytest.fixture(scope="module")
def path(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", n_ctx=512)


def test_vectors_by_line_and_as_json(path: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("hello world\n\nand you\n", encoding="utf-8")
    with edgert.load(path, n_threads=1, backend="cpu") as model:
        wanted = model.embed(["hello world", "and you"])
        longer = model.embed("and you", "last", normalize=False)
    lines = embed("-m", str(path), "-f", str(texts)).stdout.splitlines()
    assert np.allclose([[float(value) for value in line.split()] for line in lines], wanted, atol=1e-5)
    facts = json.loads(embed("-m", str(path), "-p", "hello world", "-p", "and you", "--json").stdout)
    assert [entry["index"] for entry in facts["data"]] == [0, 1] and facts["usage"]["prompt_tokens"] > 3
    assert np.allclose([entry["embedding"] for entry in facts["data"]], wanted, atol=1e-5)
    one = embed("-m", str(path), "--pooling", "last", "--no-normalize", stdin=b"and you").stdout
    assert np.allclose([float(value) for value in one.split()], longer, rtol=1e-4)
    assert np.linalg.norm(longer) > 1.1


def test_no_text_is_refused(path: Path) -> None:
    result = embed("-m", str(path), stdin=b"\n")
    assert result.exit_code == 2 and "no text" in result.output
