"""What sequences at rest hold of a page that they do not fill, packed without gaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu.pieces import Pieces

Owner = tuple[int, int]  # a sequence, and an entry of it


class Shelf:
    """Rows of bytes, each size in a range of its own whose rows stand close: who leaves is replaced by the last one.

    So no more is held than the rows, and for each size less than a page of the system.

    n:  rows at most
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._pieces: dict[int, Pieces] = {}
        self._owners: dict[int, list[Owner]] = {}
        self._sizes: dict[Owner, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def used_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(self._sizes.values())

    def put(self, owner: Owner, parts: Sequence[NDArray[np.uint8]]) -> None:
        """Copies some arrays, uint8, for an owner who has none here."""
        size = sum(part.size for part in parts)
        if size not in self._pieces:
            self._pieces[size], self._owners[size] = Pieces(self._n, size), []
        pieces, owners = self._pieces[size], self._owners[size]
        pieces.use([len(owners)])
        start = 0
        for part in parts:
            pieces.data[len(owners), start : start + part.size].reshape(part.shape)[...] = part
            start += part.size
        owners.append(owner)
        self._sizes[owner] = size

    def take(self, owner: Owner, parts: Sequence[NDArray[np.uint8]] = ()) -> None:
        """Gives an owner's arrays back into those like them, or to nobody."""
        size = self._sizes.pop(owner)
        pieces, owners = self._pieces[size], self._owners[size]
        row, last = owners.index(owner), len(owners) - 1
        start = 0
        for part in parts:
            part[...] = pieces.data[row, start : start + part.size].reshape(part.shape)
            start += part.size
        if row < last:
            pieces.data[row] = pieces.data[last]
            owners[row] = owners[last]
        owners.pop()
        pieces.empty([last])

    @property
    def oldest(self) -> float:
        """As `Pieces.oldest`."""
        return min((pieces.oldest for pieces in self._pieces.values()), default=np.inf)

    def give_back(self, until: float) -> None:
        """Gives back what has not been in use since a time of `monotonic`."""
        for pieces in self._pieces.values():
            pieces.give_back(pieces.rested(until))

    def ranges(self) -> list[NDArray[np.uint8]]:
        """The memory that rows are in."""
        return [pieces.data for pieces in self._pieces.values()]
