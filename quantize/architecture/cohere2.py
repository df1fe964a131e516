"""cohere2 (Command R7B): command-r with windows on three of four layers, which alone are rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgert.quantize.architecture import command_r, common
from edgert.quantize.architecture.base import NO_ROPE, Architecture
from edgert.quantize.gguf_file import Model

PATTERN = 4  # of so many layers the last one sees the whole text


def describe(file: Model[Any]) -> Architecture:
    """Command-r's description with windows.

    Source: llama.cpp's src/models/cohere2.cpp; transformers' modeling_cohere2.py.
    """
    keys = common.Keys(file)
    common_part = command_r.describe(file)
    is_local = common.local_layers(keys, common_part.n_layer, PATTERN)
    layers = common.with_windows(common_part.layers, is_local, keys.integer("attention.sliding_window"))
    return replace(
        common_part, layers=tuple(layer if layer.window else replace(layer, rope=NO_ROPE) for layer in layers)
    )
