"""Compiles the kernels that a quantization will need before it needs them, in child processes.

Several at a time, while the user is told; and the compiler's memory goes with the children. What is compiled lies in
the cache folder, from which this process loads it. A child that fails costs nothing: the kernel is compiled on use.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

WAYS = ("plain", "search", "feedback")  # of rounding: by values alone, by importance, with error feedback
POLL_SECONDS = 0.1

Job = tuple[str, str]  # a format's name, and one of WAYS


def compile_ahead(
    jobs: Collection[Job], n_processes: int, on_kernel: Callable[[str, int, int], object] | None = None
) -> None:
    """Compiles what the cache folder lacks.

    on_kernel:  called with (format, jobs done, all of them) while there is something to do
    """
    left = [job for job in dict.fromkeys(jobs) if not _is_ready(job)]
    n_jobs = len(left)
    running: dict[Job, subprocess.Popen[bytes]] = {}
    last = ""
    try:
        while left or running:
            while left and len(running) < n_processes:
                job = left.pop(0)
                command = [sys.executable, "-m", "edgert.quantize.kernels_ahead", *job]
                running[job] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                last = job[0]
            if on_kernel:
                on_kernel(last, n_jobs - len(left) - len(running), n_jobs)
            time.sleep(POLL_SECONDS)
            running = {job: child for job, child in running.items() if child.poll() is None}
    except OSError:  # no processes can be started here
        return
    finally:
        for child in running.values():
            child.terminate()
            child.wait()
    if n_jobs and on_kernel:
        on_kernel("", n_jobs, n_jobs)


def _is_ready(job: Job) -> bool:
    """Whether there is nothing to compile ahead; so too where code is not kept."""
    from edgert.quantize.jit import sources

    return not sources("edgert.quantize.jit") or _mark(job).exists()


def _mark(job: Job) -> Path:
    """The empty file that says a job's kernels were compiled from these sources, for this processor."""
    from edgert.quantize.jit import cache_folder, stamp

    made_of = ("edgert.quantize.feedback", "edgert.quantize.rounding")
    return cache_folder() / f"{'.'.join(job)}.{stamp(*made_of)}.ready"


def _compile(format_name: str, way: str) -> None:
    """Rounds next to nothing, which compiles all that rounding much needs."""
    import numpy as np

    from edgert.quantize import feedback, rounding
    from edgert.quantize.feedback import Curvature
    from edgert.quantize.formats import FORMATS

    n_cols = FORMATS[format_name].block_size
    values = np.linspace(-1, 1, 16 * n_cols, dtype=np.float32).reshape(16, n_cols)
    if way == "feedback":
        feedback.quantize(values, format_name, Curvature.of(np.eye(n_cols, dtype=np.float32)), method="search")
    else:
        importance = None if way == "plain" else np.ones(n_cols, np.float32)
        rounding.quantize(values, format_name, importance)
    _mark((format_name, way)).touch()


if __name__ == "__main__":
    _compile(sys.argv[1], sys.argv[2])
