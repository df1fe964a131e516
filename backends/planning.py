"""What a model needs on each device of this machine, whether it fits, and how fast it will be: before it is loaded."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgert.backends import choice, excerpts
from edgert.backends.cpu.footprint import Footprint, draft_bytes, footprint, smaller_types
from edgert.backends.cpu.rates import Rates, predict
from edgert.devices import accelerators, fitting, probe
from edgert.errors import DoesNotFitError, EdgertError
from edgert.quantize.architecture import Architecture, describe
from edgert.quantize.gguf_file import GGUFFile

Types = tuple[str | None, str | None]


@dataclass(frozen=True)
class Place:
    """A model on a backend and device: bytes by purpose, and tokens per second, None where they are not known.

    memory:           weights, kv (of all conversations), draft, prompt_cache, buffers, program, total
    missing:          bytes, 0 where it fits
    largest_context:  that fits
    layers:           that go to GPUs, of all, where the device is one
    remedy:           what would make it fit, or usable
    basis:            where the rates come from, or what would tell them
    """

    backend: str
    device: str
    memory: dict[str, int]
    available: int
    missing: int
    largest_context: int
    remedy: str = ""
    layers: tuple[int, int] | None = None
    prefill: float | None = None
    decode: float | None = None
    decode_at_end: float | None = None
    basis: str = ""
    obstacle: str = ""

    @property
    def fits(self) -> bool:
        return not self.missing

    def refusal(self, what: str) -> DoesNotFitError:
        """The error for a model that does not fit here."""
        needed = self.memory["total"]
        return DoesNotFitError(f"{what} {fitting.missing(needed, needed - self.missing)}; {self.remedy}.")


@dataclass(frozen=True)
class Request:
    """What shall be run: a context for each of n_parallel conversations, and a draft beside the model.

    made_draft:  the one that comes with the model: where none is named it guesses, on the cpu backend alone
    excerpts:    run some of the model's layers on backends of which nothing is known, where the model fits
    on_excerpt:  called with a text, and with the part of the time it takes at most, before that is done and while
    """

    file: GGUFFile
    n_ctx: int
    n_parallel: int = 1
    types: Types = (None, None)
    draft: GGUFFile | None = None
    made_draft: GGUFFile | None = None
    excerpts: bool = False
    n_threads: int | None = None
    on_excerpt: Callable[[str, float], object] = lambda _text, _share: None


def places(request: Request, machine: Callable[[], Rates] | None) -> list[Place]:
    """The cpu backend first, then every device that another could use.

    machine:  gives the rates of this machine for the model's heads, where the model fits; None leaves predictions out
    """
    a = describe(request.file)
    found = [_on_cpu(replace(request, draft=request.draft or request.made_draft), a, machine)]
    found += _on_gpus(request, a)
    found += _on_llama(request, a)
    found += _on_onnx(request, a)
    return found


def _draft_bytes(request: Request, n_ctx: int) -> int:
    return 0 if request.draft is None else draft_bytes(request.draft, n_ctx, request.n_parallel)


def _memory(cost: Footprint, draft: int) -> dict[str, int]:
    """Earlier prompts are kept in the cache's own pages: they take nothing besides."""
    parts = {"weights": cost.weights, "kv": cost.kv, "draft": draft, "prompt_cache": 0, "buffers": cost.buffers}
    parts["program"] = cost.program
    return parts | {"total": sum(parts.values())}


def _on_cpu(request: Request, a: Architecture, machine: Callable[[], Rates] | None) -> Place:
    file, n_ctx = request.file, request.n_ctx

    def cost(n: int, types: Types = request.types) -> Footprint:
        return footprint(file, a, n, n_full=request.n_parallel, types=types)

    def needed(n: int, types: Types = request.types) -> int:
        return cost(n, types).total + _draft_bytes(request, n)

    memory = _memory(cost(n_ctx), _draft_bytes(request, n_ctx))
    available = probe.probe().memory_available + probe.process_memory()[0]  # which `program` counts as well
    smaller = {name: functools.partial(needed, types=(name, name)) for name in smaller_types(a, request.types)}
    place = _place("cpu", "cpu", memory, available, needed, a, n_ctx, smaller)
    if machine is None or not place.fits:
        return place
    table = 0 if a.tied_head else file.tensor("token_embd.weight").n_bytes
    one = footprint(file, a, n_ctx, types=request.types)
    found = predict(a, one, n_ctx, _read_at_end(a, one, n_ctx), table, machine())
    rates = {"prefill": found.prefill, "decode": found.decode, "decode_at_end": found.decode_at_end}
    return _changed(place, **rates, basis=found.basis)


