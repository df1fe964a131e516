"""mistral3 (Ministral 3): llama whose queries grow beyond the original context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgert.quantize.architecture import common, llama
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.architecture.rope import original_context
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """Llama's description with a temperature of attention where the file has one.

    Source: llama.cpp's src/models/mistral3.cpp; transformers' modeling_ministral3.py.
    """
    keys = common.Keys(file)
    a = llama.describe(file)
    rope = replace(
        a.layers[0].rope,
        temperature=keys.number("attention.temperature_scale", default=0.0),
        n_ctx_original=original_context(keys),
    )
    return replace(a, layers=tuple(replace(layer, rope=rope) for layer in a.layers))
