"""The steps in which a model checks a draft's guesses and chooses tokens, ready to follow the draft's own walk."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu import compiler
from edgert.backends.cpu.backend import CpuBackend
from edgert.backends.cpu.sampling import MOST_ROWS, NAMES, Chain
from edgert.backends.cpu.step import SPARE
from edgert.backends.cpu.tape import Tape


class Check:
    """A backend's steps of 1 to n_guesses + 1 tokens of one sequence, each with the sampling kernel behind it.

    last:  the op that ends them
    """

    def __init__(self, backend: CpuBackend, n_guesses: int, last: tuple[int, int, int]) -> None:
        self._backend, self._n, self._last = backend, n_guesses, last
        self._sample = compiler.addresses(NAMES, backend.isa)[NAMES[0]]
        self._steps: list[tuple[Tape, NDArray[np.int64]]] = []
        self._table = np.zeros((n_guesses + 1, 2), np.int64)
        self._logits = np.zeros((0, 0), np.float32)
        self._chain: Chain | None = None
        self.tapes_address = self._table.ctypes.data
        self.logits_address = 0

    @staticmethod
    def serves(backend: CpuBackend, n_guesses: int) -> bool:
        """Whether logits can be sampled as the tape leaves them, row below row, in the room that is always there."""
        few = n_guesses < min(3 * SPARE, MOST_ROWS)
        return few and not backend.architecture.final_logit_softcapping and not backend._graph.tile_head

    def inputs(self) -> dict[str, NDArray[np.int64]]:
        """The arrays that a step reads."""
        graph = self._backend._graph
        return {
            "tokens": graph.tokens,
            "positions": graph.positions,
            "slots": graph.slots,
            "wanted": graph.wanted,
            "header": graph.header,
        }

    def begin(self, sequence: int, n: int, chain: Chain, history: NDArray[np.int32], end: int) -> bool:
        """Makes ready for a sequence of n tokens, the last of which is not cached, to grow to `end`; false where the
        cache lacks room."""
        backend, cache = self._backend, self._backend._cache
        if cache.lengths[sequence] != n - 1 or end > backend.n_ctx or cache.missing({sequence: end}):
            return False
        logits = backend._room_for_logits(self._n + 1)
        if logits is not self._logits:  # as after long batches
            self._logits, self.logits_address = logits, logits.ctypes.data
            self._steps = self._steps or [self._step(n) for n in range(1, self._n + 2)]
            for tape, _ in self._steps:
                backend._graph.set_logits(tape.ops, logits)
                tape.logits = logits
        if chain is not self._chain:
            self._chain = chain
            for _, words in self._steps:
                words[-2, 1] = chain.address
        chain.prepare(self.logits_address, history, n)
        chain.rows_of(logits)
        cache.grow(sequence, end)
        return True

    def end(self, sequence: int, length: int) -> None:
        """Keeps so many positions, and pages for the next step."""
        self._backend._cache.shorten(sequence, length)

    def _step(self, n: int) -> tuple[Tape, NDArray[np.int64]]:
        """A step of n tokens, and its words with those of the sampling kernel and the last op."""
        backend = self._backend
        tape = backend._tape(backend._graph.shape(0, n, n))
        words = np.concatenate([tape.words, [[self._sample, 0, 0], self._last]])  # both of one thread
        self._table[n - 1] = words.ctypes.data, len(words)
        return tape, words
