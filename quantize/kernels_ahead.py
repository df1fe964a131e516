"""Compiles the kernels that a quantization will need before it needs them, in child processes.

Several at a time, while the user is told; and the compiler's memory goes with the children. Each child compiles one
kernel after another: they share functions that it need not compile again. What is compiled lies in the cache folder,
from which this process loads it. A child that fails costs nothing: the kernel is compiled on use.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from edgert.ending import with_parent

WAYS = ("plain", "search", "feedback")  # of rounding: by values alone, by importance, with error feedback
LONG = ("Q5_K", "Q4_K", "Q6_K")  # what takes longest goes first, so that all children end at about the same time

Job = tuple[str, str]  # a format's name, and one of WAYS


def compile_ahead(
    jobs: Collection[Job], n_processes: int, on_kernel: Callable[[str, int, int], object] | None = None
) -> None:
    """Compiles what the cache folder lacks.

    on_kernel:  called with (format, jobs done, all of them) while there is something to do
    """
    left = sorted((job for job in dict.fromkeys(jobs) if not _is_ready(job)), key=lambda job: job[0] not in LONG)
    if not left:
        return
    n_jobs, waiting, tell = len(left), list(left), on_kernel or (lambda *_: None)
    children: list[_Child] = []
    try:
        children += [_Child() for _ in range(max(1, min(n_processes, n_jobs)))]
        pool = ThreadPoolExecutor(len(children))
        running = {pool.submit(child.compile, waiting.pop(0)): child for child in children}
        tell(left[0][0], 0, n_jobs)
        while running:
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                child = running.pop(done)
                if waiting and done.result():
                    running[pool.submit(child.compile, waiting.pop(0))] = child
                tell(waiting[0][0] if waiting else left[-1][0], n_jobs - len(waiting) - len(running), n_jobs)
    except OSError:  # no processes can be started here
        return
    finally:
        for child in children:  # whose ends end the threads that wait for them
            child.close()
    pool.shutdown()
    tell("", n_jobs, n_jobs)


def n_lacking(jobs: Iterable[Job]) -> int:
    """How many of the jobs compile_ahead() would have to do."""
    return sum(not _is_ready(job) for job in set(jobs))


class _Child:
    """A process that compiles one job after another."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "edgert.quantize.kernels_ahead"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def compile(self, job: Job) -> bool:
        """Whether it is done and the child can take another."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            print(*job, file=stdin, flush=True)
            return bool(stdout.readline())
        except OSError:  # it has ended
            return False

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


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
        feedback.quantize(values, format_name, Curvature(np.eye(n_cols, dtype=np.float32)))
    else:
        importance = None if way == "plain" else np.ones(n_cols, np.float32)
        rounding.quantize(values, format_name, importance)
    _mark((format_name, way)).touch()


if __name__ == "__main__":
    with_parent()
    for line in sys.stdin:
        _compile(*line.split())
        print(line, end="", flush=True)
