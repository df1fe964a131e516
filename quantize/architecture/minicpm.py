"""minicpm: llama with multipliers that follow from the sizes when the file lacks them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """Granite's description with other defaults.

    Source: llama.cpp's src/models/minicpm.cpp; transformers' modeling_minicpm.py of the checkpoint.
    """
    keys = common.Keys(file)
    common_part = common.describe(file, rope_style="norm")
    return common.scale_residuals(
        replace(
            common_part,
            embedding_scale=keys.number("embedding_scale", default=12.0),
            logit_scale=1 / keys.number("logit_scale", default=256 / common_part.n_embd),
        ),
        keys.number("residual_scale", default=1.4 / math.sqrt(common_part.n_layer)),
    )
