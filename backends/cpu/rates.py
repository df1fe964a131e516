"""How fast this machine runs the cpu backend's kernels, measured on small random models; from that, any model's rates.

A step of many tokens takes the time to compute, a single token the time to read weights and cache; bytes and
multiply-adds are counted from the description of the model. Attention has kernels of its own for each shape of heads,
so the random models take on the shape that is asked about. What fits the processor's caches is read faster than what
does not, so they come in several sizes.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgert.backends.clock import Clock
from edgert.backends.cpu.footprint import Footprint, footprint
from edgert.backends.cpu.isa import select
from edgert.devices import probe
from edgert.notes import Notes
from edgert.quantize.architecture import Architecture, is_matrix

if TYPE_CHECKING:
    from edgert.backends.cpu.backend import CpuBackend

Heads = tuple[int, int, int]  # n_head, n_head_kv, head_dim
Types = tuple[str | None, str | None]
OnStep = Callable[[int, int], object]
USUAL: Heads = (9, 3, 64)  # SmolLM2's, whose kernels are there for most
# Bytes of weights: more than caches near the cores hold, and soon computed; up to more than most processors' caches.
SIZES = (16 << 20, 64 << 20, 128 << 20, 256 << 20)
Q4_0_BITS = 4.5  # of a weight
CHUNK, DEPTHS = 512, (2048, 8192)  # tokens of a prefill step, and cached ones before it: of more, less is near
LEAST_LAYERS = 4  # one alone stays in the caches
LARGE = 0.4  # seconds for single tokens of a larger model
PROMPT = 0.5  # seconds for a kind of prefill step
PATIENCE = 8.0  # seconds: some five suffice on an idle machine; after them each step is timed once
BEYOND = 4  # times the rate of products in prefill that no attention reaches: what seems to was disturbed
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
    on_step: OnStep = lambda _done, _of: None,
) -> Rates:
    """This machine's rates for heads of a shape, from the notes of an earlier measurement unless `fresh`.

    types:    of cached keys and values, which attention unpacks at rates of their own; None: the backend's choice
    on_step:  called with how many measurements are done, and how many there are

    Measuring takes some seconds, and ten more where kernels are compiled first.
    """
    n_threads = probe.default_threads() if n_threads is None else probe.check_threads(n_threads)
    isa = select(None).name
    notes, key = Notes("rates"), _key(n_threads, isa, heads, types)
    found = None if fresh else _noted(notes.get(key))
    if found is None:
        found = _measured(n_threads, isa, heads, types, progress, on_step)
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


def _measured(n_threads: int, isa: str, heads: Heads, types: Types, progress: Any, on_step: OnStep) -> Rates:
    options = {"n_threads": n_threads, "cache_type_k": types[0], "cache_type_v": types[1], "progress": progress}
    sizes = _sizes(heads)
    done = itertools.count(1)

    def tell() -> None:
        on_step(next(done), 2 + len(DEPTHS) + len(sizes))

    backend, weights, kv_per_token = _specimen(sizes[0], DEPTHS[-1] + 2 * CHUNK, options)
    clock = Clock(PATIENCE, wanted="none")
    try:
        work = Work.of(backend.architecture)
        tell()
        usual = clock.seconds(backend, 0, CHUNK, PROMPT)
        most = work.weights * CHUNK / usual
        tell()
        narrow = clock.seconds(backend, 0, NARROW)
        single = clock.seconds(backend, 0, 1)
        tell()
        attention = {}
        for depth in DEPTHS:
            backend.fill(0, depth)
            deep = clock.seconds(backend, depth, CHUNK, PROMPT)
            multiply_adds = work.attention(depth) * CHUNK
            attention[depth] = multiply_adds / max(deep - usual, multiply_adds / (BEYOND * most))
            tell()
        kv_bytes = DEPTHS[-1] * kv_per_token
        single_deep = clock.seconds(backend, DEPTHS[-1], 1)
    finally:
        backend.close()
    read, layer_bytes = {weights: weights / single}, weights // sizes[0]["n_layer"]
    for size in sizes[1:]:
        if size["n_layer"] * layer_bytes > probe.probe().memory_available // 4:
            break
        backend, weights, _ = _specimen(size, CHUNK, options)
        try:
            read[weights] = weights / clock.seconds(backend, 0, 1, LARGE)
        finally:
            backend.close()
        tell()
    read = _falling(read)
    own = work.attention_of_prompt(CHUNK) / attention[DEPTHS[0]]
    shell = Rates(n_threads, isa, 1, attention, 1, 1, read)
    # What is left when the time to read the same bytes from the caches is taken off, but at least half of it.
    kv_seconds = max(single_deep - single, work.attention(DEPTHS[-1]) / (BEYOND * max(attention.values())))
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


def _falling(read: Mapping[int, float]) -> dict[int, float]:
    """Rates by size, where less is read no slower: what seems to be was disturbed, for nothing makes reading faster."""
    found, best = {}, 0.0
    for n_bytes in sorted(read, reverse=True):
        best = found[n_bytes] = max(best, read[n_bytes])
    return dict(sorted(found.items()))


def _specimen(size: Mapping[str, Any], n_ctx: int, options: Mapping[str, Any]) -> tuple[CpuBackend, int, int]:
    """A random model, running: the bytes of its layers, and of a token's keys and values."""
    from edgert.backends import specimen
    from edgert.backends.cpu.backend import CpuBackend
    from edgert.quantize.gguf_file import GGUFFile

    with tempfile.TemporaryDirectory(prefix="edgert-") as folder:
        path = specimen.write(Path(folder) / "specimen.gguf", n_ctx=n_ctx, **size)
        with GGUFFile.open(path) as file:
            backend = CpuBackend(file, n_ctx=n_ctx, **options)
            a = backend.architecture
            cost = footprint(file, a, n_ctx, types=(options["cache_type_k"], options["cache_type_v"]))
            weights = sum(file.tensor(name).n_bytes for name in a.tensors() if name.startswith("blk."))
    return backend, weights, cost.kv_per_token


def _sizes(heads: Heads) -> list[dict[str, Any]]:
    """Of models with such heads and about as many bytes as SIZES says, each once: one layer may have as many."""
    n_head, n_head_kv, head_dim = heads
    n_embd = n_head * head_dim
    n_ff = -(-5 * n_embd // 64) * 32
    layer = n_embd * (2 * n_embd + 2 * n_head_kv * head_dim + 3 * n_ff)
    shape = {"n_embd": n_embd, "n_ff": n_ff, "n_head": n_head, "n_head_kv": n_head_kv}
    numbers = [max(LEAST_LAYERS, round(size / (layer * Q4_0_BITS / 8))) for size in SIZES]
    return [shape | {"n_layer": n} for n in dict.fromkeys(numbers)]


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
