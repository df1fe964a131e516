"""lfm2 and lfm2moe: most layers have a short convolution in place of attention; heads of q and k are normed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture, Experts
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description; layers without key-value heads convolve.

    Source: llama.cpp's src/models/lfm2.cpp; transformers' modeling_lfm2.py.
    """
    a = common.describe(
        file,
        rope_style="neox",
        rope_base=1_000_000.0,
        qk_norm="head",
        experts=Experts(gating="sigmoid"),
        taps=common.Keys(file).integer("shortconv.l_cache", least=2),
    )
    outer = {name.replace("output_norm", "token_embd_norm"): shape for name, shape in a.outer.items()}
    window = common.Keys(file).integer("attention.sliding_window", default=0, least=0)
    layers = common.with_windows(a.layers, [layer.n_head_kv > 0 for layer in a.layers], window)
    return replace(a, outer=outer, layers=layers)
