"""Memory of which the system holds no more than what is in use: equal pieces of a reserved range."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections import deque
from collections.abc import Sequence
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu.memory import ALIGNMENT, LARGE_PAGE, aligned

GIVES_BACK = sys.platform.startswith("linux")  # elsewhere advice does not empty pages


class Pieces:
    """Equal pieces of a reserved range, which the system holds while they are in use, once they have been written to.

    What is emptied it holds until `give_back` is called, since to get fresh pages takes long on some hosts; then it
    goes back by the system's own pages. Where there are large ones, more is held until `trim` is called. A piece that
    is taken into use is zeros, whatever it held before. Systems other than Linux only have the zeros.

    spare:  bytes that may lie between two pieces to have each begin at a page of the system
    large:  whether large pages are wanted, in which reading costs less
    data:   uint8 (n, size); from one piece to the next it is `step` bytes
    """

    def __init__(self, n: int, size: int, spare: int = 0, *, large: bool = False) -> None:
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        self.step = padded if padded - size <= spare else size
        self._map, self._skip, self._range = _reserved(n * self.step)
        self.data = self._range.reshape(n, self.step)[:, :size]
        self._used = np.zeros(n, np.bool_)
        self._emptied = np.full(n, np.inf)  # when pieces that still hold what they held were emptied
        self._waiting: deque[tuple[float, NDArray[np.int32]]] = deque()  # what was emptied when
        # Of each large page of the range whether it is asked for.
        self._large = np.zeros(len(self._range) // LARGE_PAGE if large and GIVES_BACK else 0, np.bool_)
        self._ask_for_large(range(len(self._large)), True)

    def use(self, pieces: Sequence[int]) -> None:
        """Has pieces that may be written to, all zeros."""
        if not len(pieces):
            return
        for piece in pieces:
            if self._emptied[piece] < np.inf:
                self._range[piece * self.step : (piece + 1) * self.step] = 0
        self._used[pieces] = True
        self._emptied[pieces] = np.inf
        if not self._large.all():
            whole = [page for page in self._large_pages(min(pieces), max(pieces) + 1) if self._uses(page).all()]
            self._ask_for_large(whole, True)

    def empty(self, pieces: Sequence[int] | NDArray[np.int32], *, at_once: bool = False) -> None:
        """Forgets what pieces hold; with `at_once` they are given back."""
        emptied = np.array(pieces, np.int32)
        self._used[emptied] = False
        if at_once:
            self._give_back(emptied)
        else:
            self._emptied[emptied] = now = monotonic()
            self._waiting.append((now, emptied))

    @property
    def oldest(self) -> float:
        """Since when the first of those pieces has been empty that `give_back` has not seen; inf: there is none."""
        return self._waiting[0][0] if self._waiting else np.inf

    def give_back(self, until: float = np.inf) -> None:
        """Lets go of what was emptied up to a time of `monotonic`, and has not been in use since."""
        given = []
        while self._waiting and self._waiting[0][0] <= until:
            when, emptied = self._waiting.popleft()
            given.append(emptied[self._emptied[emptied] == when])
        if given and len(pieces := np.concatenate(given)):
            self._give_back(pieces)

    def _give_back(self, pieces: NDArray[np.int32]) -> None:
        self._emptied[pieces] = np.inf
        ordered = np.sort(pieces)
        for run in np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1):
            first, end = int(run[0]), int(run[-1]) + 1
            large = [page for page in self._large_pages(first, end) if self._large[page]]
            free = [page for page in large if not (self._uses(page).any() or self._waits(page))]
            if len(free) < len(large):  # giving back a part of a large page would cut it in small ones
                self._range[first * self.step : end * self.step] = 0
            else:
                self._empty_run(first, end)
            self._trim(free)

    def trim(self) -> None:
        """Lets go of what large pages hold beside pieces in use, and have held for long."""
        large = np.flatnonzero(self._large).tolist()
        self._trim([page for page in large if self._uses(page).any() and not self._waits(page)])

    def _trim(self, pages: Sequence[int]) -> None:
        for page in pages:
            uses = self._uses(page)
            if uses.any() and not uses.all():  # else the system would fill what is missing, to have it whole
                self._ask_for_large([page], False)
            first = page * LARGE_PAGE // self.step
            for piece in np.flatnonzero(~uses).tolist():
                self._empty_run(first + piece, first + piece + 1)

    def _uses(self, page: int) -> NDArray[np.bool_]:
        """Which pieces that have something in a large page are in use."""
        return self._used[page * LARGE_PAGE // self.step : -(-(page + 1) * LARGE_PAGE // self.step)]

    def _waits(self, page: int) -> bool:
        """Whether pieces that have something in a large page are yet to be given back."""
        emptied = self._emptied[page * LARGE_PAGE // self.step : -(-(page + 1) * LARGE_PAGE // self.step)]
        return bool((emptied < np.inf).any())

    def _ask_for_large(self, pages: Sequence[int], wanted: bool) -> None:
        for page in pages:
            if self._large[page] != wanted:
                advised = self._advise(page * LARGE_PAGE, LARGE_PAGE, "HUGEPAGE" if wanted else "NOHUGEPAGE")
                self._large[page] = advised == wanted

    def _large_pages(self, first: int, end: int) -> range:
        """The large pages, from that of the first piece on, that have something of the pieces [first, end)."""
        return range(first * self.step // LARGE_PAGE, min(-(-end * self.step // LARGE_PAGE), len(self._large)))

    def _empty_run(self, first: int, end: int) -> None:
        """Empties the pieces [first, end), and lets go of the system's pages in which nothing else is in use."""
        begin, stop = first * self.step, end * self.step
        low, high = -(-begin // ALIGNMENT) * ALIGNMENT, stop // ALIGNMENT * ALIGNMENT
        if not self._used[(low - ALIGNMENT) // self.step if low > begin else first : first].any():
            low = begin // ALIGNMENT * ALIGNMENT
        if not self._used[end : -(-(high + ALIGNMENT) // self.step) if high < stop else end].any():
            high = -(-stop // ALIGNMENT) * ALIGNMENT
        if not GIVES_BACK or low >= high:
            low = high = stop
        self._range[begin:low] = self._range[high:stop] = 0
        high = min(high, len(self._range))
        if low < high and not self._advise(low, high - low, "DONTNEED"):  # as of memory that is locked
            self._range[low:high] = 0

    def _advise(self, begin: int, n_bytes: int, advice: str) -> bool:
        """Whether the system takes an advice about a part of the range."""
        assert self._map is not None
        with contextlib.suppress(OSError):  # of systems without large pages
            self._map.madvise(getattr(mmap, f"MADV_{advice}"), self._skip + begin, n_bytes)
            return True
        return False


def _reserved(n_bytes: int) -> tuple[mmap.mmap | None, int, NDArray[np.uint8]]:
    """Zeroed bytes in small pages, which the system holds once they are written to, where many are at a large one's
    begin: the mapping, where in it they begin, and they. Without a mapping nothing can be given back."""
    if not GIVES_BACK:
        return None, 0, aligned(n_bytes)
    room = LARGE_PAGE if n_bytes >= LARGE_PAGE else 0
    mapping = mmap.mmap(-1, max(n_bytes + room, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    skip = -whole.ctypes.data % LARGE_PAGE if room else 0
    return mapping, skip, whole[skip : skip + n_bytes]
