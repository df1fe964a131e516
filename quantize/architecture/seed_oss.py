"""seed_oss (Seed-OSS): qwen2 whose second norm has another name."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description.

    Source: llama.cpp's src/models/seed-oss.cpp; transformers' modeling_seed_oss.py.
    """
    return common.describe(file, rope_style="neox", norms=("attn_norm", "post_attention_norm"))
