"""Runs the graphs: one run of tokens of one sequence at a time, each sequence with a cache of its own."""

from __future__ import annotations

import contextlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.backends.onnx.compiled import Compiled, compiled
from edgert.backends.onnx.embedding import Embedding
from edgert.backends.onnx.graph import Fused, Observed, rope_rows, rope_table, ropes, windows
from edgert.backends.onnx.providers import Device, runtime
from edgert.backends.onnx.static_graph import HIDDEN, Head, Static
from edgert.backends.onnx.store import ModelFolder
from edgert.quantize.architecture import Architecture

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
CHUNK = 128  # tokens of a static prefill
LEAST_CHUNK = 12  # so many tokens are worth a chunk that is mostly padding
BUCKETS = (512, 2048, 8192, 32768, 131072)  # room of static caches


class Runner(ABC):
    """A model on a device: n_seq_max caches and what computes them."""

    def __init__(
        self,
        folder: ModelFolder,
        a: Architecture,
        embedding: Embedding,
        device: Device,
        n_ctx: int,
        n_seq_max: int,
        n_threads: int,
    ) -> None:
        self.folder, self.a, self.embedding, self.device = folder, a, embedding, device
        self.n_ctx, self.n_threads = n_ctx, n_threads
        self.sessions: dict[str, Compiled] = {}
        self.keys: list[list[Floats]] = [[] for _ in range(n_seq_max)]  # by sequence and layer
        self.values: list[list[Floats]] = [[] for _ in range(n_seq_max)]

    @abstractmethod
    def run(self, sequence: int, tokens: Ints, position: int, wanted: Ints, logits: Floats) -> None:
        """Computes tokens (n,) at `position` on; writes the logits of the wanted ones (rows, n_vocab)."""

    @abstractmethod
    def cached(self, sequence: int, length: int) -> Iterator[Floats]:
        """Keys and values of each layer in turn, of room for so many positions: views (n_head_kv, length, head_dim)."""

    def clear(self, sequence: int) -> None:
        """Gives back the memory of a sequence, as if it had never been used."""
        self.keys[sequence], self.values[sequence] = [], []

    def copy(self, source: int, target: int, length: int) -> None:
        """Gives the target the first positions of the source."""
        for old, new in zip(self.cached(source, length), self.cached(target, length), strict=True):
            new[:] = old

    def repeat(self, sequence: int, done: int, length: int) -> None:
        """Fills positions up to `length` with what stands in the first ones."""
        for part in self.cached(sequence, length):
            for start in range(done, length, done):
                n = min(done, length - start)
                part[:, start : start + n] = part[:, :n]

    def kv_bytes(self, lengths: list[int]) -> int:
        """Bytes of the cached positions."""
        a = self.a
        return sum(lengths) * a.n_layer * 2 * a.n_head_kv * a.head_dim * 4

    def _open(self, name: str, build: Callable[[], Any]) -> Any:
        if name not in self.sessions:
            path = self.folder.graph(name, self.device.provider.style, build)
            self.sessions[name] = compiled(self.folder, self.device, path, self.n_threads)
        return self.sessions[name].session


def _value(array: NDArray[Any]) -> Any:
    """ONNX Runtime's view of an array, which must outlive it."""
    return runtime().OrtValue.ortvalue_from_numpy(array)


def _growing(*shape: int) -> Floats:
    """Zeros, of which a page comes into being when something is written there, and all are given back at once.

    In small pages: positions of a head lie together, so that a few would bring a large one for each head and layer.
    """
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, 4 * prod(shape), **private)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # of a system that knows no large pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float32).reshape(shape)


