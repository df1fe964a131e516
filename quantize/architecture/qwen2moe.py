"""qwen2moe: qwen2 whose feed-forward block is a mixture with one expert that sees every token."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture, Experts
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description."""
    return common.describe(file, rope_style="neox", qkv_bias=True, experts=Experts(norm=False))
