"""granitemoe: granite whose feed-forward block is a mixture."""

from __future__ import annotations

from typing import Any

from edgert.quantize.architecture import granite
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """Granite's description; the experts are in the file."""
    return granite.describe(file)
