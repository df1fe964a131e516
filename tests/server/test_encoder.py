"""Embeddings of an encoder through the server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import serving
from test_encoders import assert_close, checkpoint, states

import edgert
from edgert.quantize.convert import convert
from edgert.server.registry import Spec


def test_the_server_embeds(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    reference, tokenizer = checkpoint(tmp_path / "hf", "cls_token")
    convert(tmp_path / "hf", tmp_path / "bert.gguf", "F32")
    spec = Spec("bert", tmp_path / "bert.gguf")
    with serving([spec], lambda source, **_: edgert.load(source, n_threads=1)) as server:
        reply = server.ok("/v1/embeddings", input=["Hello world", "naïve"])
        ids = [tokenizer.encode(text).ids for text in ("Hello world", "naïve")]
        wanted = states(reference, ids[0])[0]
        assert_close(np.array(reply["data"][0]["embedding"]), wanted / np.linalg.norm(wanted), 1e-3, 1e-5)
        assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))
        status, _ = server.post("/v1/completions", {"prompt": "Hello"})
        assert status == 400
