"""What a block of each format can hold: x = d ls[j] q - m lm[j] in sub-block j, one row a format.

d and m are f16 numbers of the block, ls and lm small integers of a sub-block, q the code of an element. IQ4 formats put
a level in the place of q. Formats with one scale a block are the case of one sub-block with ls = lm = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgert.errors import UnsupportedFormatError
from edgert.quantize.blocks import IQ4_LEVELS
from edgert.quantize.formats import FORMATS, Format


@dataclass(frozen=True)
class Grid:
    """The numbers that a block of a format can hold.

    sub_size:  elements of a sub-block, which share a scale
    low, high: the codes q, inclusive; where there are levels the indexes of them
    scales:    the integers ls, inclusive; (1, 1) where a block has one scale
    minimums:  the integers lm, inclusive; None where the format has no minimum
    spread:    what ggml adds to x * x under the root of a weight: the mean square of the "row" or the "block",
               and how many times; None where it weighs with the importance alone
    """

    format: Format
    sub_size: int
    low: int
    high: int
    scales: tuple[int, int]
    minimums: tuple[int, int] | None = None
    levelled: bool = False
    spread: tuple[str, int] | None = ("row", 1)

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def block_size(self) -> int:
        return self.format.block_size

    @property
    def n_sub(self) -> int:
        """Sub-blocks of a block."""
        return self.format.block_size // self.sub_size

    @cached_property
    def levels(self) -> NDArray[np.float32]:
        """What the codes low ... high stand for: float32 (high - low + 1,)."""
        return (IQ4_LEVELS if self.levelled else np.arange(self.low, self.high + 1)).astype(np.float32)


GRIDS: dict[str, Grid] = {
    grid.name: grid
    for grid in (
        Grid(FORMATS["Q4_0"], 32, -8, 7, (1, 1)),
        Grid(FORMATS["Q4_1"], 32, 0, 15, (1, 1), (1, 1)),
        Grid(FORMATS["Q5_0"], 32, -16, 15, (1, 1)),
        Grid(FORMATS["Q5_1"], 32, 0, 31, (1, 1), (1, 1)),
        Grid(FORMATS["Q8_0"], 32, -127, 127, (1, 1), spread=None),
        Grid(FORMATS["Q2_K"], 16, 0, 3, (0, 15), (0, 15), spread=("block", 1)),
        Grid(FORMATS["Q3_K"], 16, -4, 3, (-32, 31), spread=("block", 2)),
        Grid(FORMATS["Q4_K"], 32, 0, 15, (0, 63), (0, 63), spread=("block", 2)),
        Grid(FORMATS["Q5_K"], 32, 0, 31, (0, 63), (0, 63), spread=("block", 2)),
        Grid(FORMATS["Q6_K"], 16, -32, 31, (-128, 127), spread=None),
        Grid(FORMATS["IQ4_NL"], 32, 0, 15, (1, 1), levelled=True, spread=("block", 2)),
        Grid(FORMATS["IQ4_XS"], 32, 0, 15, (-32, 31), levelled=True, spread=("block", 2)),
    )
}


def grid_of(format: Format | str) -> Grid:
    """The grid of a format.

    Raises: UnsupportedFormatError for a format that cannot be written in blocks.
    """
    found = GRIDS.get(str(format))
    if found is None:
        raise UnsupportedFormatError(f"edgert cannot quantize to {format}; it can to {', '.join(GRIDS)}.")
    return found
