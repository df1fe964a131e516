"""qwen3moe: qwen3 whose feed-forward block is a mixture."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture, Experts
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description."""
    return common.describe(file, rope_style="neox", qk_norm="head", experts=Experts())
