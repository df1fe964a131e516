"""llama (and Mistral, Mixtral, SmolLM, ...): rotates neighbours, for which GGUF stores q and k permuted."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture, Experts
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description."""
    return common.describe(file, rope_style="norm", experts=Experts())
