"""hunyuan-dense and hunyuan-moe: each head of q and k is normed after the rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture, Experts
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description with late norms.

    Source: llama.cpp's src/models/hunyuan-vl.cpp and hunyuan-moe.cpp; transformers' modeling_hunyuan_v1_dense.py.
    """
    return replace(common.describe(file, rope_style="neox", qk_norm="head", experts=Experts()), rope_first=True)