class FusedRunner(Runner):
    """The cache is bound once for each sequence; GroupQueryAttention writes into it."""

    def __init__(self, *arguments: Any, observable: bool = False) -> None:
        super().__init__(*arguments)
        name, kind = ("observed", Observed) if observable else ("fused", Fused)
        self._session = self._open(name, lambda: kind(self.a, self.folder.weights, self.device.provider.style).build())
        positions = np.arange(self.n_ctx)
        self._tables = [table for rope in ropes(self.a) for table in rope_table(rope, positions)]
        self._bindings: dict[int, Any] = {}
        # Bindings with what they were last given for a step.
        self._bound: dict[int, tuple[Any, NDArray[Any], Ints, Floats]] = {}
        self._looks_up = self.folder.weights.table(self.a) is not None
        self._row = np.empty((1, self.a.n_embd), np.float32)  # of a single token: the same memory stays bound
        self._total, self._length = np.zeros((), np.int32), np.zeros(1, np.int32)

    def _binding(self, sequence: int) -> Any:
        if sequence not in self._bindings:
            both = _growing(2, self.a.n_layer, 1, self.a.n_head_kv, self.n_ctx, self.a.head_dim)
            self.keys[sequence], self.values[sequence] = map(list, both)
            self._bindings[sequence] = self._bind(sequence)
        return self._bindings[sequence]

    def clear(self, sequence: int) -> None:
        self._bound.pop(sequence, None)
        self._bindings.pop(sequence, None)
        super().clear(sequence)

    def _bind(self, sequence: int) -> Any:
        """All but a step's own arrays."""
        binding = self._session.io_binding()
        for name, caches in (("k", self.keys), ("v", self.values)):
            for i, cache in enumerate(caches[sequence]):
                value = _value(cache)
                binding.bind_ortvalue_input(f"{name}.{i}", value)
                binding.bind_ortvalue_output(f"new_{name}.{i}", value)
        for i, table in enumerate(self._tables):
            binding.bind_ortvalue_input(f"{('cos', 'sin')[i % 2]}.{i // 2}", _value(table))
        binding.bind_ortvalue_input("total", _value(self._total))
        binding.bind_ortvalue_input("lengths", _value(self._length))
        return binding

    def run(self, sequence: int, tokens: Ints, position: int, wanted: Ints, logits: Floats) -> None:
        read = tokens if self._looks_up else self._read(tokens)
        bound = self._bound.get(sequence)
        if bound is None or bound[1] is not read or bound[2] is not wanted or bound[3] is not logits:
            bound = self._bound[sequence] = self._binding(sequence), read, wanted, logits
            self._bind_step(*bound)
        self._step(bound[0], position + len(tokens))

    def _read(self, tokens: Ints) -> NDArray[Any]:
        """What the graph reads: the tokens, or their embeddings where it has no table of them."""
        if self._looks_up:
            return tokens
        x = self._row if len(tokens) == 1 else np.empty((len(tokens), self.a.n_embd), np.float32)
        self.embedding.write(tokens, x)
        return x

    def observe(self, sequence: int, tokens: Ints, position: int) -> dict[str, Floats]:
        """Computes tokens at `position` on, all of them wanted: what each group of matrices reads."""
        self._binding(sequence)  # with its cache
        binding, n, read = self._bind(sequence), len(tokens), self._read(tokens)
        seen = {name: np.empty((n, ms[0].n_cols), np.float32) for name, ms in self.folder.weights.groups.items()}
        for name, array in seen.items():
            binding.bind_ortvalue_output(f"seen.{name}", _value(array))
        wanted, logits = np.arange(n), np.empty((n, self.a.n_vocab), np.float32)  # alive until the step is done
        self._bind_step(binding, read, wanted, logits)
        self._step(binding, position + n)
        return seen

    def _bind_step(self, binding: Any, read: NDArray[Any], wanted: Ints, logits: Floats) -> None:
        binding.bind_ortvalue_input("tokens" if self._looks_up else "x", _value(read))
        binding.bind_ortvalue_input("wanted", _value(wanted))
        binding.bind_ortvalue_output("logits", _value(logits))

    def _step(self, binding: Any, total: int) -> None:
        self._total[()], self._length[0] = total, total - 1
        self._session.run_with_iobinding(binding)

    def cached(self, sequence: int, length: int) -> Iterator[Floats]:
        self._binding(sequence)
        for pair in zip(self.keys[sequence], self.values[sequence], strict=True):
            yield from (cache[0, :, :length] for cache in pair)


