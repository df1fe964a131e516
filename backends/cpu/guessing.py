"""A draft model's guesses in one walk of a tape: step, choice, step, choice, without a word of Python between.

The walk may go on to the target's step that checks them, and from there to further rounds of both.
"""

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
    "shares",  # result, float64 (most,): the guesses' probabilities, those of further rounds behind them
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
    "further",  # guesses of the first round that are checked beyond those that pay
    "ease",  # float64: in the first round the floors are multiplied by it
    "checked",  # result: guesses that the target's step has checked
    "turned",  # when the guessing ended, in ticks
    "target_chain",  # address of the sampling kernel's arguments for the target
    "target_logits",
    "target_tokens",  # where the target's step finds its tokens, as the next four
    "target_positions",
    "target_slots",
    "target_wanted",
    "target_header",
    "sequence",
    "rounds",  # result: rounds that have ended
    "most_rounds",
    "limit",  # tokens of the text for which the caches have room
    "repeated",  # rounds end where so many of the last tokens stand somewhere before; 0: they do not
    "interrupted",  # int64 (1,): whether somebody waits for the present round's end; any thread may set it
    "log",  # result, int64 (most_rounds, LOG + most + 1): what became of each round
    "log_stride",  # bytes from one round's to the next
    "slots",  # of the draft's step
    "first_steps",  # int64 (ROWS, 2): the draft's steps, the first of so many rows
)
PLACE = {name: place for place, name in enumerate(ARGUMENTS)}
_CHAIN, _MOST, _POSITION, _COUNT, _STEPS, _LIKELY, _SHARES, _ROUNDS = (
    PLACE[x] for x in ("chain", "most", "position", "count", "steps", "likely", "shares", "rounds")
)
ROWS = 2  # tokens that the first step may read
WINDOW = 1.0  # seconds over which the counter's rate is taken
ROUNDS = 8  # rounds of guessing and checking in one walk, at most
# Of a round's log: guesses, checked ones, tokens chosen; when guessing ended, and all, in ticks; then the tokens.
N_MADE, N_CHECKED, N_CHOSEN, TURNED, DONE, LOG = range(6)


class Arguments:
    """The kernel's arguments for one sequence.

    words:   int64 (len(ARGUMENTS),)
    shares:  float64, where the guesses' probabilities go
    """

    def __init__(self, words: NDArray[np.int64], shares: NDArray[np.float64]) -> None:
        self.words = words.data
        self._doubles: memoryview[float] = words.view(np.float64).data  # type: ignore[assignment]
        self.shares = shares
        self._shares_address = shares.ctypes.data
        self._stakes: Stakes | None = None

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
        words[_SHARES], words[_ROUNDS] = self._shares_address, 0
        words[PLACE["further"]], words[PLACE["repeated"]] = stakes.further, stakes.repeated
        doubles[PLACE["ease"]] = stakes.ease
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


class Guessing(Arguments):
    """The kernel's arguments, and the tapes that it is part of.

    words:  int64 (len(ARGUMENTS),)
    steps:  for each number of rows, from 1 on, the words of a step with the kernel behind it, int64 (n_ops, 3)
    most:   guesses
    ratio:  of what a step takes to what the target's does, as long as it has not been measured
    """

    def __init__(self, words: NDArray[np.int64], steps: Sequence[NDArray[np.int64]], most: int, ratio: float) -> None:
        super().__init__(words, np.zeros(ROUNDS * most))
        self.most, self._ratio = most, ratio
        self._rate, self._last = 0.0, (0, 0.0)  # ticks a second, and when they were last looked at
        self._tapes = [np.concatenate([first, *[steps[0]] * (most - 1)]) for first in steps]
        self._addresses = [tape.ctypes.data for tape in self._tapes]
        self._ends = [[len(first) + i * len(steps[0]) for i in range(most)] for first in steps]
        log, self._first_steps = np.zeros((ROUNDS, LOG + most + 1), np.int64), np.zeros((ROWS, 2), np.int64)
        self._log = log
        words[PLACE["log"]], words[PLACE["log_stride"]] = log.ctypes.data, log.strides[0]
        words[PLACE["first_steps"]] = self._first_steps.ctypes.data
        self._first_steps[:, 0] = self._addresses

    def tape(self, n_rows: int, most: int) -> tuple[int, int]:
        """Address and length of up to `most` steps, the first with `n_rows` rows."""
        return self._addresses[n_rows - 1], self._ends[n_rows - 1][most - 1]

    def set_rounds(self, most_rounds: int, most: int, limit: int) -> None:
        """Writes the arguments of rounds. most: guesses of each; limit: tokens for which there is room"""
        self.words[PLACE["most_rounds"]], self.words[PLACE["limit"]] = most_rounds, limit
        self._first_steps[:, 1] = [ends[most - 1] for ends in self._ends]

    def rounds(self) -> list[tuple[NDArray[np.float64], int, list[int]]]:
        """What `Round` says of each round of the last walk."""
        found, start = [], 0
        for log in self._logs():
            chosen = [token for token in log[LOG : LOG + log[N_CHOSEN]] if token >= 0]
            found.append((self.shares[start : start + log[N_MADE]], log[N_CHECKED], chosen))
            start += log[N_MADE]
        return found

    def times(self, began: float, ended: float) -> list[tuple[float, float]]:
        """Seconds that guessing and checking took in each round of the last walk, whose begin and end these are."""
        logs = self._logs()
        ticks, last = logs[-1][DONE], self._last
        if ended - last[1] >= WINDOW or not self._rate:
            self._rate = max(0.0, (ticks - last[0]) / (ended - last[1])) if last[1] else 0.0
            self._last = ticks, ended
        if not self._rate:
            share = (ended - began) / (len(logs) + self._ratio * sum(log[N_MADE] for log in logs))
            return [(self._ratio * log[N_MADE] * share, share) for log in logs]
        times, start = [], ticks - self._rate * (ended - began)
        for log in logs:
            guessing, checking = log[TURNED] - start, log[DONE] - log[TURNED]
            times.append((max(0.0, guessing) / self._rate, max(0.0, checking) / self._rate))
            start = log[DONE]
        return times

    def _logs(self) -> list[list[int]]:
        logs: list[list[int]] = self._log[: self.words[_ROUNDS]].tolist()
        return logs
