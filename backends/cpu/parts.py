"""A step that is walked some layers at a time, between which other sequences take steps of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from edgert.backends.cpu.tape import Tape
from edgert.backends.cpu.team import Team


class Walk:
    """A tape on its way.

    state:  the rows that pass from one layer to the next, and what tells whose they are; they are kept aside while
            the buffers serve others
    """

    def __init__(self, tape: Tape, team: Team, state: Sequence[NDArray[Any]]) -> None:
        self._tape, self._team, self._state = tape, team, state
        self._kept: list[NDArray[Any]] = []
        self._done = 0  # ops

    def go_on(self, seconds: float) -> bool:
        """Walks for about so long, one layer at least; whether the end is reached."""
        began = last = perf_counter()
        for place, kept in zip(self._state, self._kept, strict=False):
            place[:] = kept
        longest = 0.0  # of the layers
        for end in self._tape.layers:
            if end <= self._done:
                continue
            self._team.run(self._tape.words[self._done : end])
            self._done, now = end, perf_counter()
            longest, last = max(longest, now - last), now
            if now - began + longest > seconds and end < len(self._tape.words):
                self._kept = [place.copy() for place in self._state]
                return False
        return True
