"""Backends: token ids in, logits out. Registered by name and imported on use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgert.errors import BackendUnavailableError, RequestError

if TYPE_CHECKING:
    from edgert.backends.base import Backend
    from edgert.quantize.gguf_file import GGUFFile

NAMES = ("cpu", "llama", "onnx")
Progress = Callable[[int, int], None]


def load(
    model: GGUFFile | str | os.PathLike[str],
    *,
    backend: str = "auto",
    device: str | None = None,
    n_gpu_layers: int | None = None,
    require: bool = False,
    n_ctx: int = 0,
    n_threads: int | None = None,
    cache_type_k: str | None = None,
    cache_type_v: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Backend:
    """Loads a model file into a backend; "auto" takes the fastest whose answers are right (see `choice`).

    model:         a path, or an open file, which stays open
    device:        where it shall run, by a name that `edgert devices` shows, or "cpu", "gpu", "npu"; None: wherever
    n_gpu_layers:  layers that llama.cpp gives to GPUs; -1: all; None: as many as fit
    require:       raise when what was asked for cannot run the whole model, instead of running it elsewhere
    n_ctx:         positions that one sequence may have; 0: as many as the model was trained on
    cache_type_k, cache_type_v:  how keys and values are cached, by ggml's names of types; None: the backend's default
    progress:      called with (kernels compiled, kernels to compile) by a backend that compiles on first use
    options:       what the backend's class takes besides

    Raises: EdgertError and its subclasses, when the file, the machine or an option is at fault.
    """
    from edgert.quantize.gguf_file import GGUFFile

    if not isinstance(backend, str) or backend not in ("auto", *NAMES):
        raise BackendUnavailableError(f"There is no backend {backend!r}: choose auto, {', '.join(NAMES)}.")
    if device is not None and not isinstance(device, str):
        raise RequestError.wrong("device", "a name that `edgert devices` shows", device)
    if type(require) is not bool:
        raise RequestError.wrong("require", "True or False", require)
    if n_gpu_layers is not None and (type(n_gpu_layers) is not int or n_gpu_layers < -2):
        raise RequestError.wrong("n_gpu_layers", "a number of layers or -1 for all", n_gpu_layers)
    given = {"device": device, "n_gpu_layers": n_gpu_layers, "require": require or None}
    given |= {"cache_type_k": cache_type_k, "cache_type_v": cache_type_v}
    options |= {name: value for name, value in given.items() if value is not None}
    common = {"n_ctx": n_ctx, "n_threads": n_threads, "progress": progress}
    with nullcontext(model) if isinstance(model, GGUFFile) else GGUFFile.open(Path(model)) as file:
        if backend != "auto":
            return open_one(backend, file, common, options)
        from edgert.backends import choice

        return choice.choose(file, common, options)


def open_one(name: str, file: GGUFFile, common: Mapping[str, Any], options: Mapping[str, Any]) -> Backend:
    """One backend by its name; options are checked against what it takes. Raises: as `load`."""
    return OPENERS[name](file, dict(common), dict(options))


def _cpu(file: GGUFFile, common: dict[str, Any], options: dict[str, Any]) -> Backend:
    from edgert.backends.cpu.backend import CpuBackend

    device = str(options.pop("device", "cpu"))
    if device.lower() != "cpu":
        raise RequestError("device", f"is {device!r}, and the cpu backend runs on the cpu: choose another backend")
    if options.pop("n_gpu_layers", 0):
        raise RequestError("n_gpu_layers", "gives layers to a GPU, which the cpu backend does not use: choose llama")
    options.pop("require", None)
    check_options(options, CpuBackend)
    return CpuBackend(file, **common, **options)


def _llama(file: GGUFFile, common: dict[str, Any], options: dict[str, Any]) -> Backend:
    from edgert.backends.llama.backend import LlamaBackend

    names = {"cache_type_k": "type_k", "cache_type_v": "type_v"}
    options = {names.get(name, name): value for name, value in options.items()}
    common.pop("progress")
    check_options(options, LlamaBackend)
    return LlamaBackend(file, **common, **options)


def _onnx(file: GGUFFile, common: dict[str, Any], options: dict[str, Any]) -> Backend:
    from edgert.backends.onnx import providers

    if options.pop("n_gpu_layers", None) is not None:
        raise RequestError("n_gpu_layers", "is llama.cpp's: the onnx backend runs whole models on one device")
    for name in ("cache_type_k", "cache_type_v"):
        if (kind := options.pop(name, "f32")) != "f32":
            raise RequestError(name, f"is {kind!r}, and the onnx backend has f32 alone: leave it out")
    providers.open_runtime(options.get("device", "auto"))
    from edgert.backends.onnx.backend import OnnxBackend  # which takes both packages for granted

    check_options(options, OnnxBackend)
    return OnnxBackend(file, **common, **options)


Opener = Callable[["GGUFFile", dict[str, Any], dict[str, Any]], "Backend"]
OPENERS: dict[str, Opener] = {"cpu": _cpu, "llama": _llama, "onnx": _onnx}

_KINDS = {"int": int, "str": str, "bool": bool}
_WORDS = {int: "an integer", str: "a text", bool: "true or false"}


def check_options(options: Mapping[str, Any], backend: type[Backend]) -> None:
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
            raise RequestError.wrong(name, _WORDS[kind], value)
        if kind is int and value < (least := min(default, 1)):
            raise RequestError.wrong(name, f"at least {least}", value)
