"""Whether llama.cpp's AMX kernels work here; where they do not, they are kept from being chosen.

llama.cpp built by a GCC older than 12.4, 13.3 or 14 loads an AMX tile configuration of which only the first
8 bytes are written, and the process dies of SIGSEGV in its first prefill (ggml-org/llama.cpp issue 20824,
GCC bug 114098). So the kernels are tried once for each build, in a process of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from edgert import ending
from edgert.notes import Notes

log = logging.getLogger(__name__)

TIMEOUT = 120.0  # seconds
_TRY = """
import sys
import numpy as np
from edgert.backends.base import Batch
from edgert import ending
from edgert.backends.llama.backend import LlamaBackend
ending.with_parent()
rows = []
for extra in (False, True):
    backend = LlamaBackend(sys.argv[1], n_ctx=64, n_threads=1, use_extra_bufts=extra, n_gpu_layers=0)
    tokens = np.arange(32) * 7919 % backend.n_vocab
    rows.append(backend.forward(Batch.of(tokens, 0, wanted="all")).astype(np.float64))
    used = "AMX" in backend.verdict.details["buffers"]
    backend.close()
a, b = (row - row.mean(1, keepdims=True) for row in rows)
print("used" if used else "unused", float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())))
"""


def works(library: Path, model: str) -> bool | None:
    """Whether a prefill through AMX gives what the plain kernels give; found once for a build, then remembered.

    None, and nothing to remember, when the model has no tensor that goes through AMX.

    library:  the file of llama.cpp's CPU kernels
    model:    path of a sound model to try it with
    """
    found = known(library)
    if found is None:
        found = _try(model)
        if found is not None:
            Notes("llama-amx").put(_key(library), found)
    return found


def known(library: Path) -> bool | None:
    """What was found out for a build; None: nothing yet."""
    found = Notes("llama-amx").get(_key(library))
    return None if found is None else bool(found)


def _key(library: Path) -> str:
    facts = library.stat()
    return f"{library}:{facts.st_size}:{facts.st_mtime_ns}"


def _try(model: str) -> bool | None:
    if getattr(sys, "frozen", False):
        return False  # no interpreter to try it in
    try:
        status, said = _ran([sys.executable, "-c", _TRY, model])
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("The AMX kernels of llama.cpp could not be tried (%s): they stay unused.", error)
        return False
    words = said.split()
    fine = status == 0 and len(words) == 2 and float(words[1]) > 0.9
    if not fine:
        log.info("AMX kernels of llama.cpp: status %s, %s", status, said.strip())
    return None if fine and words[0] == "unused" else fine


def _ran(command: list[str]) -> tuple[int, str]:
    """The status of a process and what it said. Raises: OSError, subprocess.TimeoutExpired, Stopped."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=ending.OWN_GROUP,
    ) as process:
        try:
            with ending.current().calls(process.kill):
                said, _ = process.communicate(timeout=TIMEOUT)
        except BaseException:
            process.kill()
            raise
    ending.check()
    return process.returncode, said


class _SignalStack(ctypes.Structure):
    _fields_ = [("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """While it lasts, Linux refuses AMX to this process, so that llama.cpp takes its next best kernels.

    The kernel grants AMX only when every alternate signal stack could hold the tiles; this one could not.
    llama.cpp asks once, at its first load. Source: Documentation/arch/x86/xstate.rst.

    Raises: OSError when the process has been granted AMX before.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    memory = ctypes.create_string_buffer(4096)
    small = _SignalStack(ctypes.addressof(memory), 0, len(memory))
    before = _SignalStack()
    if libc.sigaltstack(ctypes.byref(small), ctypes.byref(before)):
        raise OSError(ctypes.get_errno(), "sigaltstack")
    try:
        yield
    finally:
        libc.sigaltstack(ctypes.byref(before), None)
