"""nomic-bert (nomic-embed-text): BERT with rotated positions, a gate, and no biases."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture.base import Architecture
from edgert.quantize.architecture.bert import describe_encoder
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """An encoder with rotation and a gate.

    Source: llama.cpp's src/models/bert.cpp and nomic-bert.cpp.
    """
    return describe_encoder(file, rope_style="neox", gated=True, activation="silu")
