"""smollm3: every fourth layer is not rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import NO_ROPE, Architecture
from edgert.quantize.gguf_file import Model

PERIOD = 4


def describe(file: Model[Any]) -> Architecture:
    """The common description without rotation on the last of four layers.

    Source: llama.cpp's src/models/smollm3.cpp; transformers' modeling_smollm3.py.
    """
    common_part = common.describe(file, rope_style="norm")
    layers = tuple(
        layer if (i + 1) % PERIOD else replace(layer, rope=NO_ROPE) for i, layer in enumerate(common_part.layers)
    )
    return replace(common_part, layers=layers)
