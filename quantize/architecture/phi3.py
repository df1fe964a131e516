"""phi3 (and Phi 3.5, Phi 4): fused products, long rope, on some a window."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description; tensors are fused where the file has them so.

    Source: llama.cpp's src/models/phi3.cpp; transformers' modeling_phi3.py.
    """
    common_part = common.describe(file, rope_style="neox")
    return common.with_one_window(file, common_part)
