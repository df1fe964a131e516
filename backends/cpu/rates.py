"""How fast this machine runs the cpu backend's kernels, measured on small random models; from that, any model's rates.

A step of many tokens takes the time to compute, a single token the time to read weights and cache; bytes and
multiply-adds are counted from the description of the model. Attention has kernels of its own for each shape of heads,
so the random models take on the shape that is asked about. What fits the processor's caches is read faster than what
does not, so they come in several sizes.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgert.backends.base import Backend, Batch
from edgert.backends.cpu.footprint import Footprint, footprint
from edgert.backends.cpu.isa import select
from edgert.devices import probe
from edgert.devices.notes import Notes
from edgert.quantize.architecture import Architecture, is_matrix

if TYPE_CHECKING:
    from edgert.backends.cpu.backend import CpuBackend

Heads = tuple[int, int, int]  # n_head, n_head_kv, head_dim
Types = tuple[str | None, str | None]
USUAL: Heads = (9, 3, 64)  # SmolLM2's, whose kernels are there for most
# Bytes of weights: more than caches near the cores hold, and soon computed; up to more than most processors' caches.
SIZES = (16 << 20, 64 << 20, 128 << 20, 256 << 20)
Q4_0_BITS = 4.5  # of a weight
CHUNK, DEPTHS = 512, (2048, 8192)  # tokens of a prefill step, and cached ones before it: of more, less is near
BUSY = 1.5  # times the best step: what the usual one takes where other programs compute as well
NARROW = 32  # tokens of a step that multiplies int8 numbers on every processor


@dataclass(frozen=True)
class Rates:
    """What is measured; multiply-adds and bytes a second by all threads together.

    prefill:             of weights, in a prefill step
    attention:           of cached keys and values there, by how many tokens are cached
    int8:                of weights in a step of few tokens
    kv:                  bytes of cached keys and values that a single token takes in, from the caches of the processor
    read:                bytes of weights a second in a single token's step, by how many are read again and again
    busy:                whether other programs took so much that the figures are low
    """

    threads: int
    isa: str
    prefill: float
    attention: dict[int, float]
    int8: float
    kv: float
    read: dict[int, float]
    busy: bool = False

    def bandwidth(self, n_bytes: float) -> float:
        """Bytes a second for a working set, straight between what was measured."""
        return _between(self.read, n_bytes)

    def attention_seconds(self, work: Work, n: int) -> float:
        """Of a prompt in an empty context, step by step."""
        seconds = 0.0
        for start in range(0, n, CHUNK):
            middle = (start + min(n, start + CHUNK) + 1) / 2
            seconds += (min(n, start + CHUNK) - start) * work.attention(middle) / _between(self.attention, middle)
        return seconds

    @property
    def basis(self) -> str:
        """Where predictions come from."""
        attention, few, many = min(self.attention.values()), min(self.read), max(self.read)
        return (
            f"{self.threads} threads, {self.isa}: {few / 1e6:.0f} to {many / 1e6:.0f} MB of weights are read "
            f"at {self.read[few] / 1e9:.1f} to {self.read[many] / 1e9:.1f} GB/s, "
            f"{self.prefill / 1e9:,.0f} G multiply-adds/s in prefill, {attention / 1e9:,.0f} in its attention, "
            f"cache taken in at {self.kv / 1e9:.1f} GB/s, measured here"
            + (" while other programs ran" if self.busy else "")
        )


def _between(measured: Mapping[int, float], x: float) -> float:
    """Straight between what was measured; beyond it, what is nearest."""
    at = sorted(measured)
    if x <= at[0]:
        return measured[at[0]]
    for left, right in itertools.pairwise(at):
        if x <= right:
            share = (x - left) / (right - left)
            return measured[left] + share * (measured[right] - measured[left])
    return measured[at[-1]]


def rates(
    n_threads: int | None = None,
    heads: Heads = USUAL,
    types: Types = (None, None),
    *,
    fresh: bool = False,
    progress: Any = None,
) -> Rates:
    """This machine's rates for heads of a shape, from the notes of an earlier measurement unless `fresh`.

    types:  of cached keys and values, which attention unpacks at rates of their own; None: the backend's choice

    Measuring takes some seconds, and ten more where kernels are compiled first.
    """
    n_threads = probe.default_threads() if n_threads is None else probe.check_threads(n_threads)
    isa = select(None).name
    notes, key = Notes("rates"), _key(n_threads, isa, heads, types)
    found = None if fresh else _noted(notes.get(key))
    if found is None:
        found = _measured(n_threads, isa, heads, types, progress)
        if not found.busy:
            notes.put(key, asdict(found))
    return found


def _key(n_threads: int, isa: str, heads: Heads, types: Types) -> str:
    try:
        version = metadata.version("edgert")
    except metadata.PackageNotFoundError:
        version = ""
    return json.dumps([probe.probe().model_name, n_threads, isa, heads, types, version])


def _noted(note: Any) -> Rates | None:
    try:
        tables = {name: {int(x): float(rate) for x, rate in note[name].items()} for name in ("read", "attention")}
        return Rates(**note | tables)
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def _measured(n_threads: int, isa: str, heads: Heads, types: Types, progress: Any) -> Rates:
    options = {"n_threads": n_threads, "cache_type_k": types[0], "cache_type_v": types[1], "progress": progress}
    backend, weights, kv_per_token = _specimen(SIZES[0], heads, DEPTHS[-1] + 2 * CHUNK, options)
    try:
        work, clock = Work.of(backend.architecture), _Clock(backend)
        (usual, shallow), (narrow, _) = clock.step(CHUNK, 0, 12), clock.step(NARROW, 0, 12)
        single = clock.single(0)
        attention, done = {}, 0
        for depth in DEPTHS:
            for start in range(done, depth, CHUNK):
                backend.forward(_batch(backend, CHUNK, start))
            done = depth
            _, deep = clock.step(CHUNK, depth, 5)
            attention[depth] = work.attention(depth) * CHUNK / max(deep - shallow, 1e-9)
        single_deep = clock.single(done)
    finally:
        backend.close()
    read = {weights: weights / single}
    for size in SIZES[1:]:
        if size > probe.probe().memory_available // 4:
            break
        backend, weights, _ = _specimen(size, heads, CHUNK, options)
        try:
            larger = _Clock(backend)
            read[weights] = min(weights / larger.single(0), *read.values())  # less is read no slower
            clock.busy |= larger.busy
        finally:
            backend.close()
    own = work.attention_of_prompt(CHUNK) / attention[DEPTHS[0]]
    shell = Rates(n_threads, isa, 1, attention, 1, 1, read)
    kv_bytes = done * kv_per_token
    # What is left when the time to read the same bytes from the caches is taken off, but at least half of it.
    kv_seconds = max(single_deep - single, 1e-9)
    kv_seconds = max(kv_seconds - kv_bytes / shell.bandwidth(min(read) + kv_bytes), kv_seconds / 2)
    return Rates(
        n_threads,
        isa,
        prefill=work.weights * CHUNK / max(usual - own, usual / 2),
        attention=attention,
        int8=work.weights * NARROW / narrow,
        kv=kv_bytes / kv_seconds,
        read=read,
        busy=clock.busy,
    )


def _specimen(size: int, heads: Heads, n_ctx: int, options: Mapping[str, Any]) -> tuple[CpuBackend, int, int]:
    """A random model of about so many bytes, running: the bytes of its layers, and of a token's keys and values."""
    from edgert.backends import specimen
    from edgert.backends.cpu.backend import CpuBackend
    from edgert.quantize.gguf_file import GGUFFile

    with tempfile.TemporaryDirectory(prefix="edgert-") as folder:
        path = specimen.write(Path(folder) / "specimen.gguf", n_ctx=n_ctx, **_sizes(heads, size))
        with GGUFFile.open(path) as file:
            backend = CpuBackend(file, n_ctx=n_ctx, **options)
            a = backend.architecture
            cost = footprint(file, a, n_ctx, types=(options["cache_type_k"], options["cache_type_v"]))
            weights = sum(file.tensor(name).n_bytes for name in a.tensors() if name.startswith("blk."))
    return backend, weights, cost.kv_per_token


