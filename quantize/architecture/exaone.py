"""exaone (EXAONE 3, 3.5, Deep): llama that rotates halves."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description.

    Source: llama.cpp's src/models/exaone.cpp.
    """
    return common.describe(file, rope_style="neox")
