"""glm4moe (GLM 4.5, 4.6): a mixture with sigmoid gates and a shared expert behind dense layers."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture, Experts
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description; the larger model norms each head of q and k.

    Source: llama.cpp's src/models/glm4-moe.cpp; transformers' modeling_glm4_moe.py.
    """
    return common.describe(
        file,
        rope_style="neox",
        norms=("attn_norm", "post_attention_norm"),
        qk_norm="head" if "blk.0.attn_q_norm.weight" in file.tensors else "",
        experts=Experts(gating="sigmoid"),
    )
