"""Checkpoints in names of their own and of models that see: what transformers computes, edgert and llama.cpp do."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import SEEING, logits_of, write_checkpoint
from llama_oracle import llama_cpp_logits
from reference import Reference, kl_divergence
from relatives import RELATIVES, write_relative

from edgert import backends
from edgert.backends.base import Batch
from edgert.quantize import architecture
from edgert.quantize.checkpoint.families import FAMILIES
from edgert.quantize.convert import convert

TOKENS = np.random.default_rng(3).integers(6, 370, 90).tolist()
LLAMA_CPP = {"qwen2vl": 1e-5, "qwen2.5vl": 1e-5}  # it takes another epsilon than theirs


def test_what_runs_can_be_converted() -> None:
    assert set(architecture.FAMILIES) == {family.name for family in FAMILIES}


def written(folder: Path, name: str, **changes: Any) -> Any:
    """The checkpoint, and transformers' model of it."""
    return write_relative(folder, name, **changes) if name in RELATIVES else write_checkpoint(folder, name, **changes)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "baichuan")) for name in (*RELATIVES, *SEEING)]
)
def test_logits_are_transformers(name: str, tmp_path: Path) -> None:
    expected = logits_of(written(tmp_path / "hf", name), TOKENS)
    assert expected.std() > 0.5
    convert(tmp_path / "hf", tmp_path / "m.gguf", "F32")
    assert kl_divergence(expected, Reference(tmp_path / "m.gguf").logits(TOKENS)).mean() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RELATIVES, *SEEING])
def test_both_engines_compute_the_same(name: str, tmp_path: Path) -> None:
    expected = logits_of(written(tmp_path / "hf", name), TOKENS)
    convert(tmp_path / "hf", tmp_path / "m.gguf", "F32")
    options = {"n_ctx": 128, "n_threads": 1, "cache_type_k": "f16", "cache_type_v": "f16"}
    with closing(backends.load(tmp_path / "m.gguf", backend="cpu", **options)) as backend:
        logits = backend.forward(Batch.of(TOKENS, 0, 0, "all")).copy()
    lost = kl_divergence(expected, logits)  # the cache is rounded to 16 bits, so that a token may take another expert
    assert np.median(lost) < 1e-5 and lost.mean() < 1e-3
    assert kl_divergence(expected, llama_cpp_logits(tmp_path / "m.gguf", TOKENS)).mean() < LLAMA_CPP.get(name, 1e-9)
