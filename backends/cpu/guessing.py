"""A draft model's guesses in one walk of a tape: step, choice, step, choice, without a word of Python between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from edgert.backends.base import Stakes
    from edgert.backends.cpu.sampling import Chain

# Places of the kernel's arguments (8 bytes each).
ARGUMENTS = (
    "chain",  # address of the sampling kernel's arguments; its history is written to
    "team",  # address of the team's state
    "count",  # guesses so far
    "steps",  # steps so far
    "most",
    "likely",  # float64: that all guesses so far are right
    "floors",  # float64 (most + 1): going on from so many guesses takes at least this chance
    "p_min",  # float64: the least probability of a guess
    "n_sure",
    "sure",  # float64 (n_sure,), ascending: bounds between classes of probabilities
    "odds",  # float64 (n_sure + 1,): how often guesses of each class are right
    "shares",  # result, float64 (most,): the guesses' probabilities
    "n_ends",
    "ends",  # int64 (n_ends,): tokens after which nothing is guessed
    "position",  # of the token that the step before has read
    "tokens",  # where the next step finds its token, as the next two
    "positions",
    "wanted",
    "header",  # int64 (n_header,): the step's numbers of rows
    "one",  # the same of a step of one token
    "n_header",
    "tapes",  # int64 (most + 1, 2): the target's steps that check so many guesses; 0: none follows
    "extra",  # float64 (most + 1,): tokens that the time of checking so many guesses would give otherwise
    "unknown",  # int64 (most + 1,): whether that is a mere belief
    "checked",  # result: guesses that the target's step has checked
    "target_chain",  # address of the sampling kernel's arguments for the target
    "target_logits",
    "target_tokens",  # where the target's step finds its tokens, as the next four
    "target_positions",
    "target_slots",
    "target_wanted",
    "target_header",
    "sequence",
)
PLACE = {name: place for place, name in enumerate(ARGUMENTS)}
_CHAIN, _MOST, _POSITION, _COUNT, _STEPS, _LIKELY = (
    PLACE[x] for x in ("chain", "most", "position", "count", "steps", "likely")
)
ROWS = 2  # tokens that the first step may read


class Guessing:
    """The kernel's arguments, and the tapes that it is part of.

    words:  int64 (len(ARGUMENTS),)
    steps:  for each number of rows, from 1 on, the words of a step with the kernel behind it, int64 (n_ops, 3)
    most:   guesses
    """

    def __init__(self, words: NDArray[np.int64], steps: Sequence[NDArray[np.int64]], most: int) -> None:
        self.words, self.most = words.data, most
        self._doubles: memoryview[float] = words.view(np.float64).data  # type: ignore[assignment]
        self._tapes = [np.concatenate([first, *[steps[0]] * (most - 1)]) for first in steps]
        self._addresses = [tape.ctypes.data for tape in self._tapes]
        self._ends = [[len(first) + i * len(steps[0]) for i in range(most)] for first in steps]
        self.shares = np.zeros(most)
        self._stakes: Stakes | None = None
        words[PLACE["shares"]] = self.shares.ctypes.data

    def tape(self, n_rows: int, most: int) -> tuple[int, int]:
        """Address and length of up to `most` steps, the first with `n_rows` rows."""
        return self._addresses[n_rows - 1], self._ends[n_rows - 1][most - 1]

    def set(self, chain: Chain, stakes: Stakes, most: int, position: int) -> None:
        """Writes the arguments. position: of the last token that the first step reads"""
        words, doubles = self.words, self._doubles
        words[_CHAIN], words[_MOST], words[_POSITION], words[_COUNT], words[_STEPS] = (
            chain.address,
            most,
            position,
            0,
            0,
        )
        doubles[_LIKELY] = 1.0
        if stakes is self._stakes:
            return
        self._stakes = stakes
        doubles[PLACE["p_min"]] = stakes.p_min
        words[PLACE["n_sure"]], words[PLACE["n_ends"]] = len(stakes.sure), len(stakes.ends)
        for name in ("floors", "sure", "odds", "ends", "extra", "unknown"):
            words[PLACE[name]] = getattr(stakes, name).ctypes.data

    @property
    def count(self) -> int:
        """Guesses of the last walk."""
        return self.words[_COUNT]

    @property
    def steps(self) -> int:
        """Steps of the last walk."""
        return self.words[_STEPS]
