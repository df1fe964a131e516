"""Tiny random mixtures of experts as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from tiny import random_weight, vocabulary_metadata, write_gguf

MIXTURES = ("llama", "qwen2moe", "qwen3moe")
# Of these transformers has no class, or one that it does not share with the rest: llama.cpp alone judges.
OTHERS = ("deepseek", "bailingmoe", "hunyuan-moe", "ernie4_5-moe", "glm4moe", "qwen3vlmoe")
SHARED = ("qwen2moe", *OTHERS[:-1])  # have an expert that sees every token
DENSE_FIRST = ("deepseek", "ernie4_5-moe", "glm4moe")  # their first layer is no mixture
N_EXPERT, N_USED = 6, 2


def write_mixture(
    path: Path,
    family: str,
    *,
    n_layer: int = 2,
    n_embd: int = 128,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 32,
    n_ff: int = 96,
    n_shared: int = 64,
    n_expert: int = N_EXPERT,
    n_used: int = N_USED,
    n_vocab: int = 384,
    n_ctx: int = 512,
    quant: Type | Mapping[str, Type] = Type.Q4_0,
    fused: bool = False,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """A random model of the family; routers stay float32.

    n_shared:  n_ff of qwen2moe's shared expert
    fused:     gate and up of all experts in one tensor
    """
    rng = np.random.default_rng(seed)
    q, kv = n_head * head_dim, n_head_kv * head_dim
    keys: dict[str, Any] = {
        f"{family}.{key}": value
        for key, value in {
            "block_count": n_layer,
            "context_length": n_ctx,
            "embedding_length": n_embd,
            "feed_forward_length": n_ff,
            "attention.head_count": n_head,
            "attention.head_count_kv": n_head_kv,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 1e4,
            "expert_count": n_expert,
            "expert_used_count": n_used,
        }.items()
    }
    if family != "llama":
        keys[f"{family}.expert_feed_forward_length"] = n_ff
    if family in SHARED:
        keys[f"{family}.expert_shared_feed_forward_length"] = n_shared
    if family in OTHERS:
        keys[f"{family}.expert_shared_count"] = int(family in SHARED)
        keys |= {f"{family}.leading_dense_block_count": int(family in DENSE_FIRST)}
        keys |= {f"{family}.interleave_moe_layer_step": 1, f"{family}.attention.key_length": head_dim}
        keys[f"{family}.attention.value_length"] = head_dim
    if family == "qwen3vlmoe":  # of text all axes have the same position
        keys[f"{family}.rope.dimension_sections"] = [6, 5, 5, 0]
    if family in ("deepseek", "bailingmoe", "glm4moe"):  # llama.cpp takes the width of an expert for it
        n_shared = n_ff
        keys[f"{family}.expert_shared_feed_forward_length"] = n_ff
        keys |= {f"{family}.expert_weights_scale": 1.5, f"{family}.expert_weights_norm": family == "glm4moe"}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd)}
    for i in range(n_layer):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (n_embd,),
            "attn_q.weight": (q, n_embd),
            "attn_k.weight": (kv, n_embd),
            "attn_v.weight": (kv, n_embd),
            "attn_output.weight": (n_embd, q),
            "post_attention_norm.weight" if family == "glm4moe" else "ffn_norm.weight": (n_embd,),
        }
        if family in ("qwen3moe", "qwen3vlmoe", "hunyuan-moe"):
            layer |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        if family in DENSE_FIRST and not i:
            layer |= {f"ffn_{part}.weight": (n_ff, n_embd) for part in ("gate", "up")}
            shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
            shapes[f"blk.{i}.ffn_down.weight"] = (n_embd, n_ff)
            continue
        layer |= {"ffn_gate_inp.weight": (n_expert, n_embd), "ffn_down_exps.weight": (n_expert, n_embd, n_ff)}
        if family in ("ernie4_5-moe", "glm4moe"):
            layer["exp_probs_b.bias"] = (n_expert,)
        if fused:
            layer["ffn_gate_up_exps.weight"] = (n_expert, 2 * n_ff, n_embd)
        else:
            layer |= {f"ffn_{part}_exps.weight": (n_expert, n_ff, n_embd) for part in ("gate", "up")}
        if family in SHARED:
            layer |= {f"ffn_{part}_shexp.weight": (n_shared, n_embd) for part in ("gate", "up")}
            layer["ffn_down_shexp.weight"] = (n_embd, n_shared)
        if family == "qwen2moe":
            layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
            layer["ffn_gate_inp_shexp.weight"] = (n_embd,)
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= {"output_norm.weight": (n_embd,), "output.weight": (n_vocab, n_embd)}
    weights = {name: random_weight(rng, name, shape, False) for name, shape in shapes.items()}
    for name, weight in weights.items():
        if name.endswith("ffn_gate_inp.weight"):
            weight *= 3  # so that shares differ
    types = {"*ffn_gate_inp.weight": Type.F32, **quant} if isinstance(quant, Mapping) else {
        "*ffn_gate_inp.weight": Type.F32, "*": quant,
    }  # fmt: skip
    keys |= vocabulary_metadata("bpe", n_vocab, family) | dict(metadata or {})
    return write_gguf(path, family, weights, keys, types, rng)
