"""Backends: token ids in, logits out. Registered by name and imported on use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgert.errors import BackendUnavailableError, RequestError

if TYPE_CHECKING:
    from edgert.backends.base import Backend

NAMES = ("cpu", "llama", "onnx")


def load(
    path: str | os.PathLike[str],
    *,
    backend: str = "auto",
    n_ctx: int = 0,
    n_threads: int | None = None,
    cache_type_k: str | None = None,
    cache_type_v: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Backend:
    """Loads a model file into a backend; "auto" takes the cpu backend.

    n_ctx:     positions that one sequence may have; 0: as many as the model was trained on
    cache_type_k, cache_type_v:  how keys and values are cached, by ggml's names of types; None: the backend's default
    progress:  called with (kernels compiled, kernels to compile) by a backend that compiles on first use
    options:   what the backend's class takes besides

    Raises: EdgertError and its subclasses, when the file, the machine or an option is at fault.
    """
    from edgert.quantize.gguf_file import GGUFFile

    name = "cpu" if backend == "auto" else backend
    if not isinstance(name, str) or name not in NAMES:
        raise BackendUnavailableError(f"There is no backend {backend!r}: choose auto, {', '.join(NAMES)}.")
    with GGUFFile.open(Path(path)) as file:
        if name == "cpu":
            from edgert.backends.cpu.backend import CpuBackend

            options |= {"cache_type_k": cache_type_k, "cache_type_v": cache_type_v}
            _check(options, CpuBackend)
            return CpuBackend(file, n_ctx=n_ctx, n_threads=n_threads, progress=progress, **options)
        if name == "onnx":
            from edgert.backends.onnx.backend import OnnxBackend

            return OnnxBackend(file, n_ctx=n_ctx, n_threads=n_threads, progress=progress, **options)
        from edgert.backends.llama.backend import LlamaBackend

        types = {"type_k": cache_type_k, "type_v": cache_type_v}
        options |= {name: kind for name, kind in types.items() if kind is not None}
        _check(options, LlamaBackend)
        return LlamaBackend(file, n_ctx=n_ctx, n_threads=n_threads, **options)


_KINDS = {"int": int, "str": str, "bool": bool}


def _check(options: Mapping[str, Any], backend: type[Backend]) -> None:
    """Raises: RequestError for an option that the backend does not have, or of another type than it says."""
    import inspect

    parameters = inspect.signature(backend).parameters
    for name, value in options.items():
        if name not in parameters:
            raise RequestError(name, f"is not an option of this backend; known are {', '.join(parameters)}")
        annotation, default = str(parameters[name].annotation), parameters[name].default
        kind = _KINDS.get(annotation.removesuffix(" | None"))
        if kind is None or (value is None and annotation.endswith(" | None")):
            continue
        if type(value) is not kind:
            raise RequestError(name, f"must be of the type {kind.__name__}, not {type(value).__name__}")
        if kind is int and value < (least := min(default, 1)):
            raise RequestError(name, f"must be at least {least}, not {value}")
