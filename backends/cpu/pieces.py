"""Memory of which the system holds no more than what is in use: equal pieces of a reserved range."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu.memory import ALIGNMENT, LARGE_PAGE, aligned

COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1 and later: makes a large page of small ones, which others do in time
GIVES_BACK = sys.platform.startswith("linux")  # elsewhere advice does not empty pages


class Pieces:
    """Equal pieces of a reserved range, which the system holds while they are in use, once they have been written to.

    What is emptied it holds until `give_back` is called, since to get fresh pages takes long on some hosts; then it
    goes back by the system's own pages. A piece that is taken into use is zeros, whatever it held before. Systems other
    than Linux only have the zeros.

    spare:  bytes that may lie between two pieces to have each begin at a page of the system
    large:  whether the system's large pages are wanted, in which reading costs less, wherever all of one is in use
    data:   uint8 (n, size); from one piece to the next it is `step` bytes
    used:   bool (n,)
    """

    def __init__(self, n: int, size: int, spare: int = 0, *, large: bool = False) -> None:
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        self.step = padded if padded - size <= spare else size
        self._map, self._skip, self._range = _reserved(n * self.step)
        self.data = self._range.reshape(n, self.step)[:, :size]
        self.used = np.zeros(n, np.bool_)
        self._emptied = np.full(n, np.inf)  # when pieces that still hold what they held were emptied
        self._waiting: deque[tuple[float, NDArray[np.int32]]] = deque()  # what was emptied when
        # Of each large page of the range whether it is asked for.
        self._large = np.zeros(len(self._range) // LARGE_PAGE if large and GIVES_BACK else 0, np.bool_)

    @property
    def large(self) -> bool:
        """Whether there may be large pages."""
        return len(self._large) > 0

    def use(self, pieces: Sequence[int]) -> None:
        """Has pieces that may be written to, all zeros."""
        for piece in pieces:
            if self._emptied[piece] < np.inf:
                self._piece(piece)[:] = 0
        if len(pieces):
            self._take(pieces)

    def move(self, source: int, target: int) -> None:
        """Gives what a piece in use holds to one that is not, and gives the former back."""
        self._piece(target)[:] = self._piece(source)
        self._take([target])
        self.used[source] = False
        self._give_back(np.array([source]))

    def empty(self, pieces: Sequence[int] | NDArray[np.int32], *, rested: bool = False) -> None:
        """Forgets what pieces hold; whether they had rested before."""
        emptied = np.array(pieces, np.int32)
        self.used[emptied] = False
        self._emptied[emptied] = when = 0.0 if rested else monotonic()
        (self._waiting.appendleft if rested else self._waiting.append)((when, emptied))

    @property
    def oldest(self) -> float:
        """Since when the first of those pieces has been empty that `give_back` has not seen; inf: there is none."""
        return self._waiting[0][0] if self._waiting else np.inf

    def rested(self, until: float) -> NDArray[np.int32]:
        """Pieces, ascending, that were emptied up to a time of `monotonic` and not used since: for `give_back`."""
        found = [np.zeros(0, np.int32)]
        while self._waiting and self._waiting[0][0] <= until:
            when, emptied = self._waiting.popleft()
            found.append(emptied[self._emptied[emptied] == when])
        return np.unique(np.concatenate(found))

    def give_back(self, pieces: NDArray[np.int32]) -> None:
        """Lets go of what pieces, ascending, held that are not in use."""
        if len(pieces := pieces[~self.used[pieces]]):
            self._give_back(pieces)

    def _give_back(self, pieces: NDArray[Any]) -> None:
        self._emptied[pieces] = np.inf
        for run in np.split(pieces, np.flatnonzero(np.diff(pieces) > 1) + 1):
            first, end = int(run[0]), int(run[-1]) + 1
            # Else the system would fill what is missing of a large page, to have it whole.
            self._ask_for_large(self._large_pages(first, end), False)
            self._empty_run(first, end)

    def _piece(self, piece: int) -> NDArray[np.uint8]:
        return self._range[piece * self.step : (piece + 1) * self.step]

    def _take(self, pieces: Sequence[int]) -> None:
        """Marks pieces as in use, and has whole large pages where they were the last ones lacking."""
        near = self._large_pages(min(pieces), max(pieces) + 1)
        lacking = [page for page in near if not self._large[page]]
        held = self.used | (self._emptied < np.inf)
        begun = [page for page in lacking if self._of(page, held).any()]
        self.used[pieces] = True
        self._emptied[pieces] = np.inf
        whole = [page for page in lacking if self._of(page, self.used).all()]
        self._ask_for_large(whole, True)
        for page in begun:
            if page in whole:  # others come as large ones
                self._advise(page * LARGE_PAGE, LARGE_PAGE, COLLAPSE)

    def _of(self, page: int, facts: NDArray[Any]) -> NDArray[Any]:
        """Of facts about all pieces those about pieces that have something in a large page."""
        return facts[page * LARGE_PAGE // self.step : -(-(page + 1) * LARGE_PAGE // self.step)]

    def _ask_for_large(self, pages: Sequence[int], wanted: bool) -> None:
        for page in pages:
            if self._large[page] != wanted:
                advice = mmap.MADV_HUGEPAGE if wanted else mmap.MADV_NOHUGEPAGE
                advised = self._advise(page * LARGE_PAGE, LARGE_PAGE, advice)
                self._large[page] = advised == wanted

    def _large_pages(self, first: int, end: int) -> range:
        """The large pages, from that of the first piece on, that have something of the pieces [first, end)."""
        return range(first * self.step // LARGE_PAGE, min(-(-end * self.step // LARGE_PAGE), len(self._large)))

    def _empty_run(self, first: int, end: int) -> None:
        """Empties the pieces [first, end), and lets go of the system's pages in which nothing else is in use."""
        begin, stop = first * self.step, end * self.step
        low, high = -(-begin // ALIGNMENT) * ALIGNMENT, stop // ALIGNMENT * ALIGNMENT
        if not self.used[(low - ALIGNMENT) // self.step if low > begin else first : first].any():
            low = begin // ALIGNMENT * ALIGNMENT
        if not self.used[end : -(-(high + ALIGNMENT) // self.step) if high < stop else end].any():
            high = -(-stop // ALIGNMENT) * ALIGNMENT
        if not GIVES_BACK or low >= high:
            low = high = stop
        self._range[begin:low] = self._range[high:stop] = 0
        high = min(high, len(self._range))
        if low < high and not self._advise(low, high - low, mmap.MADV_DONTNEED):  # as of memory that is locked
            self._range[low:high] = 0

    def _advise(self, begin: int, n_bytes: int, advice: int) -> bool:
        """Whether the system takes an advice about a part of the range."""
        assert self._map is not None
        with contextlib.suppress(OSError):  # of systems without large pages
            self._map.madvise(advice, self._skip + begin, n_bytes)
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
