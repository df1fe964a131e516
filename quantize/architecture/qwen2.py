"""qwen2 (and Qwen 2.5): biases on q, k and v."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description with biases."""
    return common.describe(file, rope_style="neox", qkv_bias=True)
