"""nemotron: layer norms, squared relu without a gate, part of each head is rotated."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description with layer norms and no gate.

    Source: llama.cpp's src/models/nemotron.cpp; transformers' modeling_nemotron.py.
    """
    return common.describe(file, rope_style="neox", norm="layer", gated=False, activation="relu_sqr")
