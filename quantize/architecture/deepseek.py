"""deepseek (DeepSeekMoE) and bailingmoe (Ling): a mixture with shared experts, whose shares do not sum to 1."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture, Experts
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description; which layers are dense, and what shares are scaled by, is in the file.

    Source: llama.cpp's src/models/deepseek.cpp and bailingmoe.cpp.
    """
    return common.describe(file, rope_style="norm", experts=Experts(norm=False))
