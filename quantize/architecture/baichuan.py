"""baichuan: the 7B models are llama; those of 13B have slopes in place of rotation, which edgert lacks."""

from __future__ import annotations

from typing import Any

from edgert.errors import UnsupportedFormatError
from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """The common description. Raises: UnsupportedFormatError for the larger model, which is known by its layers.

    Source: llama.cpp's src/models/baichuan.cpp.
    """
    if common.Keys(file).integer("block_count") == 40:
        raise UnsupportedFormatError(
            f"{file.path} is a baichuan model of 40 layers, whose attention has slopes (ALiBi), which edgert does not "
            "run; it runs the one of 32."
        )
    return common.describe(file, rope_style="norm")
