"""qwen3: norms on each head of q and k."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description with norms on q and k."""
    return common.describe(file, rope_style="neox", qk_norm="head")
