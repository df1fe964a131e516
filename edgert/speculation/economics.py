"""What speculation costs and brings: estimates that follow the measurements."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from edgert.backends.base import Backend


class Costs:
    """Seconds that a step takes, by its rows; `costs[n]` for n from 1 to the length of what was given.

    The proportions between sizes change slowly and the level quickly, so that a size that is not in use is not
    thought dear because the machine was busy when it was measured. A step that surprises is laid to the level as far
    as its size is known, by itself and beside others, and to the size as far as it is not. No size is cheaper than a
    smaller one: of two that say so, the one seen less often gives way, so that what is learned of sizes in use reaches
    the others.

    seen:    how many steps of each size the seconds stand for
    change:  seconds that the steps after one of another size take longer, until they are at their pace
    """

    ENOUGH = 50  # steps of a size after which more say nothing new
    TOO_DEAR = -0.5  # the logarithm of what was seen to what was believed, from which on that is no chance
    HELD_UP = 1.3  # times the level of steps that nothing holds up: above it a quick one says that this has ended
    FADING = 1.003  # by which that level grows with each step
    SIGHT = 32  # steps for which it is known
    LATELY = 3  # steps of a size of which the middle one counts: a single one that was held up says nothing

    def __init__(self, seconds: Sequence[float], seen: float = 2.0, change: float = 0.0) -> None:
        self.change = change
        self._level = seconds[0]
        self._shape = [s / seconds[0] for s in seconds]
        self._seen = [seen] * len(seconds)
        self._late: list[list[float]] = [[] for _ in seconds]
        self._n_steps = seen
        # By steps of one row, which say it best: the level while nothing holds them up, and steps since the latest one.
        self._least, self._blind = seconds[0], self.SIGHT

    @classmethod
    def measure(cls, backend: Backend, n_most: int, budget: float = 0.04) -> Costs:
        """Times steps of an idle backend; sizes between are interpolated, as are those that the budget (seconds) leaves
        no time for. Where other programs disturb it goes on for some budgets, and what never comes out twice alike is
        believed less."""
        sizes = [n for n in (1, 2, 4, 6, 8, 9, 16) if n <= n_most]
        times: dict[int, list[float]] = {n: [] for n in sizes}
        changes: list[float] = []
        began, turn, alike = perf_counter(), 0, False

        def spent() -> float:
            return perf_counter() - began

        while turn < 2 or (turn < 8 and spent() < (budget if alike else 6 * budget)):
            for n in sizes:
                steps = []
                for _ in range(backend.settling):
                    start = perf_counter()
                    backend.extend([0] * n, 0, 0)
                    steps.append(perf_counter() - start)
                    backend.truncate(0, 0)
                insort(times[n], steps[-1])  # what is measured beside other programs is too much
                insort(changes, sum(steps) - len(steps) * steps[-1])
                if spent() > 8 * budget and sum(map(bool, times.values())) > 3:
                    turn = 8  # a large model
                    break
            turn += 1
            alike = all(len(t) > 1 and t[1] < 1.08 * t[0] for t in times.values())
        found = _interpolated({n: t[0] for n, t in times.items() if t}, n_most)
        change = changes[len(changes) // 2] if backend.settling > 1 else 0.0
        return cls(found, 2.0 if alike else 0.5, max(0.0, change))

    def __len__(self) -> int:
        return len(self._shape)

    def __getitem__(self, n: int) -> float:
        return self._level * self._shape[min(n, len(self._shape)) - 1]

    def known(self, n: int, steps: int = 4) -> bool:
        """Whether what n rows cost has been seen often enough to go by it: so many steps."""
        return self._seen[min(n, len(self._shape)) - 1] >= steps

    def learn(self, n: int, seconds: float) -> None:
        """Takes in a step's time."""
        shape = self._shape
        if n > len(shape):
            return
        late = self._late[n - 1]
        late.append(max(seconds, 1e-9) / self._level)
        if len(late) > self.LATELY:
            del late[0]
        error = math.log(sorted(late)[(len(late) - 1) // 2] / shape[n - 1])
        error = min(max(error, -3.0), 1.0)
        self._n_steps += 1
        self._least *= self.FADING
        self._blind += 1
        if n == 1:
            self._least, self._blind = min(self._least, seconds), 0
        elif error < self.TOO_DEAR and self._blind < self.SIGHT and self._level > self.HELD_UP * self._least:
            late.pop()
            self._level *= math.exp(0.2 * error)
            return
        seen = self._seen[n - 1] = min(self._seen[n - 1] + 1, self.ENOUGH)
        share, trust = 0.0, 1.0
        if n > 1:
            trust = (1 + seen) / (1 + max(self._seen))
            share = max(0.1, 1 / (1 + seen))
            # Something may hold a step up, but nothing makes it so much quicker than it is.
            if too_dear := error < self.TOO_DEAR:
                share = max(share, (1 - trust) / 2)
            changed = shape[n - 1] * math.exp(share * error)
            if changed < 1.0:  # no size is cheaper than one row: it is the level that is too high
                share, trust = 0.0, 1.0
            self._set(n - 1, max(1.0, changed), too_dear)
        self._level *= math.exp(trust * (1 - share) * max(0.2, 1 / (1 + self._n_steps)) * error)

    def _set(self, place: int, value: float, with_larger: bool) -> None:
        """Changes a size, and in proportion larger ones that were measured with it and have seldom been seen since."""
        shape, seen = self._shape, self._seen
        factor, shape[place] = value / shape[place], value
        for larger in range(place + 1, len(shape)):
            if with_larger and seen[larger] < seen[place]:
                shape[larger] = max(factor * shape[larger], shape[larger - 1])
        self._straighten(place)

    def _straighten(self, place: int) -> None:
        """Makes the other sizes agree with that at `place`, which has changed, or it with them."""
        shape, seen = self._shape, self._seen
        for other in range(place + 1, len(shape)):
            if shape[other] >= shape[place]:
                break
            if seen[other] > seen[place]:
                shape[place] = shape[other]
                break
            shape[other] = shape[place]
        for other in range(place - 1, 0, -1):
            if shape[other] <= shape[place]:
                break
            if seen[other] > seen[place]:
                shape[place] = shape[other]
                break
            shape[other] = shape[place]


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


class Line:
    """Seconds by the number of steps, as a straight line through what was seen, the latest counting most.

    first, step:  what is believed before anything was seen: seconds of no step at all, and of each
    """

    MEMORY = 0.98

    def __init__(self, first: float, step: float) -> None:
        self.step = step
        self._sums = [0.0] * 5  # of 1, x, y, x * x, x * y
        for x in (1, 8):
            self._add(x, first + x * step)

    def _add(self, x: int, y: float) -> None:
        for i, value in enumerate((1.0, x, y, x * x, x * y)):
            self._sums[i] = self.MEMORY * self._sums[i] + value

    def __call__(self, steps: int) -> float:
        """Seconds of so many steps."""
        n, x, y, _, _ = self._sums
        return y / n + self.step * (steps - x / n)

    def learn(self, steps: int, seconds: float) -> None:
        """Takes in a guess; one that was held up counts as twice what was expected."""
        self._add(steps, min(seconds, 2 * max(self(steps), self._sums[2] / self._sums[0])))
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        if spread > 0.1 * n * n:
            self.step = min(max((n * xy - x * y) / spread, 0.2 * y / x), y / x)


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
        self._met = [1.0] * len(prior)  # how often the first guess of a step was of each class, of late

    def __getitem__(self, kind: int) -> float:
        return self._right[kind] / self._tried[kind]

    def learn(self, kind: int, right: bool) -> None:
        """Counts a guess that was checked."""
        self._right[kind] = self._memory * self._right[kind] + right
        self._tried[kind] = self._memory * self._tried[kind] + 1
        self.values[kind] = self[kind]
        self.mean += 0.02 * (right - self.mean)

    def meet(self, kind: int) -> None:
        """Counts the first guess of a step, whether it is checked or not."""
        self._met = [self._memory * met for met in self._met]
        self._met[kind] += 1

    def typical(self, n: int) -> list[float]:
        """How likely n first guesses are right that are as usual: some sure, some not."""
        found, total, kind, below = list[float](), sum(self._met), 0, self._met[0]
        for i in range(n):
            while below < (i + 0.5) / n * total:
                kind += 1
                below += self._met[kind]
            found.append(self[kind])
        return found


class Source:
    """What guesses of one origin have brought one request lately; it pauses while they do not pay.

    gained:  accepted tokens in a step, cost: seconds that the step took longer
    """

    FIRST_PAUSE, LONGEST_PAUSE = 16, 1024
    HELD_UP = 1.5  # times the usual cost: more says nothing about the guesses

    def __init__(self, gained: float, cost: float) -> None:
        self.gained, self.cost = gained, cost
        self._rounds = self._hits = self._unsure = 0
        self._pause = self.FIRST_PAUSE
        self.wait = 0  # steps until it is to be tried

    def net(self, pace: float) -> float:
        """Tokens gained in a step beyond those that its time would give at `pace` (tokens a second)."""
        return self.gained - pace * self.cost

    @property
    def ready(self) -> bool:
        """Whether it is to be tried in this step."""
        return self.wait == 0

    @property
    def proven(self) -> int:
        """Rounds for which it has paid, without a pause; none where that is not sure."""
        return self._rounds if self._hits >= self._rounds / 2 else 0

    def rest(self, steps: int = 1) -> None:
        """Lets some steps of its pause go by."""
        self.wait = max(0, self.wait - steps)

    def give_up(self) -> None:
        """Pauses for as long as it may."""
        self.wait, self._rounds, self._hits, self._unsure = self.LONGEST_PAUSE, 0, 0, 0

    def learn(self, accepted: int, seconds: float, plain_pace: float, *, sure: bool = True) -> None:
        """Takes in a step in which it was tried, and pauses if it does not pay: the longer, the more often in a row.

        sure:  whether it was sure enough of a guess to have it checked
        """
        self._rounds += 1
        self._hits += accepted
        self._unsure += not sure
        share = max(1 / (self._rounds + 0.5), 0.06)
        self.gained += share * (accepted - self.gained)
        self.cost += share * (min(seconds, self.HELD_UP * self.cost) - self.cost)
        net = self.net(plain_pace)
        again = self._pause > self.FIRST_PAUSE
        vain = not self._hits and (self._unsure >= (2 if again else 3) or self._rounds >= 6)
        if vain or (self._rounds >= 10 and net < 0):
            self.wait, self._rounds, self._hits, self._unsure = self._pause, 0, 0, 0
            # To try again it reads what it has missed: seldom where it could not guess a single token.
            self._pause = min((16 if vain else 4) * self._pause, self.LONGEST_PAUSE)
        elif self._rounds >= 12 and net > 0.1:
            self._pause = self.FIRST_PAUSE
