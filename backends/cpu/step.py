"""What of a step decides its tape, and where its numbers stand in the header that the kernels read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgert.backends.cpu.layouts import CODECS

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
