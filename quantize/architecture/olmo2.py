"""olmo2 (and OLMo 3): norms after the blocks and of whole rows of q and k, none before the blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture, Rope
from edgert.quantize.gguf_file import Model

PATTERN = 4  # of so many layers the last one sees the whole text


def describe(file: Model[Any]) -> Architecture:
    """The common description with other norms; files with a window have it on three of four layers.

    Source: llama.cpp's src/models/olmo2.cpp; transformers' modeling_olmo2.py and modeling_olmo3.py.
    """
    common_part = common.describe(
        file, rope_style="neox", norms=("post_attention_norm", "post_ffw_norm"), qk_norm="row"
    )
    keys = common.Keys(file)
    window = keys.integer("attention.sliding_window", default=0, least=0)
    is_local = common.local_layers(keys, common_part.n_layer, PATTERN)
    rope = common_part.layers[0].rope
    local = Rope(rope.n_dims, keys.number("rope.freq_base_swa", default=rope.base), rope.style)  # never stretched
    return replace(common_part, layers=common.with_windows(common_part.layers, is_local, window, local))
