"""starcoder2: layer norms, biases, no gate, on some a window."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description with layer norms and no gate, and a window where the file has one.

    Source: llama.cpp's src/models/starcoder2.cpp; transformers' modeling_starcoder2.py.
    """
    common_part = common.describe(file, rope_style="neox", norm="layer", gated=False, activation="gelu")
    return common.with_one_window(file, common_part)
