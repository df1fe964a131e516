"""What speculation costs and brings: estimates that follow the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from edgert.backends.base import Backend, Batch


class Costs:
    """Seconds that a step takes, by its rows; `costs[n]` for n from 1 to the length of what was given.

    The proportions between sizes change slowly and the level quickly, so that a size that is not in use is not
    thought dear because the machine was busy when it was measured. What a size was first thought to cost gives way
    to the first steps of that size, since the machine may have been busy then too.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        self._level = seconds[0]
        self._shape = [s / seconds[0] for s in seconds]
        self._seen = [0] * len(seconds)

    @classmethod
    def measure(cls, backend: Backend, n_most: int, budget: float = 0.04) -> Costs:
        """Times steps of an idle backend; sizes between are interpolated, as are those that the budget (seconds) leaves
        no time for."""
        sizes = [n for n in (1, 2, 4, 8, 9, 16) if n <= n_most]
        found: dict[int, float] = {}
        began, turn = perf_counter(), 0
        while turn < 2 or (turn < 8 and perf_counter() - began < budget):
            for n in sizes:
                start = perf_counter()
                backend.forward(Batch.of([0] * n, 0, wanted="all"))
                seconds = perf_counter() - start
                backend.truncate(0, 0)
                found[n] = min(seconds, found.get(n, seconds))  # what is measured beside other programs is too much
                if len(found) > 3 and perf_counter() - began > 8 * budget:
                    return cls(_interpolated(found, n_most))
            turn += 1
        return cls(_interpolated(found, n_most))

    def __len__(self) -> int:
        return len(self._shape)

    def __getitem__(self, n: int) -> float:
        return self._level * self._shape[min(n, len(self._shape)) - 1]

    def learn(self, n: int, seconds: float) -> None:
        """Takes in a step's time; a single one that was held up counts little."""
        if n <= len(self._shape):
            error = min(max(seconds / self[n] - 1, -0.3), 0.3)
            self._level *= 1 + 0.2 * error
            if n > 1:
                self._seen[n - 1] += 1
                share = max(0.02, 0.5 / (1 + self._seen[n - 1]))
                self._shape[n - 1] = max(1.0, self._shape[n - 1] * (1 + share * error))


def _interpolated(found: dict[int, float], n_most: int) -> list[float]:
    """Seconds for 1 to n_most rows: never falling, straight between what is known, going on as it ended."""
    sizes = sorted(found)
    result: list[float] = []
    for n in range(1, n_most + 1):
        right = next((i for i, size in enumerate(sizes) if size >= n), len(sizes) - 1)
        left = max(0, right - 1)
        a, b = sizes[left], sizes[right]
        slope = (found[b] - found[a]) / (b - a) if b > a else 0.0
        value = found[b] + slope * (n - b)
        result.append(max(value, result[-1] if result else 0.0))
    return result


class Odds:
    """How often guesses of each class were right, the latest counting most.

    prior:   what is believed of each class before anything was seen
    values:  float64 by class
    """

    def __init__(self, prior: Sequence[float], weight: float = 6.0, memory: float = 0.99) -> None:
        self._right = [weight * p for p in prior]
        self._tried = [weight] * len(prior)
        self._memory = memory
        self.values = np.array(prior, np.float64)
        self.mean = 0.6  # of all classes together, as often as they come

    def __getitem__(self, kind: int) -> float:
        return self._right[kind] / self._tried[kind]

    def learn(self, kind: int, right: bool) -> None:
        """Counts a guess that was checked."""
        self._right[kind] = self._memory * self._right[kind] + right
        self._tried[kind] = self._memory * self._tried[kind] + 1
        self.values[kind] = self[kind]
        self.mean += 0.02 * (right - self.mean)


class Source:
    """What guesses of one origin have brought one request lately; it pauses while they do not pay.

    gained:  accepted tokens in a step, cost: seconds that the step took longer
    """

    FIRST_PAUSE, LONGEST_PAUSE = 16, 1024

    def __init__(self, gained: float, cost: float) -> None:
        self.gained, self.cost = gained, cost
        self._rounds = self._hits = 0
        self._pause = self.FIRST_PAUSE
        self._wait = 0

    def net(self, pace: float) -> float:
        """Tokens gained in a step beyond those that its time would give at `pace` (tokens a second)."""
        return self.gained - pace * self.cost

    @property
    def ready(self) -> bool:
        """Whether it is to be tried in this step."""
        return self._wait == 0

    def rest(self) -> None:
        """Lets a step of its pause go by."""
        self._wait = max(0, self._wait - 1)

    def give_up(self) -> None:
        """Pauses for as long as it may."""
        self._wait, self._rounds, self._hits = self.LONGEST_PAUSE, 0, 0

    def learn(self, accepted: int, seconds: float, plain_pace: float) -> None:
        """Takes in a step in which it was tried, and pauses if it does not pay: the longer, the more often in a row."""
        self._rounds += 1
        self._hits += accepted
        share = max(1 / (self._rounds + 0.5), 0.06)
        self.gained += share * (accepted - self.gained)
        self.cost += share * (seconds - self.cost)
        net = self.net(plain_pace)
        if (self._rounds >= 3 and not self._hits) or (self._rounds >= 10 and net < 0):
            self._wait, self._rounds, self._hits = self._pause, 0, 0
            self._pause = min(4 * self._pause, self.LONGEST_PAUSE)
        elif self._rounds >= 12 and net > 0.1:
            self._pause = self.FIRST_PAUSE
