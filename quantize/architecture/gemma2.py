"""gemma2: windows on every other layer, norms before and after each block, soft-capped attention and logits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model

PATTERN = 2  # of so many layers the last one sees the whole text
WINDOW = 4096


def describe(file: Model[Any]) -> Architecture:
    """Gemma's description with windows and caps.

    Source: llama.cpp's src/models/gemma2.cpp; transformers' modeling_gemma2.py.
    """
    common_part = common.describe(
        file,
        rope_style="neox",
        activation="gelu",
        norms=("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
    )
    n_layer, n_embd = common_part.n_layer, common_part.n_embd
    scale = common_part.attention_scale
    if n_layer == 46:  # the 27B model divides by its n_embd / n_head, which is not its head_dim
        scale = 1 / math.sqrt(n_embd // common_part.n_head)
    keys = common.Keys(file)
    window = keys.integer("attention.sliding_window", default=WINDOW)
    is_local = common.local_layers(keys, n_layer, PATTERN)
    return replace(
        common_part,
        embedding_scale=math.sqrt(n_embd),
        attention_scale=scale,
        layers=common.with_windows(common_part.layers, is_local, window),
    )
