"""phi2: one layer norm for attention and feed-forward, which stand side by side; part of each head is rotated."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description with biases everywhere and no gate.

    Source: llama.cpp's src/models/phi2.cpp; transformers' modeling_phi.py.
    """
    return common.describe(
        file,
        rope_style="neox",
        norm="layer",
        norms=("attn_norm",),
        gated=False,
        activation="gelu",
        parallel=True,
    )
