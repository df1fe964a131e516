"""How long a quantization will take: what there is to do, at the pace that this machine had before."""

from __future__ import annotations

import time
from collections.abc import Mapping

from edgert.notes import Notes
from edgert.quantize.progress import EXPECTED, OnProgress

# Seconds of a thread for a unit of work (a weight, a weight times a token that it is multiplied by, a kernel): those of
# an AMD EPYC with AVX-512, where this machine has not done such work yet.
USUAL = {
    "calibrating": 7.6e-11,
    "judging": 2.5e-10,
    "probing": 2.4e-11,
    "measuring": 1.9e-7,
    "compiling": 14.0,
    "quantizing": 2.9e-7,
    "quantizing plainly": 2.2e-8,
    "comparing": 2e-11,
}
LEAST = 2.0  # seconds of a stage from which on it tells a pace


class Forecast:
    """Passes on how far the work is, and learns meanwhile how long its stages take."""

    def __init__(self, progress: OnProgress, n_threads: int) -> None:
        self._progress, self._n_threads = progress, n_threads
        self._work: Mapping[str, float] = {}
        self._took: dict[str, float] = {}
        self._stage, self._since = "", 0.0
        self._notes = Notes("quantizing")

    def __call__(self, stage: str, name: str, done: float, total: float) -> None:
        self._enter(stage)
        self._progress(stage, name, done, total)

    def begin(self, work: Mapping[str, float]) -> None:
        """Tells what all will take. work: what there is to do, by stage, and by what kind of it behind its name."""
        self._work = work
        known = self._notes.all()
        seconds = sum(units * float(known.get(stage) or USUAL[stage]) for stage, units in work.items())
        self._progress(EXPECTED, "", 0, seconds / self._n_threads)

    def end(self) -> None:
        """Keeps what was learned; after a run that has done all of its work."""
        self._enter("")
        for kind, units in self._work.items():
            took = self._took.get(kind.split()[0], 0.0)
            if units and took >= LEAST:
                self._notes.put(kind, took * self._n_threads / units)

    def _enter(self, stage: str) -> None:
        now = time.monotonic()
        if self._stage:
            self._took[self._stage] = self._took.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now
