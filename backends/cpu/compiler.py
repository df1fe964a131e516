"""Turns kernel names into addresses: compiles with Numba once, keeps the object code, loads it without Numba.

A kernel is a C function `void (int64 thread, int64 n_threads, int64 arguments)`. Its name says which module of
`kernels/` builds it and with which parameters: `product.codec=q4_1.width=1`. The object cache is keyed by the
kernel's sources, the versions of the compilers, the processor and the instruction set, so that a changed kernel,
another machine, or another EDGERT_ISA never meets old code. A warm start imports llvmlite (0.1 s), not numba (0.5 s).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path

from edgert import ending
from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.memory import give_back_code
from edgert.errors import BackendUnavailableError
from edgert.files import PART
from edgert.folders import cache_root
from edgert.quantize.jit.objects import engine, read, write

logger = logging.getLogger(__name__)

Kernel = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)  # thread, n_threads, arguments
Progress = Callable[[int, int], None]  # kernels done, kernels in all


def name_of(module: str, **parameters: object) -> str:
    """The name of a kernel: its module in `kernels/` and the parameters of that module's `build`."""
    return ".".join([module, *(f"{key}={value}" for key, value in sorted(parameters.items()))])


def parse_name(name: str) -> tuple[str, dict[str, str]]:
    """The module and the parameters that `name_of` was given."""
    module, *pairs = name.split(".")
    return module, dict(pair.split("=", 1) for pair in pairs)


_IMPORT = re.compile(r"^from edgert\.backends\.cpu\.([\w.]+) import", re.MULTILINE)


@functools.cache
def sources(module: str) -> str:
    """A hash of a kernel module's source and of all that it imports from this package."""
    folder = Path(__file__).parent
    found, left = {}, [f"kernels.{module}"]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = (folder / (name.replace(".", "/") + ".py")).read_bytes()
            left += _IMPORT.findall(found[name].decode())
    return hashlib.sha256(b"".join(found[name] for name in sorted(found))).hexdigest()[:16]


@functools.cache
def cache_folder(isa: Isa) -> Path:
    """Where the object code for this machine, instruction set and compiler lies."""
    versions = [metadata.version("numba"), metadata.version("llvmlite"), sys.version_info[:2]]
    key = json.dumps([*versions, isa.machine, isa.name, isa.cpu, isa.features])
    return cache_root() / "kernels" / hashlib.sha256(key.encode()).hexdigest()[:16]


_spare: list[tempfile.TemporaryDirectory[str]] = []  # what this process compiled and could not keep


def object_file(name: str, isa: Isa) -> Path:
    """Where a kernel's object code is kept, for the present sources."""
    folder, file = cache_folder(isa), f"{name}.{sources(parse_name(name)[0])}.o"
    if _spare and not _exists(folder / file):
        return Path(_spare[0].name) / "kernels" / folder.name / file
    return folder / file


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder on the way may not be entered
        return False


LOOK_SECONDS = 0.2  # in which who waits for another process looks whether it shall end
ROOM = 4_000_000  # bytes; many times what the kernels of a model take


