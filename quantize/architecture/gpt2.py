"""gpt2: a table of positions in place of rotation, layer norms, biases, no gate."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description without rotation.

    Source: llama.cpp's src/models/gpt2.cpp; transformers' modeling_gpt2.py.
    """
    return common.describe(file, rope_style=None, norm="layer", gated=False, activation="gelu")
