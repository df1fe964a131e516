"""How fast this machine reads memory, by NumPy alone: some tenths of a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

READ_BYTES = 256 << 20  # larger than the caches of most machines


def read_bandwidth(n_threads: int, repetitions: int = 3) -> float:
    """Bytes a second that so many threads read together: dot products of a large array with itself, the best run."""
    n = READ_BYTES // 4 // n_threads
    data = np.ones(n * n_threads, np.float32)
    parts = [data[i * n : (i + 1) * n] for i in range(n_threads)]
    seconds = [_together([lambda part=part: np.dot(part, part) for part in parts]) for _ in range(repetitions)]  # type: ignore[misc]
    return n * n_threads * 4 / min(seconds)


def _together(work: list[Callable[[], object]]) -> float:
    """Seconds until all, each on a thread of its own, are done."""
    gate = threading.Barrier(len(work) + 1)

    def run(one: Callable[[], object]) -> None:
        gate.wait()
        one()

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    gate.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start
