"""What of a step decides its tape, and where its numbers stand in the header that the kernels read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu.layouts import CODECS, WINDOW

if TYPE_CHECKING:
    from edgert.backends.cpu.weights import Matrix

SPARE = 8  # rows that buffers have beyond n_batch, since products run in steps of up to so many
PRIVATE_ROWS = 2  # up to so many rows every thread prepares its own copy instead of meeting the others
WIDTHS = (1, 2, 3, 4, 5, 6, 8)  # tokens that a product kernel may run together
BYTE_TILES = 16  # the width of more tokens than that where the processor has tiles

# Places in a step's header. The last four: of runs of experts, how many there are and how many slots they take.
N_TOKENS, N_WIDE, N_NARROW, N_WANTED, ZERO, N_WANTED_TILED = range(6)
N_WIDE_RUNS, N_WIDE_SLOTS, N_NARROW_RUNS, N_NARROW_SLOTS = range(6, 10)
N_PLACES = 10


def width_for(n: int) -> int:
    """The narrowest product kernel that runs n tokens at once, or the widest."""
    return next((width for width in WIDTHS if width >= n), WIDTHS[-1])


@dataclass(frozen=True)
class Group:
    """Rows that take the same kernels: from which row, how many (places in the header), in which form, how wide."""

    first: int
    count: int
    form: str  # of rows beside packed weights: "int8", "pairs" or "tiles"
    width: int
    private: bool = False

    def form_for(self, matrix: Matrix) -> str:
        """The form in which a matrix reads the rows."""
        return "f32" if self.form != "tiles" and CODECS[matrix.codec].is_float else self.form

    def forms_for(self, matrices: Iterable[Matrix]) -> list[str]:
        """The forms in which these matrices read them."""
        return sorted({self.form_for(matrix) for matrix in matrices})


@dataclass(frozen=True)
class Shape:
    """What of a step decides its tape: whether there are wide rows, and the widths of the other products."""

    wide: bool
    narrow: int  # width of the narrow rows' products, 0: none, BYTE_TILES: by int8 tiles
    wanted: int  # width of the head's product, 0: no logits, BYTE_TILES or TILE_TOKENS: by tiles
    private: bool


def wide_first(sequences: NDArray[np.int32], positions: NDArray[np.int32]) -> tuple[NDArray[np.int64] | None, int]:
    """An order of a step's rows with all whole windows first, and how many rows these are; None: as they are."""
    n = len(sequences)
    if n < WINDOW:
        return None, 0
    keys = sequences.astype(np.int64) << 40 | positions.astype(np.int64) // WINDOW
    windows, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    wide = (counts == WINDOW)[inverse]
    n_wide = int(wide.sum())
    if not n_wide:
        return None, 0
    if wide[:n_wide].all() and len(windows) and (np.diff(keys[:n_wide]) >= 0).all():
        return None, n_wide
    narrow = np.flatnonzero(~wide)
    wide_rows = np.flatnonzero(wide)
    return np.concatenate([wide_rows[np.argsort(keys[wide_rows], kind="stable")], narrow]), n_wide


class FewTokens:
    """Lays out a step of a few tokens of one sequence, as replies and their guesses take it.

    Between two steps whatever is touched is read from memory: NumPy's way to a single number is long, a
    memoryview's is short.

    tokens, positions, slots, wanted, header:  the int64 arrays that the kernels read
    """

    def __init__(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        wanted: NDArray[np.int64],
        header: NDArray[np.int64],
    ) -> None:
        self._tokens, self._positions, self._slots = tokens.data, positions.data, slots.data
        self._wanted, self._header = wanted.data, header.data

    def lay_out(self, tokens: Sequence[int], position: int, sequence: int, n_wanted: int, tiled: int = 0) -> None:
        """position: of the first token; n_wanted: logits after the last tokens; tiled: of these, see `Graph.tiled`"""
        n, header, wanted = len(tokens), self._header, self._wanted
        places, positions, slots = self._tokens, self._positions, self._slots
        for i, token in enumerate(tokens):
            places[i], positions[i], slots[i] = token, position + i, sequence
        for i in range(n_wanted):
            wanted[i] = n - n_wanted + i
        header[N_TOKENS], header[N_WIDE], header[N_NARROW], header[N_WANTED] = n, 0, n, n_wanted
        header[N_WANTED_TILED] = tiled
