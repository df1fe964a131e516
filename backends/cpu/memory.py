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
import threading
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = max(4096, mmap.PAGESIZE)
LARGE_PAGE = 2 << 20
SMALL_AT_ONCE = 128 << 10  # bytes of small pages that are brought at a time: the cache still holds their zeros
JUDGED = 8 * LARGE_PAGE  # bytes of fresh memory after which it is judged
SLOW = 1e-3  # seconds of a processor for a large page, in which small ones of as many bytes can be had


def aligned(n_bytes: int) -> NDArray[np.uint8]:
    """Zeroed bytes at a multiple of the system's page, or where there are many of a large one.

    Memory comes into being when it is touched: a large page at a time, where NumPy may ask the system for them.
    """
    alignment = LARGE_PAGE if n_bytes >= 4 * LARGE_PAGE else ALIGNMENT
    raw = np.zeros(n_bytes + alignment, np.uint8)
    skip = -raw.ctypes.data % alignment
    return raw[skip : skip + n_bytes]


class FreshMemory:
    """How memory is brought into being just before it is written to: in large pages while these come quickly.

    A host that takes back what its guests leave free gives a small page sooner than a large one, up to ten times as
    soon. The system may make large ones of them later, when it has time.

    pieces:  (first, last) addresses of the memory
    scarce:  whether small pages come slowly too, several times as slowly as those that were in use a moment ago
    """

    def __init__(self, pieces: Sequence[tuple[int, int]]) -> None:
        self._pieces = pieces
        self._large = True
        self._judged, self._seconds = 0, 0.0
        self._lock = threading.Lock()
        self.scarce = False

    @property
    def unit(self) -> int:
        """Bytes that are to be brought at a time."""
        return LARGE_PAGE if self._large else SMALL_AT_ONCE

    def judge(self, n_bytes: int, seconds: float) -> None:
        """Learns how long a processor took to bring some memory; any thread may tell."""
        with self._lock:
            self._judged, self._seconds = self._judged + n_bytes, self._seconds + seconds
            if self._judged < JUDGED:
                return
            slow = self._seconds >= self._judged / LARGE_PAGE * SLOW
            self._judged, self._seconds = 0, 0.0
            self.scarce = self.scarce or (slow and not self._large)
            if slow and self._large:  # of all memory at once, as advice stops the threads that wait for some
                self._advise("MADV_NOHUGEPAGE")
                self._large = False

    def settle(self) -> None:
        """Says that no more memory is needed, and small pages may become large ones."""
        if not self._large:
            self._advise("MADV_HUGEPAGE")

    def _advise(self, advice: str) -> None:
        for begin, end in self._pieces:
            _madvise()(begin, end - begin, getattr(mmap, advice))


def system_call() -> int:
    """The address of madvise, where memory can be brought by it; else 0."""
    return ctypes.cast(_madvise(), ctypes.c_void_p).value or 0 if sys.platform.startswith("linux") else 0


@functools.cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


class Arena:
    """Hands out arrays from large pieces, one beside the other; they are freed together."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._piece = np.empty(0, np.uint8)
        self._used = 0
        self.n_bytes = 0
        self.pieces: list[tuple[int, int]] = []  # (first, last) addresses

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        """Zeroed bytes at a multiple of 64."""
        if self._used + n_bytes > len(self._piece):
            self._piece = aligned(-(-n_bytes // self._piece_bytes) * self._piece_bytes)
            self._used = 0
            begin = self._piece.ctypes.data
            self.pieces.append((begin, begin + len(self._piece)))
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
    for begin, end in _never_written(library):
        _madvise()(begin, end - begin, mmap.MADV_DONTNEED)


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
