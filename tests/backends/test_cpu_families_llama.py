"""Families that transformers has no class for, or that are another by another name: llama.cpp judges the same file."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from llama_oracle import llama_cpp_logits
from reference import Reference, kl_divergence
from tiny import write_tiny

from edgert import backends
from edgert.backends.base import Batch
from edgert.errors import UnsupportedFormatError
from edgert.quantize.architecture import describe
from edgert.quantize.gguf_file import GGUFFile

TOKENS = np.random.default_rng(11).integers(0, 384, 90).tolist()
N_LAYER, N_EMBD = 2, 128
RNG = np.random.default_rng(5)
BIASES = {
    f"{name}.bias": RNG.normal(0, 0.2, N_EMBD).astype(np.float32)
    for name in ("output_norm", *(f"blk.{i}.{part}_norm" for i in range(N_LAYER) for part in ("attn", "ffn")))
}
SECTIONS = {"rope.dimension_sections": [6, 5, 5, 0]}
LAYER_NORM = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
# family -> its keys beside a llama's, and options of write_tiny
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "baichuan": ({}, {"n_layer": 32, "n_head_kv": 4}),  # the 7B model is known by its layers
    "exaone": ({"rope.dimension_count": 32}, {"rope_factors": np.geomspace(1, 8, 16).tolist()}),
    "internlm2": ({}, {}),
    "minicpm": ({}, {}),
    "orion": (LAYER_NORM, {"n_head_kv": 4, "weights": BIASES}),
    "qwen2vl": (SECTIONS, {"bias": True, "eps": 1e-9}),  # llama.cpp does not read it here
    "qwen3vl": (SECTIONS, {}),
    "xverse": ({}, {"n_head_kv": 4}),
}
MINICPM = {"embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 0.7}  # read by granite's rules otherwise


def write(path: Path, family: str, **options: Any) -> Path:
    keys, usual = CASES[family]
    given = {f"{family}.{key}": value for key, value in (keys | options.pop("keys", {})).items()}
    return write_tiny(path, family, **{"n_layer": N_LAYER, "quant": Type.F32, **usual, **options}, metadata=given)


def cpu_logits(path: Path) -> np.ndarray:
    options = {"n_ctx": 128, "n_threads": 1, "cache_type_k": "f16", "cache_type_v": "f16"}
    with closing(backends.load(path, backend="cpu", **options)) as backend:
        return backend.forward(Batch.of(TOKENS, 0, 0, "all")).copy()


@pytest.mark.parametrize(
    "family", [name if name == "minicpm" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_logits_are_llama_cpps(family: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", family)
    expected = llama_cpp_logits(path, TOKENS)
    assert expected.std() > 0.2
    assert kl_divergence(expected, Reference(path, n_ctx=128).logits(TOKENS)).mean() < 1e-6
    assert kl_divergence(expected, cpu_logits(path)).mean() < 3e-5  # the cache is rounded to 16 bits


def test_multipliers_of_a_minicpm_file_count(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "minicpm", keys=MINICPM)
    expected = llama_cpp_logits(path, TOKENS)
    assert kl_divergence(expected, Reference(path).logits(TOKENS)).mean() < 1e-6
    assert kl_divergence(expected, cpu_logits(path)).mean() < 3e-5  # the cache is rounded to 16 bits
    usual = write(tmp_path / "usual.gguf", "minicpm")
    assert kl_divergence(expected, Reference(usual).logits(TOKENS)).mean() > 1e-3


def test_baichuan_with_slopes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "baichuan", n_layer=40)
    with GGUFFile.open(path) as file, pytest.raises(UnsupportedFormatError, match="ALiBi"):
        describe(file)
