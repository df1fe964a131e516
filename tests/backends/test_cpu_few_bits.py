"""Whole models in the number formats that edgert reads and does not write: the reference, edgert, llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import ggml
import numpy as np
import pytest
from checkpoints import write_checkpoint
from gguf import GGMLQuantizationType as Type
from llama_oracle import llama_cpp_logits
from reference import Reference, kl_divergence

from edgert import backends
from edgert.backends.base import Batch
from edgert.backends.cpu.layouts import CODEC_OF
from edgert.quantize.convert import convert

COVERED = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"}  # elsewhere
QUICK = ("IQ3_XXS",)
TOKENS = np.random.default_rng(11).integers(6, 370, 70).tolist()


def ours(path: Path, chunk: int = len(TOKENS), **options: object) -> np.ndarray:
    given = {"n_ctx": 128, "n_threads": 1, "cache_type_k": "f16", "cache_type_v": "f16", **options}
    with closing(backends.load(path, backend="cpu", **given)) as backend:
        pieces = [
            backend.forward(Batch.of(TOKENS[start : start + chunk], start, 0, "all")).copy()
            for start in range(0, len(TOKENS), chunk)
        ]
    return np.concatenate(pieces)


def distance(logits: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference, in standard deviations of the expected logits."""
    return float(np.sqrt(((logits - expected) ** 2).mean()) / expected.std())


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CODEC_OF if x not in COVERED]
)
def test_a_model_of_blocks_by_libggml(name: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Activations are rounded to 8 bits, by llama.cpp in blocks of 256."""
    floats = tiny_model("llama", quant=Type.F32, n_embd=256, n_head=4, head_dim=64, n_ff=512)
    path = ggml.rounded(floats, tmp_path / "m.gguf", {"token_embd.weight": "F16", "*": name})
    expected = Reference(path).logits(TOKENS)
    logits = ours(path)
    assert distance(logits, expected) < 0.04
    assert kl_divergence(expected, logits).mean() < 4 * 0.04**2
    assert distance(ours(path, 1), expected) < 0.04
    assert distance(llama_cpp_logits(path, TOKENS), logits) < 0.08


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small gpt-oss with sinks of the size of its scores."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    write_checkpoint(folder / "hf", "gpt-oss")
    convert(folder / "hf", folder / "m.gguf", "F32")
    return folder / "m.gguf"


@pytest.mark.slow
def test_sinks_take_their_share_of_attention(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at once, in chunks and token by token, in windows and without; beside float64."""
    reference = Reference(gpt_oss, np.float64)
    expected = reference.logits(TOKENS)
    for chunk in (len(TOKENS), 13, 1):
        assert np.median(kl_divergence(expected, ours(gpt_oss, chunk))) < 1e-5
    assert np.median(kl_divergence(expected, llama_cpp_logits(gpt_oss, TOKENS))) < 1e-5
    assert np.median(kl_divergence(expected, ours(gpt_oss, cache_type_k="q8_0", cache_type_v="q8_0"))) < 0.01
    whole = Reference.weight
    monkeypatch.setattr(
        Reference,
        "weight",
        lambda self, name, *rows: whole(self, name, *rows) - (99 if name.endswith("attn_sinks.weight") else 0),
    )
    assert np.median(kl_divergence(expected, Reference(gpt_oss, np.float64).logits(TOKENS))) > 0.01


@pytest.mark.slow
def test_experts_of_mxfp4(gpt_oss: Path, tmp_path: Path) -> None:
    """As gpt-oss is published: experts' matrices in MXFP4, all else of more bits."""
    path = ggml.rounded(gpt_oss, tmp_path / "m.gguf", {"*_exps.weight": "MXFP4"})
    assert Reference(path).tensors["blk.0.ffn_down_exps.weight"].tensor_type.name == "MXFP4"
    expected, logits, theirs = Reference(path).logits(TOKENS), ours(path), llama_cpp_logits(path, TOKENS)
    # The median, since tokens near the border between two experts may take the other one.
    assert np.median(kl_divergence(expected, logits)) < 0.005
    assert np.median(kl_divergence(theirs, logits)) < 0.01
