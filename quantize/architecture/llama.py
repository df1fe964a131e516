"""llama (and Mistral, SmolLM, ...): rotates neighbours, for which GGUF stores q and k permuted."""

from __future__ import annotations

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import GGUFFile


def describe(file: GGUFFile) -> Architecture:
    """The common description."""
    return common.describe(file, rope_style="norm")
