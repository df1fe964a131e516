"""Low-bit language models on the machine in front of you."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from edgert.errors import (
    BackendUnavailableError,
    ContextFullError,
    DoesNotFitError,
    EdgertError,
    ModelFileError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
    UnsupportedFormatError,
)
from edgert.quantize import engine as _quantize_engine

if TYPE_CHECKING:
    from edgert.loading import load
    from edgert.model import Model
    from edgert.options import Options, SamplingParams
    from edgert.reply import Chunk, Progress, Reply, Stats
    from edgert.stream import Stream

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "Chunk",
    "ContextFullError",
    "DoesNotFitError",
    "EdgertError",
    "Model",
    "ModelFileError",
    "Options",
    "Progress",
    "QueueFullError",
    "QueueTimeoutError",
    "Reply",
    "RequestError",
    "SamplingParams",
    "Stats",
    "Stream",
    "UnsupportedFormatError",
    "load",
]

_HOMES = {
    "Model": "edgert.model",
    "load": "edgert.loading",
    "Options": "edgert.options",
    "SamplingParams": "edgert.options",
    "Chunk": "edgert.reply",
    "Progress": "edgert.reply",
    "Reply": "edgert.reply",
    "Stats": "edgert.reply",
    "Stream": "edgert.stream",
}


logging.getLogger("edgert").addHandler(logging.NullHandler())  # silent unless the program asks


def __getattr__(name: str) -> Any:  # numpy and the rest are imported when they are needed
    if home := _HOMES.get(name):
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'edgert' has no attribute {name!r}")


def _open_engine(source: Any, **options: Any) -> Any:
    """Runs models for `edgert.quantize`, which may not import what runs them."""
    return import_module("edgert.calibration_engine").open_engine(source, **options)


def _estimate(source: Any, n_ctx: int) -> Any:
    return import_module("edgert.calibration_engine").estimate(source, n_ctx)


_quantize_engine.register(_open_engine, _estimate)
