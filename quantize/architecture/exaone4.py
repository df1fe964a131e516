"""exaone4: norms after the blocks and of each head; the larger model sees windows, and rotates only in these."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import NO_ROPE, Architecture
from edgert.quantize.gguf_file import Model

PATTERN = 4  # of so many layers the last one sees the whole text


def describe(file: Model[Any]) -> Architecture:
    """The common description with other norms, and windows where the file has them.

    Source: llama.cpp's src/models/exaone4.cpp; transformers' modeling_exaone4.py.
    """
    a = common.describe(file, rope_style="neox", norms=("post_attention_norm", "post_ffw_norm"), qk_norm="head")
    keys = common.Keys(file)
    window = keys.integer("attention.sliding_window", default=0, least=0)
    if not window:
        return a
    layers = common.with_windows(a.layers, common.local_layers(keys, a.n_layer, PATTERN), window)
    return replace(a, layers=tuple(layer if layer.window else replace(layer, rope=NO_ROPE) for layer in layers))