class StaticRunner(Runner):
    """Past keys and values go in, new ones come out and are put in place here.

    A cache starts in the smallest bucket and moves to the next when it is full.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._ropes, self._windows = ropes(self.a), windows(self.a)
        self._groups = self.a.n_head // self.a.n_head_kv
        self._outputs: dict[int, dict[str, Floats]] = {}
        self._graph(1, self._bucket(1))  # what every use needs, so that a refusal comes now

    def _bucket(self, length: int) -> int:
        return min(self.n_ctx, next((size for size in BUCKETS if size >= length), self.n_ctx))

    def _graph(self, n: int, n_past: int) -> Any:
        style = self.device.provider.style
        return self._open(f"static-{n}-{n_past}", lambda: Static(self.a, self.folder.weights, style).build(n, n_past))

    def _room(self, sequence: int, length: int) -> int:
        """Makes the cache of a sequence large enough: its bucket."""
        a, size = self.a, self._bucket(max(length, 1))
        keys, values = self.keys[sequence], self.values[sequence]
        have = keys[0].shape[2] if keys else 0
        if have >= size:
            return have
        for caches, shape in ((keys, (a.n_head_kv, a.head_dim, size)), (values, (a.n_head_kv, size, a.head_dim))):
            new = [np.zeros(shape, np.float32) for _ in range(a.n_layer)]
            for old, larger in zip(caches, new, strict=False):
                larger[:, : old.shape[1], : old.shape[2]] = old
            caches[:] = new
        return size

    def run(self, sequence: int, tokens: Ints, position: int, wanted: Ints, logits: Floats) -> None:
        x, done = np.empty((len(tokens), self.a.n_embd), np.float32), 0
        self.embedding.write(tokens, x)
        while done < len(x):
            left = len(x) - done
            n = min(left, CHUNK) if left >= LEAST_CHUNK else 1
            rows = np.flatnonzero((wanted >= done) & (wanted < done + n))
            self._step(sequence, x[done : done + n], position + done, wanted[rows] - done, logits, rows)
            done += n

    def _step(
        self,
        sequence: int,
        x: Floats,
        position: int,
        wanted: Ints,
        logits: Floats,
        rows: Ints,
    ) -> None:
        a, n = self.a, len(x)
        width = 1 if n == 1 else CHUNK
        n_past = self._room(sequence, position + n)
        session = self._graph(width, n_past)
        feeds: dict[str, Floats] = {"x": np.pad(x, ((0, width - n), (0, 0)))[None]}
        places = position + np.arange(width)
        for i, rope in enumerate(self._ropes):
            feeds[f"cos.{i}"], feeds[f"sin.{i}"] = rope_rows(rope, places)
        for j, window in enumerate(self._windows):
            feeds[f"mask.{j}"] = self._mask(width, n_past, position, window)
        binding = session.io_binding()
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, _value(array))
        outputs = self._outputs_of(width)
        for i in range(a.n_layer):
            binding.bind_ortvalue_input(f"k.{i}", _value(self.keys[sequence][i]))
            binding.bind_ortvalue_input(f"v.{i}", _value(self.values[sequence][i]))
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, _value(array))
        session.run_with_iobinding(binding)
        for i in range(a.n_layer):
            self.keys[sequence][i][:, :, position : position + n] = outputs[f"new_k.{i}"][:, :, :n]
            self.values[sequence][i][:, position : position + n] = outputs[f"new_v.{i}"][:, :n]
        if not len(rows):
            return
        if width == 1:
            logits[rows] = outputs["logits"][0]
            return
        head = self._open("head", lambda: Head(a, self.folder.weights, self.device.provider.style).build())
        for row, place in zip(rows, wanted, strict=True):
            logits[row] = head.run(["logits"], {"hidden": outputs["hidden"][:, place : place + 1]})[0][0, 0]

    def _outputs_of(self, n: int) -> dict[str, Floats]:
        """Memory for what a step of n tokens gives."""
        if n not in self._outputs:
            a = self.a
            shapes: dict[str, tuple[int, ...]] = {"hidden": (1, n, a.n_embd)}
            if n == 1:
                shapes = {"logits": (1, 1, a.n_vocab)}
            for i in range(a.n_layer):
                shapes[f"new_k.{i}"] = (a.n_head_kv, a.head_dim, n)
                shapes[f"new_v.{i}"] = (a.n_head_kv, n, a.head_dim)
            self._outputs[n] = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        return self._outputs[n]

    def _mask(self, n: int, n_past: int, position: int, window: int) -> Floats:
        """float32 (groups * n, n_past + n): 0 for what a query sees, HIDDEN for the rest."""
        queries = position + np.arange(n)[:, None]
        past = np.arange(n_past)[None]
        keys = np.concatenate([np.where(past < position, past, 1 << 40), position + np.arange(n)[None]], axis=1)
        distance = queries - keys
        seen = (distance >= 0) & (distance < (window or 1 << 40))
        return np.tile(np.where(seen, np.float32(0), np.float32(HIDDEN)), (self._groups, 1))

    def cached(self, sequence: int, length: int) -> Iterator[Floats]:
        self._room(sequence, length)
        for keys, values in zip(self.keys[sequence], self.values[sequence], strict=True):
            yield keys[:, :, :length].swapaxes(1, 2)
            yield values[:, :length]
