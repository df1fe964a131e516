"""stablelm: layer norms, part of each head is rotated; the 12B model has parallel blocks and norms of heads."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description with layer norms; what the 12B model has is seen from the file.

    Source: llama.cpp's src/models/stablelm.cpp; transformers' modeling_stablelm.py.
    """
    parallel = "blk.0.ffn_norm.weight" not in file.tensors
    return common.describe(
        file,
        rope_style="neox",
        norm="layer",
        norms=("attn_norm",) if parallel else ("attn_norm", "ffn_norm"),
        qk_norm="heads" if "blk.0.attn_q_norm.weight" in file.tensors else "",
        parallel=parallel,
    )