def _batch(backend: Backend, n: int, start: int) -> Batch:
    return Batch.of([(7 * i + start) % backend.n_vocab for i in range(n)], start, wanted="none")


def _sizes(heads: Heads, size: int) -> dict[str, Any]:
    """Of a model with such heads, and so many bytes."""
    n_head, n_head_kv, head_dim = heads
    n_embd = n_head * head_dim
    n_ff = -(-5 * n_embd // 64) * 32
    layer = n_embd * (2 * n_embd + 2 * n_head_kv * head_dim + 3 * n_ff)
    return {
        "n_embd": n_embd,
        "n_ff": n_ff,
        "n_head": n_head,
        "n_head_kv": n_head_kv,
        "n_layer": max(4, round(size / (layer * Q4_0_BITS / 8))),  # one alone stays in the caches
    }


class _Clock:
    """Times steps; `busy` when some took far longer than the best of their kind."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.busy = False

    def step(self, n: int, depth: int, repetitions: int) -> tuple[float, float]:
        """Seconds of a step of n tokens behind `depth` cached ones: the median, and the least."""
        return self._timed(lambda: self._backend.forward(_batch(self._backend, n, depth)), depth, repetitions)

    def single(self, depth: int) -> float:
        """Of a single token's step, the median."""
        return self._timed(lambda: self._backend.step(1, 0), depth, 60)[0]

    def _timed(self, work: Callable[[], object], depth: int, repetitions: int) -> tuple[float, float]:
        seconds = []
        for _ in range(repetitions):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
            self._backend.truncate(0, depth)
        middle, least = statistics.median(seconds), min(seconds)
        self.busy |= middle > BUSY * least
        return middle, least


@dataclass(frozen=True)
class Work:
    """What a token costs: multiply-adds.

    weights:       of all layers' matrices; head: of the output
    per_position:  of a position in all layers, by window (0: none)
    """

    weights: int
    head: int
    per_position: Mapping[int, int]

    @classmethod
    def of(cls, a: Architecture) -> Work:
        """Counted from the description."""
        weights = sum(shape[0] * shape[1] for i in range(a.n_layer) for shape in _matrices(a, i))
        positions: dict[int, int] = {}
        for layer in a.layers:
            positions[layer.window] = positions.get(layer.window, 0) + 2 * layer.n_head * layer.head_dim
        return cls(weights, a.n_vocab * a.n_embd, positions)

    def attention(self, depth: float) -> float:
        """Of one token behind so many."""
        return sum(each * min(depth, window or depth) for window, each in self.per_position.items())

    def attention_of_prompt(self, n: int) -> float:
        """Of a whole prompt in an empty context: every token sees those before it and itself."""
        total = 0.0
        for window, each in self.per_position.items():
            full = min(n, window or n)
            total += each * (full * (full + 1) / 2 + (n - full) * full)
        return total


def _matrices(a: Architecture, i: int) -> list[tuple[int, ...]]:
    return [shape for name, shape in a.layer_tensors(i).items() if is_matrix(name, shape)]


@dataclass(frozen=True)
class Prediction:
    """Tokens a second: of a prompt that fills the context, and of replies at its beginning and at its end."""

    prefill: float
    decode: float
    decode_at_end: float
    basis: str


def predict(
    a: Architecture, cost: Footprint, n_ctx: int, kv_read: float, embedding_bytes: int, machine: Rates
) -> Prediction:
    """The rates of a model whose memory is `cost`.

    kv_read:          bytes of the cache that a token at the end of the context reads
    embedding_bytes:  of a table that is no head as well: of it a step reads a row
    """
    work = Work.of(a)
    seconds = n_ctx * work.weights / machine.prefill + machine.attention_seconds(work, n_ctx)
    weights = cost.weights - embedding_bytes

    def step(kv: float) -> float:
        return (weights + kv) / machine.bandwidth(weights + kv) + kv / machine.kv

    return Prediction(n_ctx / (seconds + step(0)), 1 / step(0), 1 / step(kv_read), machine.basis)
