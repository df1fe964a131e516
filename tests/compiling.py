"""Compilers of kernels that stay: all that a test run compiles is compiled by a few processes.

edgert starts child processes for each set of kernels that a load lacks, which for a user happens once. Tests load
hundreds of models, on every instruction set: there the start of the children (Numba's import, and what it does before
its first function) would cost more than the compiling. Here they wait for the next set, and share functions that
kernels have in common. What they run for a kernel is the product's own `compile_one`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgert.backends.cpu import compiler
from edgert.backends.cpu.compiler import Progress
from edgert.backends.cpu.isa import Isa

IN_CHILDREN = compiler._compile  # as the product does it
MOST = 2  # instruction sets whose compilers are kept, the latest


class Compilers:
    """Processes by instruction set, each for one set's code generator."""

    def __init__(self, n_processes: int) -> None:
        self.n_processes = n_processes
        self._turns = threading.Lock()
        self._started: dict[Isa, list[subprocess.Popen[str]]] = {}

    def compile(self, names: Sequence[str], isa: Isa, root: Path, progress: Progress) -> None:
        """Stands for `compiler._compile`."""
        progress(0, len(names))
        with self._turns:
            try:
                errors = self._compile(names, isa, root, progress)
            except BaseException:
                self._close(isa)  # what it still says belongs to this set
                raise
        if errors:
            raise RuntimeError("compiling kernels failed:\n" + "\n".join(errors))

    def _compile(self, names: Sequence[str], isa: Isa, root: Path, progress: Progress) -> list[str]:
        workers = self._of(isa)
        for index, worker in enumerate(workers):
            assert worker.stdin
            print(json.dumps([str(root), names[index :: len(workers)]]), file=worker.stdin, flush=True)
        done, errors = 0, []
        for worker in workers:
            assert worker.stdout
            while said := json.loads(worker.stdout.readline()):  # nothing to read: it has ended
                if isinstance(said, list):
                    errors += said
                    break
                done += 1
                progress(done, len(names))
        return errors

    def _of(self, isa: Isa) -> list[subprocess.Popen[str]]:
        workers = self._started.pop(isa, None)
        if not workers:
            environment = {**os.environ, "NUMBA_CPU_NAME": isa.cpu, "NUMBA_CPU_FEATURES": isa.features,
                           "EDGERT_ISA": isa.name, "PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip
            workers = [
                subprocess.Popen(
                    [sys.executable, __file__], env=environment, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                ) for _ in range(self.n_processes)
            ]  # fmt: skip
        self._started[isa] = workers  # the latest is the last
        while len(self._started) > MOST:
            self._close(next(iter(self._started)))
        return workers

    def _close(self, isa: Isa) -> None:
        for worker in self._started.pop(isa, ()):
            worker.kill()
            worker.communicate()

    def close(self) -> None:
        for isa in list(self._started):
            self._close(isa)


@contextlib.contextmanager
def compilers_that_stay(n_processes: int) -> Iterator[None]:
    """What this process compiles for the cpu backend, that many processes of each instruction set compile."""
    compilers = Compilers(n_processes)
    compiler._compile = compilers.compile
    try:
        yield
    finally:
        compiler._compile = IN_CHILDREN
        compilers.close()


def main() -> None:
    """A compiler: reads [root of the cache, names], says each name that is done, then "" or [what went wrong]."""
    from edgert.backends.cpu.isa import select

    isa = select()
    for line in sys.stdin:
        root, names = json.loads(line)
        os.environ["EDGERT_CACHE"] = root
        compiler.cache_folder.cache_clear()
        try:
            for name in names:
                compiler.compile_one(name, isa)
                print(json.dumps(name), flush=True)
            print(json.dumps(""), flush=True)
        except Exception:
            print(json.dumps([traceback.format_exc()]), flush=True)


if __name__ == "__main__":
    main()
