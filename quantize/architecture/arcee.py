"""arcee: llama with squared relu in place of a gate."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description without a gate.

    Source: llama.cpp's src/models/arcee.cpp; transformers' modeling_arcee.py.
    """
    return common.describe(file, rope_style="norm", gated=False, activation="relu_sqr")
