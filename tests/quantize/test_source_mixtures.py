"""Checkpoints of mixtures of experts to GGUF: transformers, the reference, edgert and llama.cpp give the same."""

from __future__ import annotations

import zlib
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from checkpoint_configs import MIXTURES
from checkpoints import logits_of, write_checkpoint
from llama_oracle import llama_cpp_logits
from reference import Reference, kl_divergence

from edgert import backends
from edgert.backends.base import Batch
from edgert.quantize.convert import convert
from edgert.quantize.gguf_file import GGUFFile
from edgert.quantize.source import open_source

TOKENS = np.random.default_rng(3).integers(6, 370, 90).tolist()
# A token near the border between two experts may take the other one; nothing else reaches these.
MEAN, MEDIAN = 1e-3, 1e-5


def agree(expected: np.ndarray, found: np.ndarray) -> bool:
    lost = kl_divergence(expected, found)
    return bool(lost.mean() < MEAN and np.median(lost) < MEDIAN)


# Those whose parts other families have as well.
KNOWN_PARTS = ("granitemoe-shared", "glm4moe", "ernie4.5-moe", "hunyuan-moe", "qwen3vlmoe")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in KNOWN_PARTS)) for name in MIXTURES]
)
def test_logits_equal_those_of_transformers_and_llama_cpp(name: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "hf", name)
    expected = logits_of(model, TOKENS)
    assert expected.std() > 0.5
    path = tmp_path / "m.gguf"
    convert(tmp_path / "hf", path, "F32")
    assert agree(expected, Reference(path).logits(TOKENS))
    options = {"n_ctx": 128, "n_threads": 2, "cache_type_k": "f16", "cache_type_v": "f16"}
    with closing(backends.load(path, backend="cpu", **options)) as backend:
        found = backend.forward(Batch.of(TOKENS, 0, 0, "all")).copy()
    assert agree(expected, found)
    assert agree(expected, llama_cpp_logits(path, TOKENS))
    with open_source(tmp_path / "hf") as source:
        assert source.describe().layers[-1].experts is not None


def checksum(values: np.ndarray) -> tuple[int, int]:
    """The number of values, and a checksum that does not depend on their order."""
    return values.size, zlib.crc32(np.sort(values, axis=None).astype(np.float32).tobytes())


@pytest.mark.parametrize("name", ["mixtral", "qwen2moe"])
def test_every_expert_of_the_checkpoint_is_in_the_file(name: str, tmp_path: Path) -> None:
    """Counts and checksums: each stored tensor is a tensor of the file, or a matrix in a stack of experts."""
    library = pytest.importorskip("safetensors.numpy")
    write_checkpoint(tmp_path / "hf", name)
    stored = library.load_file(tmp_path / "hf" / "model.safetensors")
    expected = Counter(checksum(values) for values in stored.values())
    assert sum("experts" in key for key in stored) > 3 * 3 and len(expected) == len(stored)
    convert(tmp_path / "hf", tmp_path / "m.gguf", "F32")
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        tensors = [tensor.dequantize() for tensor in file.tensors.values()]
    assert sum(tensor.ndim == 3 for tensor in tensors) >= 3
    matrices = [matrix for tensor in tensors for matrix in (tensor if tensor.ndim == 3 else [tensor])]
    assert Counter(map(checksum, matrices)) == expected
