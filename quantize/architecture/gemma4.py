"""gemma4: gemma3 with heads of two sizes, keys and values that layers share, and vectors of tokens for each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture, Layer, Rope
from edgert.quantize.gguf_file import Model

PATTERN = 6  # of so many layers the last one sees the whole text
LOCAL_ROPE_BASE = 10_000.0


def describe(file: Model[Any]) -> Architecture:
    """Layers with a window have heads and a rotation of their own; the last ones read others' keys and values.

    Source: llama.cpp's src/models/gemma4.cpp; transformers' modeling_gemma4.py.
    """
    keys = common.Keys(file)
    is_local = common.local_layers(keys, keys.integer("block_count"), PATTERN)
    full_dim = keys.integer("attention.key_length")
    local_dim = keys.integer("attention.key_length_swa", default=full_dim)
    a = common.describe(
        file,
        rope_style="neox",
        rope_base=1_000_000.0,
        activation="gelu",
        norms=("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
        qk_norm="head",
        head_dims=[local_dim if local else full_dim for local in is_local],
    )
    is_local = is_local[: a.n_layer]
    n_dims = keys.integer("rope.dimension_count_swa", default=local_dim)
    rope = Rope(n_dims, keys.number("rope.freq_base_swa", default=LOCAL_ROPE_BASE), "neox")
    layers = common.with_windows(a.layers, is_local, keys.integer("attention.sliding_window"), rope)
    n_per_layer = keys.integer("embedding_length_per_layer_input", default=0, least=0)
    return replace(
        a,
        embedding_scale=math.sqrt(a.n_embd),
        attention_scale=1.0,
        value_norm=True,
        layers=tuple(
            replace(layer, kv_layer=source, tensors=_tensors(file, i, layer, source, a.n_embd, n_per_layer))
            for i, (layer, source) in enumerate(zip(layers, _sources(keys, is_local), strict=True))
        ),
        outer=dict(a.outer) | (_per_layer(a, n_per_layer) if n_per_layer else {}),
    )


def _sources(keys: common.Keys, is_local: Sequence[bool]) -> list[int | None]:
    """Whose keys and values each layer reads: of the last ones those of the latest before them of their kind."""
    n_shared = keys.integer("attention.shared_kv_layers", default=0, least=0)
    first = len(is_local) - n_shared
    own = {local: i for i, local in enumerate(is_local[: max(first, 0)])}
    if first < 1 or set(is_local) - set(own):
        raise keys.error(
            "attention.shared_kv_layers", f"is {n_shared}, of {len(is_local)} layers: none is left to share with"
        )
    return [None if i < first else own[local] for i, local in enumerate(is_local)]


def _tensors(
    file: Model[Any], i: int, layer: Layer, source: int | None, n_embd: int, n_per_layer: int
) -> dict[str, tuple[int, ...]]:
    """What layer i has beside gemma3's tensors, and without those that it lacks."""
    lacks: tuple[str, ...] = ()
    if source is not None:
        lacks = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
    elif f"blk.{i}.attn_v.weight" not in file.tensors and f"blk.{i}.attn_k.weight" in file.tensors:
        lacks = ("attn_v.weight",)
    shapes = {name: shape for name, shape in layer.tensors.items() if name not in lacks}
    if n_per_layer:
        shapes |= {"inp_gate.weight": (n_per_layer, n_embd), "proj.weight": (n_embd, n_per_layer)}
        shapes["post_norm.weight"] = (n_embd,)
    if f"blk.{i}.layer_output_scale.weight" in file.tensors:
        shapes["layer_output_scale.weight"] = (1,)
    return shapes


def _per_layer(a: Architecture, n_per_layer: int) -> dict[str, tuple[int, ...]]:
    width = a.n_layer * n_per_layer
    return {
        "per_layer_token_embd.weight": (a.n_vocab, width),
        "per_layer_model_proj.weight": (width, a.n_embd),
        "per_layer_proj_norm.weight": (n_per_layer,),
    }
