"""orion: llama with layer norms, which rotates halves."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description with layer norms.

    Source: llama.cpp's src/models/orion.cpp.
    """
    return common.describe(file, rope_style="neox", norm="layer")
