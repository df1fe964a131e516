"""What the system really holds of an array."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import pytest

COUNTED = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux which pages are held")


def held(first: int, end: int) -> np.ndarray:
    """bool: whether each page of the system from that of address `first` on is in memory."""
    begin = first // mmap.PAGESIZE * mmap.PAGESIZE
    n = -(-(end - begin) // mmap.PAGESIZE)
    found = np.zeros(n, np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    assert mincore(begin, n * mmap.PAGESIZE, found.ctypes.data) == 0, ctypes.get_errno()
    return found & 1 == 1


def bytes_held(array: np.ndarray) -> int:
    """Of the range that a (strided) array spans."""
    first = array.ctypes.data
    end = first + sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)) + array.itemsize
    return int(held(first, end).sum()) * mmap.PAGESIZE