def _read_at_end(a: Architecture, cost: Footprint, n_ctx: int) -> float:
    """Bytes of the cache that a token at the end of the context attends to."""
    per_layer = cost.kv_per_token / a.n_layer
    return sum(per_layer * min(n_ctx, layer.window or n_ctx) for layer in a.layers)


def _changed(place: Place, **fields: Any) -> Place:
    return replace(place, **fields)


def _place(
    backend: str,
    device: str,
    memory: dict[str, int],
    available: int,
    needed: Callable[[int], int],
    a: Architecture,
    n_ctx: int,
    smaller: Mapping[str, Callable[[int], int]],
) -> Place:
    missing = max(0, memory["total"] - available)
    most = fitting.largest(needed, available, max(a.n_ctx_train, n_ctx))
    remedy = fitting.remedy(needed, smaller, n_ctx, available) if missing else ""
    return Place(backend, device, memory, available, missing, most, remedy)


def _rates(request: Request, backend: str, options: Mapping[str, Any], on_cpu: bool | None = None) -> dict[str, Any]:
    """Rates of the model on a backend and their basis, as `Place` has them: as `auto` measured them, or by excerpts.

    options:  of the backend, the device among them
    on_cpu:   what auto measured there, or only elsewhere
    """
    note = choice.remembered(request.file) or {}
    for trial in note.get("trials", []):
        here = on_cpu is None or (trial.get("device") == "CPU") == on_cpu
        if trial.get("backend") == backend and here and trial.get("decode"):
            basis = "measured when auto tried it"
            return {"prefill": trial["prefill"], "decode": trial["decode"], "basis": basis}
    if not request.excerpts:
        return {"basis": f"its rates are not known until it has run: edgert bench --backend {backend}"}
    text = f"running a few layers on {backend} ({options['device']}), for {excerpts.TIMEOUT:.0f} seconds at most"

    def on_wait(seconds: float) -> None:
        request.on_excerpt(text, seconds / excerpts.TIMEOUT)

    try:
        found = excerpts.steps(request.file, backend, options, request.n_threads, on_wait=on_wait)
    except (EdgertError, OSError) as error:
        return {"basis": f"its rates are not known, for an excerpt does not run: {error}"}
    return {**found.rates(request.n_ctx), "basis": found.basis}


def _on_gpus(request: Request, a: Architecture) -> list[Place]:
    """All GPUs together, as llama.cpp shares a model among them: as the installed build sees them, or the driver."""
    from edgert.backends.llama import devices, footprint, library
    from edgert.devices import gpus

    if "gpu" not in accelerators.present():
        return []
    obstacle = remedy = ""
    seen: list[Any] = []
    try:
        library.library()
        seen = devices.gpus()
        if not seen:
            obstacle, remedy = devices.unreached()
    except EdgertError as error:
        obstacle, _, remedy = str(error).rpartition(": ")
    known = seen or [gpu for gpu in gpus.gpus() if gpu.memory_free]
    if not known:
        return []
    free = [int(gpu.memory_free) for gpu in known]
    name = ", ".join(gpu.name for gpu in known)
    each = _element_bytes(request.types)

    def cost(n: int) -> tuple[int, int, int]:
        return footprint.gpu_bytes(request.file, a, n * request.n_parallel, each)

    def needed(n: int) -> int:
        return sum(cost(n)) + (len(free) - 1) * cost(n)[2]

    weights, kv, buffers = cost(request.n_ctx)
    memory = _memory(Footprint(weights, kv, 0, buffers * len(free)), 0)  # a draft is the processor's
    place = _place("llama", name, memory, sum(free), needed, a, request.n_ctx, {})
    n_positions = request.n_ctx * request.n_parallel
    fit = devices.layers_that_fit(request.file, a, free, n_positions, each, footprint.N_UBATCH)
    whole = not obstacle and fit > a.n_layer  # what is shared with the processor is no sum of layers
    asked = replace(request, excerpts=request.excerpts and whole)
    rates = _rates(asked, "llama", _options("gpu", -1, request.types), on_cpu=False)
    if not place.fits and fit:
        remedy = f"{fit} of {a.n_layer + 1} layers fit, the CPU runs the others; {place.remedy}"
    return [
        _changed(
            place,
            layers=(fit, a.n_layer + 1),
            **rates,
            obstacle=obstacle,
            remedy=remedy or place.remedy,
        )
    ]


