"""Times a backend's steps, for who foretells what a model will take."""

from __future__ import annotations

import statistics
import time

from edgert.backends.base import Backend, Batch

BUDGET = 0.2  # seconds for each kind of step
BUSY = 1.5  # times an undisturbed step: what the usual one takes where other programs compute as well
MOST = 200  # steps of a kind


class Clock:
    """Times steps as an idle machine takes them; `busy` when the usual one of a kind took far longer.

    patience:  seconds, after which a single step of a kind must do
    wanted:    the logits of each step, as `Batch.of` has it
    """

    def __init__(self, patience: float, wanted: str = "last") -> None:
        self.busy = False
        self._wanted = wanted
        self._patience, self._began = patience, time.perf_counter()

    @property
    def late(self) -> bool:
        return time.perf_counter() - self._began > self._patience

    def seconds(self, backend: Backend, depth: int, n: int, budget: float = BUDGET) -> float:
        """Of a step of n tokens behind `depth` cached ones: what three quarters of them took at least.

        Other programs make steps longer and never shorter. The first step does not count, which brings memory; all are
        taken again where other programs ran, for these may have ended.
        """
        usual, undisturbed = self._measured(backend, depth, n, budget)
        if usual > BUSY * undisturbed and not self.late:
            again, least = self._measured(backend, depth, n, budget)
            usual, undisturbed = min(usual, again), min(undisturbed, least)
        self.busy |= usual > BUSY * undisturbed
        return undisturbed

    def _measured(self, backend: Backend, depth: int, n: int, budget: float) -> tuple[float, float]:
        """The median, and the first quartile."""
        size = min(n, backend.n_batch)
        parts = [
            Batch.of([(7 * i + start) % backend.n_vocab for i in range(size)], start, wanted=self._wanted)
            for start in range(depth, depth + n, size)
        ]
        seconds: list[float] = []
        least = 1 if self.late else 2
        while len(seconds) < least or (sum(seconds[1:]) < budget and len(seconds) < MOST and not self.late):
            began = time.perf_counter()
            if n == 1:
                backend.step(1, 0)  # the way that it is asked for
            else:
                for part in parts:
                    backend.forward(part)
            seconds.append(time.perf_counter() - began)
            backend.truncate(0, depth)
        steps = sorted(seconds[1:] or seconds)
        return statistics.median(steps), steps[len(steps) // 4]
