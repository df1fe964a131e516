"""granite and granitemoe: embeddings, attention, residuals and logits are multiplied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture, Experts
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description with its multipliers.

    Source: llama.cpp's src/models/granite.cpp; transformers' modeling_granite.py.
    """
    keys = common.Keys(file)
    common_part = common.describe(file, rope_style="norm", experts=Experts())
    return common.scale_residuals(
        replace(
            common_part,
            embedding_scale=keys.number("embedding_scale", default=1.0),
            attention_scale=keys.number("attention.scale", default=common_part.attention_scale),
            logit_scale=1 / keys.number("logit_scale", default=1.0),
        ),
        keys.number("residual_scale", default=1.0),
    )
