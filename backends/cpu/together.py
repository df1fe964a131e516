"""A draft's guesses for several sequences in one walk: a step has a row for each that still guesses.

So its weights are read once a step, and threads and Python begin once, however many guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu.guessing import PLACE as ONE
from edgert.backends.cpu.guessing import ROWS, Arguments
from edgert.backends.cpu.step import N_NARROW, N_TOKENS, N_WANTED, N_WANTED_TILED, N_WIDE, WIDTHS

if TYPE_CHECKING:
    from edgert.backends.base import Stakes
    from edgert.backends.cpu.sampling import Chain

# Places of the kernel's arguments (8 bytes each).
ARGUMENTS = (
    "team",  # address of the team's state
    "n",  # sequences
    "guesses",  # int64 (n,): addresses of each one's arguments as `guessing.py` has them; 0: it has ended
    "steps",  # int64 (n + 1, 2): address and length of the tape of a step of so many rows
    "tokens",  # where a step finds its tokens, as the next four
    "positions",
    "slots",
    "wanted",
    "header",
    "logits",  # float32, the first row
    "stride",  # bytes from one row to the next
)
PLACE = {name: place for place, name in enumerate(ARGUMENTS)}
FEW = (1, 2, 4, WIDTHS[-1])  # rows for which steps are compiled; other numbers take the next larger ones


class Asked(NamedTuple):
    """What is guessed for one sequence; as the arguments of `CpuDraft.guess`."""

    sequence: int
    pending: list[int]
    chain: Chain
    history: NDArray[np.int32]
    n: int
    stakes: Stakes


def up(n: int) -> int:
    """The rows for which a step of n is compiled."""
    return next((few for few in FEW if few >= n), FEW[-1])


class Together:
    """The kernel's arguments, and the tapes that it is part of.

    inputs:  by name the arrays that a step reads, int64
    logits:  float32, a row for each sequence and more, where steps put them
    step:    (rows, logits, arguments=) -> the words of such a step, the kernel with arguments at that address behind it
    """

    def __init__(
        self,
        n_sequences: int,
        n_guesses: int,
        inputs: dict[str, NDArray[np.int64]],
        logits: NDArray[np.float32],
        team: int,
        step: Callable[..., NDArray[np.int64]],
    ) -> None:
        # Between two steps what is touched is read from memory: a memoryview's way to a number is short.
        self._inputs: dict[str, memoryview[int]] = {name: array.data for name, array in inputs.items()}
        self._words = words = np.zeros(len(ARGUMENTS), np.int64)
        self._guesses = np.zeros(n_sequences, np.int64)
        self._steps = np.zeros((n_sequences + 1, 2), np.int64)
        blocks, self._shares = np.zeros((n_sequences, len(ONE)), np.int64), np.zeros((n_sequences, n_guesses))
        self._each = [Arguments(*both) for both in zip(blocks, self._shares, strict=True)]
        self._addresses = [block.ctypes.data for block in blocks]
        words[PLACE["team"]], words[PLACE["logits"]], words[PLACE["stride"]] = (
            team,
            logits.ctypes.data,
            logits.strides[0],
        )
        words[PLACE["guesses"]], words[PLACE["steps"]] = self._guesses.ctypes.data, self._steps.ctypes.data
        for name, array in inputs.items():
            words[PLACE[name]] = array.ctypes.data
        self._tapes = {
            (rows, wanted): step(rows, wanted, arguments=words.ctypes.data)
            for rows in FEW
            for wanted in FEW
            if wanted <= rows <= ROWS * wanted and wanted <= up(n_sequences)
        }
        for n in range(1, n_sequences + 1):
            tape = self._tapes[up(n), up(n)]
            self._steps[n] = tape.ctypes.data, len(tape)

    def begin(self, asked: Sequence[Asked], lengths: Sequence[int], most: Sequence[int]) -> tuple[int, int]:
        """Lays out the first step: the address and length of its tape.

        lengths:  positions that each sequence has; most: guesses for each
        """
        rows, inputs = 0, self._inputs
        tokens, positions, slots, wanted = (inputs[x] for x in ("tokens", "positions", "slots", "wanted"))
        for i, (one, length, arguments) in enumerate(zip(asked, lengths, self._each, strict=False)):
            for position, token in enumerate(one.pending, length):
                tokens[rows], positions[rows], slots[rows] = token, position, one.sequence
                rows += 1
            wanted[i] = rows - 1
            arguments.set(one.chain, one.stakes, most[i], position)
            arguments.words[ONE["sequence"]] = one.sequence
            self._guesses[i] = self._addresses[i]
        header = inputs["header"]
        header[N_TOKENS], header[N_WIDE], header[N_NARROW] = rows, 0, rows
        header[N_WANTED], header[N_WANTED_TILED] = len(asked), 0
        self._words[PLACE["n"]] = len(asked)
        tape = self._tapes[up(rows), up(len(asked))]
        return tape.ctypes.data, len(tape)

    def result(self, i: int) -> tuple[NDArray[np.float64], int]:
        """The probabilities of the guesses for the sequence that was asked i-th, and the steps that it took part in."""
        one = self._each[i]
        return self._shares[i, : one.count], one.steps
