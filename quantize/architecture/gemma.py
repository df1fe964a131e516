"""gemma: scaled embeddings and the tanh form of gelu."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description with embeddings times the root of their width.

    Source: llama.cpp's src/models/gemma.cpp; transformers' modeling_gemma.py.
    """
    common_part = common.describe(file, rope_style="neox", activation="gelu")
    return replace(common_part, embedding_scale=math.sqrt(common_part.n_embd))
