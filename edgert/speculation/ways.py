"""Whether guessing pays where requests share a step: both ways are tried in turns, within a budget."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Ways:
    """Whether steps of so many requests make more tokens a second with guesses or without; both are measured.

    The worse way is tried again for some steps, ever more seldom as long as it stays the worse one. Meanwhile both take
    turns: what a busy machine does to one of them it does to the other, and to take what was measured before for what
    would be now made the choice one of chance. What trials have lost may be a small part of all time only.

    guessing:  which is believed to be the better way
    """

    TURN, PAIRS = 3, 4  # steps of one way after another in a trial, and pairs of such turns
    FEW = 2  # pairs after which a hopeless trial ends
    FIRST, LONGEST = 64, 2048  # steps from one trial to the next
    GAIN = 1.04  # times as many tokens a second guesses must make to be worth it
    CLEAR = 0.9  # times the better way's rate: a way below that is tried more seldom
    MEMORY = 0.98
    WATCHED = 16  # plain steps before a trial that are learned from; most of those before are not even timed
    UNWATCHED = 32  # of these at once
    BUDGET = 0.005  # of all seconds, what trials may lose
    CREDIT = 0.1  # seconds that they may lose before

    def __init__(self, guessing: bool = False, pause: int = FIRST) -> None:
        self.guessing = guessing
        self._pause, self._wait = pause, 0
        self._trial = -1  # steps of the present trial so far; -1: there is none
        self._won = 0  # its pairs in which what is tried was better
        self._pair, self._all = np.zeros((2, 2)), np.zeros((2, 2))  # of it by way: tokens and seconds
        self._tokens, self._seconds = [0.0, 0.0], [0.0, 0.0]  # of late, without guesses and with
        self._n = [0, 0]  # steps of each way since the other was on
        self._spent = self._lost = 0.0  # seconds of all steps, and those that trials of the worse way took longer
        self._price = 0.0  # of these those of the latest trial
        self._latest = 0.0  # seconds of the latest step
        self._read = 0.0  # seconds in which drafts have read what they had missed for the present one

    def like(self, doubtful: bool = False) -> Ways:
        """What is believed of other requests.

        That guesses pay there is soon tried, as every step loses if it is wrong; that they do not, as seldom as here.

        doubtful:  guesses may pay less there, and are made once a trial has shown that they pay
        """
        other = Ways(self.guessing and not doubtful, self.FIRST if self.guessing else self._pause)
        other._wait = 0 if self.guessing else self._pause
        return other

    def now(self) -> bool:
        """Whether the present step is to guess."""
        return self.guessing != (self._trial >= 0 and self._trial // self.TURN % 2 == 0)

    def rate(self, guessing: bool) -> float:
        """Tokens a second of late; 0: not known."""
        return self._tokens[guessing] / self._seconds[guessing] if self._seconds[guessing] else 0.0

    def rest(self) -> int:
        """Steps from now on, without guesses, of which nothing need be known: they count as gone by."""
        if self.guessing or self._trial >= 0:
            return 0
        steps = min(self._wait - self.WATCHED, self.UNWATCHED)
        if self._wait <= 0 and not self._affordable:
            steps = self.UNWATCHED
        if steps <= 0 or not self._n[False]:
            return 0
        self._wait -= steps
        self._spent += steps * self._latest
        return steps

    @property
    def _affordable(self) -> bool:
        """Whether another trial is within the budget, by what the one before has lost."""
        return self._lost + self._price <= self.CREDIT + self.BUDGET * self._spent

    def learn(self, tokens: int, seconds: float, read: float = 0.0) -> None:
        """Takes in a step, which went as `now` said.

        seconds:  with a part of those of reading texts for guesses; read: all that were spent on it in this step
        """
        way = self.now()
        self._spent += seconds
        if self._n[way]:  # one that was held up says nothing about its way
            seconds = min(seconds, 2 * self._seconds[way] / max(1.0, self._tokens[way]) * max(tokens, 1) + 1e-9)
        memory = self.MEMORY if way == self.guessing else 1.0
        self._tokens[way] = memory * self._tokens[way] + tokens
        self._seconds[way] = memory * self._seconds[way] + seconds
        self._n[way] += 1
        self._latest = seconds
        if self._trial >= 0:
            self._read += read
            self._try(way, tokens, seconds)
            return
        self._wait -= 1
        if self._wait <= 0 and self._n[way] >= self.TURN * self.PAIRS and self._affordable:
            other, self._read = not way, 0.0
            self._trial = self._won = self._n[other] = 0
            self._pair[:] = self._all[:] = 0.0
            self._tokens[other] /= 4
            self._seconds[other] /= 4

    def _try(self, way: bool, tokens: int, seconds: float) -> None:
        """Takes in a step of a trial, and decides at its end."""
        self._pair[int(way)] += tokens, seconds
        self._trial += 1
        if self._trial % (2 * self.TURN):
            return
        self._all += self._pair
        self._won += self._share(self._pair) > 1
        self._pair[:] = 0.0
        n_pairs, share, tried = self._trial // (2 * self.TURN), self._share(self._all), not self.guessing
        if n_pairs < self.PAIRS and not (n_pairs >= self.FEW and share < self.CLEAR**2):
            return
        self._trial = -1
        self._price = max(0.0, (1 - share) * self._all[int(tried), 1] + self._read * tried)
        if (share > self.GAIN and 2 * self._won > n_pairs) if tried else share * self.GAIN > 1:
            self.guessing, self._pause = tried, self.FIRST
        else:
            self._lost += self._price
            self._pause = min(self._pause * (2 if share > self.CLEAR else 4), self.LONGEST)
        self._wait = self._pause

    def _share(self, sums: NDArray[np.float64]) -> float:
        """Tokens a second of the way that is tried over those of the usual one."""
        (tried_tokens, tried_seconds), (tokens, seconds) = sums[int(not self.guessing)], sums[int(self.guessing)]
        return float(tried_tokens * seconds / max(tokens * tried_seconds, 1e-12))
