"""olmoe: norms of all of q and k at once, and a mixture whose shares are not made to sum to 1."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture, Experts
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description."""
    return common.describe(file, rope_style="neox", qk_norm="row", experts=Experts(norm=False))
