"""The cpu backend: batches of tokens in, logits out, by tapes of kernels compiled for this very processor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import REPEATED, Backend, Batch, OnInput, OnSquares, Verdict
from edgert.backends.cpu import compiler
from edgert.backends.cpu.cache import PagedCache, cache_type, kept_by_layers
from edgert.backends.cpu.copies import Keeper
from edgert.backends.cpu.footprint import N_BATCH, check_fit
from edgert.backends.cpu.graph import Graph
from edgert.backends.cpu.isa import select
from edgert.backends.cpu.layouts import CACHE_TYPES, CODECS, PAGE, WINDOW
from edgert.backends.cpu.memory import aligned
from edgert.backends.cpu.model_weights import pack_model
from edgert.backends.cpu.parts import Walk
from edgert.backends.cpu.requirements import check_runs, sees_shifts
from edgert.backends.cpu.sampling import NAMES as SAMPLING_KERNELS
from edgert.backends.cpu.sessions import Sessions, fingerprint
from edgert.backends.cpu.step import (
    N_NARROW,
    N_TOKENS,
    N_WANTED,
    N_WANTED_TILED,
    N_WIDE,
    SPARE,
    Shape,
    wide_first,
)
from edgert.backends.cpu.tape import Op, Reads, Tape
from edgert.backends.cpu.team import KERNELS as TEAM_KERNELS
from edgert.backends.cpu.team import Team
from edgert.backends.cpu.weights import FLOAT_CODECS, Packer, encode, pack_rows
from edgert.devices import probe
from edgert.errors import DoesNotFitError, UnsupportedFormatError
from edgert.quantize.architecture import describe
from edgert.quantize.gguf_file import Model

logger = logging.getLogger(__name__)

ONE = np.array([1, 0, 1, 1])  # a step's header: tokens, wide, narrow and wanted rows
CENTERING_TOKENS = 256
FEW_HEADS = (
    "%s has one key-value head in a layer, and a q4_0 cache may change its answers (mean KL divergence above 0.05 in "
    "long texts, measured on Gemma3-270M): q8_0 is safe."
)


class CpuBackend(Backend):
    """A model on the processor.

    file:       a GGUFFile; with weights_as any model whose tensors have `rows(start, stop) -> float32`
    n_ctx:      positions that one sequence may have; 0: as many as the model was trained on
    n_seq_max:  sequences that may be cached at once
    n_cached:   positions that all sequences together may have; 0: n_ctx for each
    cache_type_k, cache_type_v:  how keys and values are held: "f16", "q8_0", "q4_0"; None: what suits the model
    tile_head:  whether many logits of a step are computed by tiles where processors have them: faster by far, but
                a row's logits then differ in their rounding with how many others are wanted beside it
    weights_as: "f32", "f16" or "bf16": what all matrices are dequantized to; None: each keeps the file's type
    beside:     another backend that never runs at the same time: its threads serve this one as well, because the
                idle ones of two teams would wait on the cores that the others need
    progress:   called with (kernels compiled, kernels to compile) when the cache of object code lacks some
    """

    def __init__(
        self,
        file: Model[Any],
        *,
        n_ctx: int = 0,
        n_threads: int | None = None,
        n_batch: int = N_BATCH,
        n_seq_max: int = 1,
        n_cached: int = 0,
        cache_type_k: str | None = None,
        cache_type_v: str | None = None,
        isa: str | None = None,
        weights_as: str | None = None,
        tile_head: bool = False,
        beside: Backend | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        described = describe(file)
        self.n_ctx = n_ctx or described.n_ctx_train
        a = self.architecture = described.for_context(self.n_ctx)
        check_runs(file, a, self.n_ctx)
        self.isa = select(isa)
        self.n_vocab = a.n_vocab
        whole = -(-self.n_ctx // WINDOW) * WINDOW  # an encoder reads a text at once
        self.n_batch = whole if a.encoder else min(n_batch, max(WINDOW, whole))
        self.n_seq_max, self.n_cached = n_seq_max, n_cached or self.n_ctx * n_seq_max
        self.n_window = WINDOW
        self.pauses = True
        able = {"fork", "truncate", "batch", "session", "observe", "states", "replace"}
        self.capabilities = frozenset(able | {"encoder"} if a.encoder else able)
        n_threads = probe.default_threads() if n_threads is None else probe.check_threads(n_threads)
        if weights_as not in (None, *FLOAT_CODECS):
            raise ValueError(f"weights_as is one of {', '.join(FLOAT_CODECS)}, not {weights_as!r}")
        packing = Packer.kernels(file, list(a.matrices()), weights_as)
        usual = "f16" if a.encoder else None
        types = cache_type("k", cache_type_k or usual, a.head_dim), cache_type("v", cache_type_v or usual, a.head_dim)
        if "q4_0" in types and any(layer.n_head_kv == 1 for layer in a.layers):
            logger.warning(FEW_HEADS, file.path)
        n_positions = n_cached or self.n_ctx * n_seq_max
        check_fit(file, a, n_positions, self.n_ctx, types, weights_as, probe.probe().memory_available)
        model = fingerprint(file, a)  # before packing drops the file's pages
        self._progress = progress
        self._closed = False
        self._keeper: Keeper | None = None
        compiler.addresses([*TEAM_KERNELS, *sorted(packing)], self.isa, progress)
        team = beside._team if isinstance(beside, CpuBackend) and beside.isa == self.isa else None
        if team and team.n_threads != n_threads:
            team = None
        self._owns_team = team is None
        self._team: Team = team or Team(n_threads, self.isa)
        try:
            packer = Packer(file, self.isa, self._team, weights_as)
            weights = pack_model(a, packer)
            pages = -(-n_positions // PAGE) + n_seq_max
            layers = kept_by_layers(a)
            self._cache = PagedCache(layers, n_seq_max, self.n_ctx, pages, self.n_batch, *types)
            self._graph = Graph(a, weights, self._cache, self.isa, n_threads, self.n_batch, tile_head)
            self.rounds_windows = self._graph.tiles or self._graph.attention.bfloat
            self._tapes: dict[Shape, Tape] = {}
            self._observed: dict[Shape, Tape] = {}
            self._summed: dict[Shape, Tape] = {}
            self._stating: dict[Shape, Tape] = {}
            self._runs: dict[int, Tape] = {}  # of a few tokens of one sequence, by their number
            self._n_logits = sum(matrix.n_panels * self.isa.lanes for matrix in weights.output)
            self._logits = aligned(4).view(np.float32).reshape(1, 1)
            self._compile_usual()
            if CACHE_TYPES[types[0]].refined and not sees_shifts(a):
                self._center_keys()
            self._sessions = Sessions(self._cache, self.n_ctx, model, self._graph.attention.key_means)
            self.fingerprint = repr(sorted(self._sessions.facts.items()))
            self._keeper = packer.keep()
        except BaseException:
            self.close()
            raise
        self.verdict = Verdict(
            "cpu",
            "cpu",
            f"{probe.probe().model_name}, {n_threads} thread{'s' * (n_threads > 1)}",
            f"kernels compiled for {self.isa.name}",
            {"isa": self.isa.name, "threads": str(n_threads), "type_k": types[0], "type_v": types[1]},
        )

    def _compile_usual(self) -> None:
        """Compiles what a chat needs, at once and in parallel: prompts of any length, then single tokens."""
        graph = self._graph
        shapes = [graph.shape(WINDOW, 0, 1), graph.shape(WINDOW, WINDOW, 1), graph.shape(0, WINDOW, 1)]
        shapes += [graph.shape(0, 1, 1)]
        self._compile(shapes, SAMPLING_KERNELS)

    def _compile(self, shapes: Iterable[Shape], others: Iterable[str] = ()) -> None:
        names = {op.kernel for shape in shapes for op in self._graph.ops(shape)} | set(others)
        compiler.addresses(sorted(names), self.isa, self._progress)

    def prepare(self, n_tokens: int) -> None:
        graph, most = self._graph, min(n_tokens, WINDOW)
        if self.architecture.encoder:
            return
        replies = [graph.shape(0, n, n) for n in range(1, most + 1)]
        some, many = SPARE, WINDOW  # of narrow rows
        beside_prompts = [graph.shape(0, rest, n) for rest in (some, many) for n in range(most + 1)]
        prompts = [graph.shape(WINDOW, rest, n) for rest in (0, some, many) for n in (0, 1)]
        shapes = dict.fromkeys([*replies, *beside_prompts, *prompts])
        self._compile(shapes)
        for shape in shapes:  # which takes some milliseconds, for which nobody shall wait later
            self._tape(shape)

    def _center_keys(self) -> None:
        """Finds the mean that keys of few bits are held less of, from some tokens that the model reads.

        Keys share most of their size with all others of their head. A constant vector taken off all of them adds the
        same to all scores of a query, which the softmax does not see, and leaves less to round.
        """
        n = min(CENTERING_TOKENS, self.n_ctx, self.n_batch) // PAGE * PAGE
        if n <= PAGE:
            return
        tokens = np.random.default_rng(0).integers(0, self.n_vocab, n)
        self.forward(Batch.of(tokens.tolist(), 0, wanted="none"))
        for i, (layer, mean) in enumerate(zip(self.architecture.layers, self._graph.attention.key_means, strict=True)):
            if layer.n_head_kv and layer.kv_layer is None:
                found = self._cache.keys(i, 0)[:, PAGE:].mean(1)
                mean.reshape(-1)[: found.size] = found.reshape(-1)
        self._cache.truncate(0, 0)

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        shape, n_wanted = self._lay_out(batch)
        return self._walk(self._tape(shape), n_wanted)

    def observe(self, batch: Batch, on_input: OnInput) -> None:
        for reads in self._products(batch, self._observed, self._graph.observed_ops):
            for rows, expert in reads.calls(self._graph.header):
                on_input(reads.matrix.names, rows, *(() if expert is None else (expert,)))

    def squares(self, batch: Batch, on_squares: OnSquares) -> None:
        for reads in self._products(batch, self._summed, partial(self._graph.observed_ops, squares=True)):
            for sums, n, expert in reads.squares(self._graph.header):
                on_squares(reads.matrix.names, sums, n, *(() if expert is None else (expert,)))

    def _products(self, batch: Batch, tapes: dict[Shape, Tape], ops_of: Callable[[Shape], list[Op]]) -> Iterator[Reads]:
        """Runs a step up to each of its products in turn, and tells what that reads."""
        shape, _ = self._lay_out(batch)
        tape = tapes.get(shape) or self._make_tape(shape, tapes, ops_of)
        for words, reads in tape.pieces():
            if len(words):
                self._team.run(words)
            yield reads

    def states(self, batch: Batch) -> NDArray[np.float32]:
        n, n_embd = len(batch), self.architecture.n_embd
        shape, _ = self._lay_out(replace(batch, wanted=np.ones(n, np.bool_)))
        tape = self._stating.get(shape) or self._make_tape(shape, self._stating, self._graph.states_ops)
        self._team.run(tape.words)
        return self._graph.floats[: n * n_embd * 4].view(np.float32).reshape(n, n_embd).copy()

    def replace(self, name: str, values: NDArray[np.float32], first: int = 0) -> None:
        places = self._graph.weights.find(name)
        values = values.reshape(-1, values.shape[-1])  # experts one below the other
        shape = sum(part.rows.count for _, part in places), places[0][0].n_cols
        n_rows, n_cols = values.shape
        if n_cols != shape[1] or first + n_rows > shape[0]:
            raise ValueError(f"{name} has the shape {shape}, not {values.shape} from row {first} on")
        for matrix, part in places:
            if not CODECS[matrix.codec].is_float:
                raise UnsupportedFormatError(
                    f"Tensor {name} is held as {matrix.codec}, which cannot take other values: "
                    "load the model with weights_as='bf16' or 'f32'."
                )
            start, stop = part.rows.start, part.rows.start + part.rows.count
            low, high = max(first, start), min(first + n_rows, stop)
            if low >= high:
                continue
            if (low - start) % self.isa.lanes or ((high - start) % self.isa.lanes and high != stop):
                raise ValueError(f"{name}: rows {low} to {high} are no whole panels")
            rows = encode(matrix.codec, values[low - first : high - first])
            pack_rows(self._team, self.isa, matrix.codec.upper(), rows, matrix, part, low - start)

    def _lay_out(self, batch: Batch) -> tuple[Shape, int]:
        """Puts a batch into the buffers: the shape of the step, and how many logits are wanted."""
        n = len(batch)
        self._check_batch(batch)
        for sequence, length in self._growth(batch).items():
            self._cache.grow(sequence, length)
        order, n_wide = wide_first(batch.sequences, batch.positions)
        graph = self._graph
        tokens, positions, slots, wanted = batch.tokens, batch.positions, batch.sequences, batch.wanted
        if order is not None:
            tokens, positions, slots = tokens[order], positions[order], slots[order]
        graph.tokens[:n] = tokens
        graph.positions[:n] = positions
        graph.slots[:n] = slots
        if self.architecture.encoder:
            graph.reach[:n] = np.array(self._cache.lengths)[slots] - 1
        rows = np.flatnonzero(wanted)
        if order is not None and n_wide:
            place = np.empty(n, np.int64)
            place[order] = np.arange(n)
            rows = place[rows]
        n_wanted = len(rows)
        graph.wanted[:n_wanted] = rows
        header = graph.header
        header[N_TOKENS], header[N_WIDE], header[N_NARROW], header[N_WANTED] = n, n_wide, n - n_wide, n_wanted
        header[N_WANTED_TILED] = graph.tiled(n_wanted)
        return graph.shape(n_wide, n - n_wide, n_wanted), n_wanted

    def extend(self, tokens: Sequence[int], position: int, sequence: int) -> NDArray[np.float32]:
        cache, graph, n = self._cache, self._graph, len(tokens)
        # What is out of range is left to the usual way, which says what is wrong.
        if self._closed or not (0 < n < WINDOW and 0 <= sequence < self.n_seq_max):
            return super().extend(tokens, position, sequence)
        end = position + n
        if (
            position != cache.lengths[sequence]
            or end > self.n_ctx
            or min(tokens) < 0
            or max(tokens) >= self.n_vocab
            or cache.missing({sequence: end})
        ):
            return super().extend(tokens, position, sequence)
        cache.grow(sequence, end)
        graph.few.lay_out(tokens, position, sequence, n, graph.tiled(n))
        tape = self._runs.get(n)
        if tape is None:
            tape = self._runs[n] = self._tape(graph.shape(0, n, n))
        return self._walk(tape, n)

    def _walk(self, tape: Tape, n_wanted: int) -> NDArray[np.float32]:
        """Runs a step that lies in the buffers: float32 (n_wanted, n_vocab)."""
        logits = self._aim(tape, n_wanted)
        self._team.walk(tape.address, len(tape.words))
        return self._result(logits, n_wanted)

    def in_parts(self, batch: Batch) -> Callable[[float], NDArray[np.float32] | None]:
        begun: list[tuple[Walk, Tape, int]] = []

        def go_on(seconds: float) -> NDArray[np.float32] | None:
            if not begun:
                shape, n_wanted = self._lay_out(batch)
                tape = self._tape(shape)
                begun.append((Walk(tape, self._team, self._graph.state(len(batch))), tape, n_wanted))
            walk, tape, n_wanted = begun[0]
            logits = self._aim(tape, n_wanted)  # each time: the steps between may have taken it elsewhere
            return self._result(logits, n_wanted) if walk.go_on(seconds) else None

        return go_on

    def _tape(self, shape: Shape) -> Tape:
        return self._tapes.get(shape) or self._make_tape(shape, self._tapes, self._graph.ops)

    def _aim(self, tape: Tape, n_wanted: int) -> NDArray[np.float32]:
        """Room for so many logits, where the tape will put them."""
        logits = self._room_for_logits(n_wanted)
        if n_wanted and tape.logits is not logits:
            self._graph.set_logits(tape.ops, logits)
            tape.logits = logits
        return logits

    def _result(self, logits: NDArray[np.float32], n_wanted: int) -> NDArray[np.float32]:
        result = logits[:n_wanted, : self.n_vocab]
        softcap = self.architecture.final_logit_softcapping
        if softcap:
            np.multiply(np.tanh(result / softcap), softcap, out=result)
        return result

    def _make_tape(self, shape: Shape, tapes: dict[Shape, Tape], ops_of: Callable[[Shape], list[Op]]) -> Tape:
        ops = ops_of(shape)
        addresses = compiler.addresses([op.kernel for op in ops], self.isa, self._progress)
        tapes[shape] = Tape(ops, addresses, self._graph.arena)
        return tapes[shape]

    def _room_for_logits(self, n_wanted: int) -> NDArray[np.float32]:
        """float32 (n_wanted + SPARE or more, stride); kept from step to step while it is small, or as large."""
        rows, columns = max(n_wanted + SPARE, self._graph.tiled(n_wanted)), self._n_logits
        kept = len(self._logits)
        if kept < rows or kept > max(4 * SPARE, rows):
            self._logits = aligned(rows * columns * 4).view(np.float32).reshape(rows, columns)
        return self._logits

    def _check_batch(self, batch: Batch) -> None:
        if self._closed:
            raise ValueError("the backend is closed")
        n = len(batch)
        if not 0 < n <= self.n_batch:
            raise ValueError(f"a batch holds 1 to {self.n_batch} tokens, not {n}")
        if int(batch.tokens.min()) < 0 or int(batch.tokens.max()) >= self.n_vocab:
            raise ValueError(f"token ids run from 0 to {self.n_vocab - 1}")
        if int(batch.sequences.min()) < 0 or int(batch.sequences.max()) >= self.n_seq_max:
            raise ValueError(f"sequences run from 0 to {self.n_seq_max - 1}")
        if int(batch.positions.max()) >= self.n_ctx:
            raise ValueError(f"positions run from 0 to {self.n_ctx - 1}")

    def _growth(self, batch: Batch) -> dict[int, int]:
        """The length that each sequence of the batch will have; refuses gaps, and what does not fit."""
        growth: dict[int, int] = {}
        lengths = self._cache.lengths
        for sequence, position in zip(batch.sequences.tolist(), batch.positions.tolist(), strict=True):
            if position != growth.get(sequence, lengths[sequence]):
                raise ValueError(
                    f"position {position} does not follow sequence {sequence}'s {lengths[sequence]} tokens"
                )
            growth[sequence] = position + 1
        missing = self._cache.missing(growth)
        if missing:
            raise DoesNotFitError(
                f"The cache lacks {missing * PAGE} positions for this step: end a sequence, "
                "or load the model with a larger -c/--ctx-size."
            )
        return growth

    def length(self, sequence: int) -> int:
        return self._cache.lengths[sequence]

    def free_positions(self) -> int:
        return self._cache.free_positions

    def fork(self, source: int, target: int, length: int) -> None:
        if self._cache.lengths[target]:
            raise ValueError(f"sequence {target} is not empty")
        self._check_reach(source, length)
        self._cache.fork(source, target, length)

    def truncate(self, sequence: int, length: int) -> None:
        self._check_reach(sequence, length)
        self._cache.truncate(sequence, length)

    def fill(self, sequence: int, length: int) -> None:
        """Copies the pages of what is cached, which costs next to nothing."""
        super().fill(sequence, min(length, REPEATED))
        if self._cache.lengths[sequence] < length <= self.n_ctx and self._cache.repeatable(sequence):
            self._cache.repeat(sequence, length, self.n_batch)
        super().fill(sequence, length)

    def rest(self, sequence: int) -> None:
        self._cache.rest(sequence)

    def give_back(self, seconds: float = 0.0) -> float:
        self._cache.give_back(monotonic() - seconds)
        return max(0.0, self._cache.oldest + seconds - monotonic())

    def reachable(self, sequence: int, length: int) -> int:
        return self._cache.reachable(sequence, length)

    def _check_reach(self, sequence: int, length: int) -> None:
        present = self._cache.lengths[sequence]
        if not 0 <= length <= present:
            raise ValueError(f"sequence {sequence} has {present} positions, not {length}")
        if length != self._cache.reachable(sequence, length):
            raise ValueError(f"windows of sequence {sequence} have passed what precedes position {length}")

    def save(self, sequence: int, length: int) -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
        self._check_reach(sequence, length)
        return self._sessions.save(sequence, length)

    def check_saved(self, facts: Mapping[str, Any], n_tokens: int, n_bytes: int) -> None:
        self._sessions.check(facts, n_tokens, n_bytes)

    def restore(self, sequence: int, facts: Mapping[str, Any], data: NDArray[np.uint8]) -> None:
        self._sessions.restore(sequence, facts, data)

    def memory(self) -> dict[str, int]:
        return {
            "weights": self._graph.weights.n_bytes,
            "kv": self._cache.used_bytes,
            "kv_per_token": self._cache.token_bytes,
            "buffers": self._graph.n_bytes + self._logits.nbytes,
        }

    def close(self) -> None:
        if self._keeper:
            self._keeper.stop()
        if self._owns_team:
            self._team.close()
        self._closed = True
