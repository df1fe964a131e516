"""gptneox (and Pythia): attention and feed-forward side by side, each with a layer norm; part of a head rotates."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description with parallel blocks, unless the file says otherwise.

    Source: llama.cpp's src/models/gptneox.cpp; transformers' modeling_gpt_neox.py.
    """
    return common.describe(
        file,
        rope_style="neox",
        norm="layer",
        gated=False,
        activation="gelu_erf",
        parallel=file.get("gptneox.use_parallel_residual", bool, True),
    )
