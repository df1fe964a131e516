"""The reference itself: against transformers' implementations, and against llama.cpp on real models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_configs import SIZES
from checkpoints import make_model
from gguf import GGMLQuantizationType as Type
from llama_oracle import llama_cpp_logits, llama_cpp_tokens
from reference import Reference, kl_divergence
from tiny import FAMILIES, vocabulary_metadata, write_gguf

TEXT = (
    "The lighthouse keeper counted the ships that passed before the storm, and wrote each name in a book. "
    "In the morning the sea was calm again, and only one of them had come back to the harbour."
)

# Converted here without edgert's converter, which test_source_families.py holds against transformers for every family.
NAMES = (
    *("llama", "llama-head", "llama-bias", "llama-linear", "llama-3", "mistral"),
    *("qwen2", "qwen3", "gemma3", "gemma3-linear"),
)


def write_transformer(path: Path, name: str, model: Any) -> Path:
    """The conversion to GGUF that llama.cpp defines: names, permuted q and k of llama, norms of gemma plus 1."""
    family, config = name.split("-")[0].replace("mistral", "llama"), model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weights = {}
    for key, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        if family == "llama" and ("q_proj" in key or "k_proj" in key):
            halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        if family == "gemma3" and key.endswith("norm.weight"):
            weight = weight + 1
        if not key.endswith("o_proj.bias"):
            weights[gguf_name(key, family)] = weight
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if rope["rope_type"] == "llama3":
        weights["rope_freqs.weight"] = llama3_factors(rope, head_dim)
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "attention.sliding_window": config.sliding_window if family == "gemma3" else None,
    }
    if rope["rope_type"] == "linear":
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    keys = {f"{family}.{key}": value for key, value in metadata.items()}
    return write_gguf(path, family, weights, keys | vocabulary_metadata("bpe", config.vocab_size, family))


def gguf_name(key: str, family: str) -> str:
    parts = {
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm" if family == "gemma3" else "ffn_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    stem, kind = key.removeprefix("model.").rsplit(".", 1)
    if stem.startswith("layers."):
        _, i, stem = stem.split(".", 2)
        return f"blk.{i}.{parts[stem]}.{kind}"
    return f"{parts[stem]}.{kind}"


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """The divisors of the frequencies: 1 for short waves, `factor` for long ones, a blend between."""
    wavelength = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] / wavelength
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - blend) / rope["factor"] + blend)).astype(np.float32)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_transformers(name: str, tied: bool, tmp_path: Path) -> None:
    """90 tokens: past the original context of llama-3's scaling, and many windows of gemma3."""
    model = make_model(name, tied)
    import torch

    tokens = np.random.default_rng(3).integers(0, SIZES["vocab_size"], 90)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)[None]).logits[0].numpy()
    logits = Reference(write_transformer(tmp_path / "model.gguf", name, model)).logits(tokens.tolist())
    assert expected.std() > 0.5
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_near_float64(family: str, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model(family, quant=Type.Q4_0)
    tokens = np.random.default_rng(4).integers(0, 384, 40).tolist()
    single, double = Reference(path).logits(tokens), Reference(path, np.float64).logits(tokens)
    assert double.dtype == np.float64
    assert np.abs(single - double).max() < 1e-4


def test_causal(tiny_model: Callable[..., Path]) -> None:
    """Later tokens do not change earlier logits; a window forgets what lies before it."""
    tokens = np.random.default_rng(5).integers(0, 384, 40).tolist()
    model = Reference(tiny_model("gemma3", n_layer=1, window=8))
    whole = model.logits(tokens)
    np.testing.assert_allclose(model.logits(tokens[:20]), whole[:20], atol=1e-5)
    np.testing.assert_allclose(model.logits(tokens, last=True)[0], whole[-1], atol=1e-5)
    changed = model.logits([1, 2, 3, *tokens[3:]])
    assert np.abs(changed[9] - whole[9]).max() > 1e-3  # still sees token 2
    np.testing.assert_allclose(changed[10:], whole[10:], atol=1e-5)  # sees 3 to 10


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_files_are_llama_cpps(family: str, tiny_model: Callable[..., Path]) -> None:
    """llama.cpp reads the tiny models and computes the same: the writer follows its conventions."""
    path = tiny_model(family, quant=Type.F32)
    tokens = np.random.default_rng(6).integers(0, 384, 64).tolist()
    logits = Reference(path).logits(tokens)
    assert np.abs(llama_cpp_logits(path, tokens) - logits).max() < 0.02 * np.abs(logits).max()


@pytest.mark.parametrize("model", ["smollm2_path", pytest.param("gemma3_path", marks=pytest.mark.slow)])
def test_real_model_is_near_llama_cpp(model: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    tokens = llama_cpp_tokens(path, TEXT * 2)[:64]
    assert len(tokens) == 64
    logits = Reference(path, cache=False).logits(tokens)
    divergence = kl_divergence(logits, llama_cpp_logits(path, tokens))
    assert divergence.mean() < 0.01