def _obstacle(folder: Path) -> str | None:
    """Why no kernel can be kept in a folder, or None where one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        return "its disk is full" if shutil.disk_usage(folder).free < ROOM else None
    except OSError as error:
        return error.strerror or str(error)


def _compile_root(isa: Isa) -> Path:
    """The cache, or where it cannot be written a folder that goes with this process."""
    folder = cache_folder(isa)
    if not _spare and (obstacle := _obstacle(folder)):
        root = folder.parent.parent
        if temporary := _obstacle(Path(tempfile.gettempdir())):
            raise BackendUnavailableError(
                f"Compiled kernels can be written neither to {root} ({obstacle}) nor to {tempfile.gettempdir()} "
                f"({temporary}): set EDGERT_CACHE to a folder that can be written."
            )
        logger.warning(
            "Compiled kernels cannot be kept in %s (%s), so every start compiles them again: set EDGERT_CACHE to a "
            "folder that can be written.", root, obstacle,
        )  # fmt: skip
        _spare.append(tempfile.TemporaryDirectory(prefix="edgert-"))
    return Path(_spare[0].name) if _spare else folder.parent.parent


_addresses: dict[tuple[str, Isa], int] = {}


def addresses(names: Iterable[str], isa: Isa, progress: Progress | None = None) -> dict[str, int]:
    """Addresses of kernels, compiled first where the cache lacks them (in child processes, one per core)."""
    wanted = [name for name in dict.fromkeys(names) if (name, isa) not in _addresses]
    if wanted:
        stored = {name: read(object_file(name, isa)) for name in wanted}
        if missing := [name for name in wanted if stored[name] is None]:
            compile_all(missing, isa, progress)
            stored.update((name, read(object_file(name, isa))) for name in missing)
        from llvmlite import binding

        symbols = {}
        for name, found in stored.items():
            if found is None:
                raise BackendUnavailableError(f"{object_file(name, isa)} cannot be read: delete its folder.")
            symbols[name], code = found
            engine().add_object_file(binding.ObjectFileRef.from_data(code))
        engine().finalize_object()
        for name in wanted:
            _addresses[name, isa] = engine().get_function_address(symbols[name])
        give_back_code("libllvmlite")
    return {name: _addresses[name, isa] for name in names}


def compile_all(names: Sequence[str], isa: Isa, progress: Progress | None = None) -> None:
    """Compiles kernels that the cache lacks into it; programs that start side by side do it one after the other."""
    from filelock import FileLock, Timeout

    root = _compile_root(isa)
    (root / "kernels").mkdir(exist_ok=True)
    lock = FileLock(root / "kernels" / f"{cache_folder(isa).name}.lock")
    progress = progress or (lambda done, total: None)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress(0, len(names))
        while not lock.is_locked:
            ending.check()
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=LOOK_SECONDS)
    try:
        missing = [name for name in names if read(object_file(name, isa)) is None]
        if missing:
            _compile(missing, isa, root, progress)
        else:
            progress(len(names), len(names))
    finally:
        lock.release()


def _compile(names: Sequence[str], isa: Isa, root: Path, progress: Progress) -> None:
    """Compiles in as many child processes as there are cores to use.

    Children keep Numba's memory out of this process and let each instruction set have its own code generator.
    A frozen application has no interpreter to start and compiles in its own process.
    """
    progress(0, len(names))
    if getattr(sys, "frozen", False) or not sys.executable:
        for done, name in enumerate(names, 1):
            ending.check()
            compile_one(name, isa)
            progress(done, len(names))
        return
    for part in (root / "kernels" / cache_folder(isa).name).glob("*" + PART):  # of a child that was killed
        part.unlink(missing_ok=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n_workers = max(1, min(cores, len(names) // 2, 8))
    environment = {**os.environ, "NUMBA_CPU_NAME": isa.cpu, "NUMBA_CPU_FEATURES": isa.features,
                   "EDGERT_ISA": isa.name, "EDGERT_CACHE": str(root)}  # fmt: skip
    done = 0
    workers: list[subprocess.Popen[str]] = []

    def kill() -> None:
        for worker in workers:
            worker.kill()

    errors = []
    with contextlib.ExitStack() as ends, ending.current().calls(kill):
        try:
            for index in range(n_workers):
                command = [sys.executable, "-m", "edgert.backends.cpu.compiler", *names[index::n_workers]]
                worker = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                          text=True, process_group=ending.OWN_GROUP)  # fmt: skip
                workers.append(ends.enter_context(worker))
            for worker in workers:
                assert worker.stdout and worker.stderr
                ending.check()
                for _ in worker.stdout:
                    done += 1
                    progress(min(done, len(names)), len(names))
                errors.append(worker.stderr.read())
                worker.wait()
        except BaseException:
            kill()
            raise
        ending.check()  # else they have ended because they were killed
    if any(worker.returncode for worker in workers):
        raise RuntimeError("compiling kernels failed:\n" + "\n".join(errors))


def compile_one(name: str, isa: Isa) -> None:
    """Builds one kernel and stores its object code."""
    from numba import cfunc, types

    module, parameters = parse_name(name)
    function = importlib.import_module(f"edgert.backends.cpu.kernels.{module}").build(isa, **parameters)
    # All code shares one space of symbols, and Numba makes a symbol of the function's name.
    function.__qualname__ = function.__name__ = f"{isa.name}_{name}"
    signature = types.void(types.int64, types.int64, types.int64)
    compiled = cfunc(signature, error_model="numpy", forceinline=True)(function)
    write(object_file(name, isa), compiled.native_name, compiled._library._get_compiled_object())


def main(names: Sequence[str]) -> None:
    """What a child process runs: compiles each name and prints it when it is done."""
    from edgert.backends.cpu.isa import select

    ending.with_parent()
    with contextlib.suppress(BrokenPipeError):
        for name in names:
            compile_one(name, select())
            print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
