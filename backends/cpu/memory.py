"""Memory for the kernels: zeroed, aligned, and in large pieces.

Systems back large pieces by large pages. That matters beyond bandwidth: streaming a model's weights empties the
caches of page tables too, and a small buffer on a page of its own then costs more to find than to read.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
from math import prod

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = max(4096, mmap.PAGESIZE)
LARGE_PAGE = 2 << 20


def aligned(n_bytes: int) -> NDArray[np.uint8]:
    """Zeroed bytes at a multiple of the system's page, or where there are many of a large one.

    Memory comes into being when it is touched: a large page at a time, where NumPy may ask the system for them.
    """
    alignment = LARGE_PAGE if n_bytes >= 4 * LARGE_PAGE else ALIGNMENT
    raw = np.zeros(n_bytes + alignment, np.uint8)
    skip = -raw.ctypes.data % alignment
    return raw[skip : skip + n_bytes]


class Arena:
    """Hands out arrays from large pieces, one beside the other; they are freed together."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._piece = np.empty(0, np.uint8)
        self._used = 0
        self.n_bytes = 0

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        """Zeroed bytes at a multiple of 64."""
        if self._used + n_bytes > len(self._piece):
            self._piece = aligned(-(-n_bytes // self._piece_bytes) * self._piece_bytes)
            self._used = 0
        start = self._used
        self._used += n_bytes + 63 & ~63
        self.n_bytes += n_bytes
        return self._piece[start : start + n_bytes]

    def floats(self, *shape: int) -> NDArray[np.float32]:
        """Zeros, float32."""
        return self.take(prod(shape) * 4).view(np.float32).reshape(shape)

    def integers(self, *shape: int) -> NDArray[np.int64]:
        """Zeros, int64."""
        return self.take(prod(shape) * 8).view(np.int64).reshape(shape)


def give_back_code(library: str) -> None:
    """Lets go of the pages of a loaded library's code and constants; what is used again comes back from its file.

    LLVM takes 45 MB while it is loaded and set up, and none of it runs once the kernels are there.
    """
    if not sys.platform.startswith("linux"):
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for begin, end in _never_written(library):
        advise(begin, end - begin, mmap.MADV_DONTNEED)


@functools.cache
def _never_written(library: str) -> list[tuple[int, int]]:
    """(first, end) of the mappings of a loaded library that are as its file has them, and stay so."""
    found, span = [], ""
    with contextlib.suppress(OSError), open("/proc/self/smaps", encoding="utf-8", errors="replace") as mappings:
        for line in mappings:
            if not line[0].isupper():  # a mapping; the lines that follow tell more of it
                address, access, _, _, _, path = [*line.split(maxsplit=5), ""][:6]
                span = address if access in ("r-xp", "r--p") and library in path else ""
            elif span and line.startswith("Anonymous:") and line.split()[1] == "0":  # no page was relocated
                begin, _, end = span.partition("-")
                found.append((int(begin, 16), int(end, 16)))
    return found
