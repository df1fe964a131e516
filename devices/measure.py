"""How fast this machine reads memory, by NumPy alone: some tenths of a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

READ_BYTES = 256 << 20  # larger than the caches of most machines
SIZES = tuple(size << 20 for size in (16, 64, 128, 256))  # that models and their caches have, from caches to memory


def read_bandwidth(n_threads: int, repetitions: int = 3, n_bytes: int = READ_BYTES) -> float:
    """Bytes a second that so many threads read together: dot products of a large array with itself, the best run."""
    n = n_bytes // 4 // n_threads
    data = np.ones(n * n_threads, np.float32)
    parts = [data[i * n : (i + 1) * n] for i in range(n_threads)]
    passes = max(1, READ_BYTES // n_bytes // 2)  # over a small array, so that starting threads does not count

    def read(part: NDArray[np.float32]) -> None:
        for _ in range(passes):
            np.dot(part, part)

    seconds = [_together([lambda part=part: read(part) for part in parts]) for _ in range(repetitions)]  # type: ignore[misc]
    return n * n_threads * 4 * passes / min(seconds)


def read_bandwidths(n_threads: int) -> dict[int, float]:
    """Bytes a second by how many bytes are read again and again, of SIZES."""
    found, best = {}, 0.0
    for size in reversed(SIZES):  # what is smaller is read no slower, but for other programs
        found[size] = best = max(best, read_bandwidth(n_threads, 4, size))
    return found


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
