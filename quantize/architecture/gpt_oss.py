"""gpt-oss: attention with sinks, windows on every other layer, experts with biases and a clamped activation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture, Experts
from edgert.quantize.gguf_file import Model

PATTERN = 2  # of so many layers the last one sees the whole text


def describe(file: Model[Any]) -> Architecture:
    """The common description with windows.

    Source: llama.cpp's src/models/openai-moe.cpp; transformers' modeling_gpt_oss.py.
    """
    common_part = common.describe(
        file,
        rope_style="neox",
        rope_base=150_000.0,
        norms=("attn_norm", "post_attention_norm"),
        qkv_bias=True,
        activation="swiglu_oai",
        experts=Experts(gating="chosen", norm=False),
    )
    keys = common.Keys(file)
    is_local = common.local_layers(keys, common_part.n_layer, PATTERN)
    window = keys.integer("attention.sliding_window")
    return replace(common_part, layers=common.with_windows(common_part.layers, is_local, window))
