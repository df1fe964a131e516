"""gemma3: windows on most layers, norms before and after each block and on q and k, scaled embeddings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture, Layer, Rope
from edgert.quantize.gguf_file import Model

PATTERN = 6  # of so many layers the last one sees the whole text
LOCAL_ROPE_BASE = 10_000.0
WINDOWS = {
    18: 512,
    26: 512,
    34: 1024,
    48: 1024,
    62: 1024,
}  # published sizes, by n_layer, for files without the key


def describe(file: Model[Any]) -> Architecture:
    """The common description with gemma's norms; layers alternate between a window and the whole text.

    Source: llama.cpp's src/models/gemma3.cpp; Gemma 3 technical report, arXiv 2503.19786.
    """
    common_part = common.describe(
        file,
        rope_style="neox",
        rope_base=1_000_000.0,
        activation="gelu",
        norms=("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
        qk_norm="head",
    )
    n_layer, n_embd = common_part.n_layer, common_part.n_embd
    scale = common_part.attention_scale
    if n_layer == 62:  # the 27B model divides by its n_embd / n_head, which is not its head_dim
        scale = 1 / math.sqrt(n_embd // common_part.n_head)
    return replace(
        common_part,
        embedding_scale=math.sqrt(n_embd),
        attention_scale=scale,
        layers=_layers(common.Keys(file), common_part.layers),
    )


def _layers(keys: common.Keys, full: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Replaces the rope and the window of the local layers."""
    n_layer = len(full)
    window = keys.integer("attention.sliding_window", default=-1, least=0)
    if window < 0:
        window = WINDOWS.get(n_layer, 0)
        common.warn_default(
            keys.file, keys.name("attention.sliding_window"), f"a window of {window}" if window else "no window"
        )
    if window == 0:
        return full
    base = keys.number("rope.freq_base_swa", default=LOCAL_ROPE_BASE)
    return tuple(
        replace(layer, window=window, rope=Rope(layer.rope.n_dims, base, "neox")) if is_local else layer
        for layer, is_local in zip(full, common.local_layers(keys, n_layer, PATTERN), strict=True)
    )
