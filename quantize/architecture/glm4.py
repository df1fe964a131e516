"""glm4: norms before and after each block, fused gate and up, half of each head is rotated."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description with four norms.

    Source: llama.cpp's src/models/glm4.cpp; transformers' modeling_glm4.py.
    """
    return common.describe(
        file, rope_style="norm", norms=("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    )