def _element_bytes(types: Types) -> float:
    """Of llama.cpp's cache, keys and values in the mean."""
    from edgert.backends.llama.backend import KV_BITS

    return sum(KV_BITS.get(kind or "f16", 16) for kind in types) / 2 / 8


def _options(device: str, n_gpu_layers: int, types: Types) -> dict[str, Any]:
    """llama.cpp's for a device and such types of cache."""
    named = {f"cache_type_{side}": kind for side, kind in zip("kv", types, strict=True) if kind}
    return {"device": device, "n_gpu_layers": n_gpu_layers, **named}


def _on_llama(request: Request, a: Architecture) -> list[Place]:
    """llama.cpp on the processor, where it is installed."""
    if not choice.installed("llama"):
        return []
    from edgert.backends.llama import library
    from edgert.backends.llama.footprint import copied_types, cpu_footprint
    from edgert.backends.llama.offload import amx_known_to_fail

    obstacle = remedy = ""
    copied: set[str] = set()
    try:
        copied = copied_types(library.system_info(), ("AMX_INT8",) if amx_known_to_fail() else ())
    except EdgertError as error:
        obstacle, _, remedy = str(error).rpartition(": ")
    each = _element_bytes(request.types)

    def cost(n: int) -> Footprint:
        return cpu_footprint(request.file, a, n, n * request.n_parallel, each, copied)

    def needed(n: int) -> int:
        return cost(n).total + _draft_bytes(request, n)

    memory = _memory(cost(request.n_ctx), _draft_bytes(request, request.n_ctx))
    available = probe.probe().memory_available + probe.process_memory()[0]
    place = _place("llama", "cpu", memory, available, needed, a, request.n_ctx, {})
    asked = replace(request, excerpts=request.excerpts and not obstacle)
    rates = _rates(asked, "llama", _options("cpu", 0, request.types), on_cpu=True) if place.fits else {}
    return [_changed(place, **rates, obstacle=obstacle, remedy=remedy or place.remedy)]


def _on_onnx(request: Request, a: Architecture) -> list[Place]:
    """ONNX Runtime's devices that share the machine's memory, where it is installed."""
    if importlib.util.find_spec("onnxruntime") is None:
        return []
    from edgert.backends.onnx import footprint as onnx_footprint
    from edgert.backends.onnx import providers

    try:
        found = [device for device in providers.devices() if not device.obstacle]
    except EdgertError:
        return []
    result = []
    for device in found:

        def cost(n: int, fused: bool = device.provider.profile == "fused") -> Footprint:
            return onnx_footprint.footprint(request.file, a, n, request.n_parallel, fused=fused)

        def needed(n: int, cost: Callable[[int], Footprint] = cost) -> int:
            return cost(n).total + _draft_bytes(request, n)

        memory = _memory(cost(request.n_ctx), _draft_bytes(request, request.n_ctx))
        available = probe.probe().memory_available + probe.process_memory()[0]
        place = _place("onnx", device.name, memory, available, needed, a, request.n_ctx, {})
        rates = _rates(request, "onnx", {"device": device.name}) if place.fits else {}
        result.append(_changed(place, **rates))
    return result
