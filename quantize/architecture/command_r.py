"""command-r: attention and feed-forward side by side of one layer norm without bias; scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description with parallel blocks; the larger model norms each head of q and k.

    Source: llama.cpp's src/models/command-r.cpp; transformers' modeling_cohere.py.
    """
    keys = common.Keys(file)
    common_part = common.describe(
        file,
        rope_style="norm",
        norm="layer",
        norms=("attn_norm",),
        qk_norm="heads" if "blk.0.attn_q_norm.weight" in file.tensors else "",
        parallel=True,
    )
    return replace(common_part, logit_scale=keys.number("logit_scale", default=1.0))
