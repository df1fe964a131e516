"""Bits and floats: GGUF files, number formats, architectures, and the quantizer. Imports no backend, no device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgert.quantize.quantizer import quantize
    from edgert.quantize.report import Report

__all__ = ["Report", "quantize"]


def __getattr__(name: str) -> Any:  # reading a model needs nothing of what quantizing one does
    if name == "quantize":
        from edgert.quantize.quantizer import quantize

        return quantize
    if name == "Report":
        from edgert.quantize.report import Report

        return Report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
