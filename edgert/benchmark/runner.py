"""Runs a test of llama-bench on a backend of this process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgert.backends.base import Backend, Batch

WARM_UP_PROMPT = 512  # tokens at most
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Test:
    """n_prompt tokens in one prefill, or n_gen single-token steps, behind n_depth cached tokens."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    __test__ = False  # no test case of pytest

    @property
    def name(self) -> str:
        """llama-bench's name."""
        what = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{what} @ d{self.n_depth}" if self.n_depth else what


class Runner:
    """Runs tests on a backend. Token ids are random; batches are built before the clock starts."""

    def __init__(self, backend: Backend, seed: int = 0) -> None:
        import numpy as np

        self._backend = backend
        self._random = np.random.default_rng(seed)

    def warm_up(self, test: Test) -> None:
        """A prefill, or a few steps, so that memory is mapped and threads run; also what stands before them."""
        self.run(Test(min(test.n_prompt, WARM_UP_PROMPT), min(test.n_gen, WARM_UP_TOKENS), test.n_depth))

    def run(self, test: Test) -> int:
        """Nanoseconds of the test alone; what stands before it in the cache is there already."""
        self._fill(test.n_depth)
        if test.n_prompt:
            batches = self._batches(test.n_depth, test.n_prompt, self._backend.n_batch, last="last")
        else:
            batches = self._batches(test.n_depth, test.n_gen, 1, last="last", others="last")
        forward = self._backend.forward
        start = time.perf_counter_ns()
        for batch in batches:
            forward(batch)
        return time.perf_counter_ns() - start

    def _fill(self, depth: int) -> None:
        """Makes the sequence `depth` tokens long; those cached already are as random as new ones."""
        if self._backend.length(0) > depth:
            self._backend.truncate(0, depth)
        present = self._backend.length(0)
        for batch in self._batches(present, depth - present, self._backend.n_batch, last="none"):
            self._backend.forward(batch)

    def _batches(self, start: int, n: int, size: int, last: str, others: str = "none") -> list[Batch]:
        from edgert.backends.base import Batch

        tokens = self._random.integers(0, self._backend.n_vocab, n).tolist()
        return [
            Batch.of(tokens[i : i + size], start + i, wanted=last if i + size >= n else others)
            for i in range(0, n, size)
        ]
