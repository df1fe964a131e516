"""falcon: attention and feed-forward side by side, of one layer norm or of two; few key-value heads."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description with parallel blocks and no gate.

    Source: llama.cpp's src/models/falcon.cpp; transformers' modeling_falcon.py.
    """
    two = "blk.0.attn_norm_2.weight" in file.tensors
    return common.describe(
        file,
        rope_style="neox",
        norm="layer",
        norms=("attn_norm", "attn_norm_2") if two else ("attn_norm",),
        gated=False,
        activation="gelu_erf",
        parallel=True,
    )
