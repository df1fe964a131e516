"""Guesses where several requests share a step: whether any are made, and which of all are checked."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter, mul
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Stakes
from edgert.errors import EdgertError
from edgert.speculation.economics import Costs
from edgert.speculation.speculator import BOUNDS, SURE, Speculator

if TYPE_CHECKING:
    from edgert.generation.task import Generation

LONGEST = 8  # guesses for one of several requests in a step
SPREAD = 64  # steps of a reply, about, which pay for what the draft has read of its prompt


class Ways:
    """Whether steps of so many requests make more tokens a second with guesses or without; both are measured.

    The worse way is tried again for some steps, ever more seldom as long as it stays the worse one. Meanwhile both take
    turns: what a busy machine does to one of them it does to the other, and to take what was measured before for what
    would be now made the choice one of chance.

    guessing:  which is believed to be the better way
    """

    TURN, PAIRS = 3, 4  # steps of one way after another in a trial, and pairs of such turns
    FEW = 2  # pairs after which a hopeless trial ends
    FIRST, LONGEST = 64, 2048  # steps from one trial to the next
    GAIN = 1.04  # times as many tokens a second guesses must make to be worth it
    CLEAR = 0.9  # times the better way's rate: a way below that is tried more seldom
    MEMORY = 0.98

    def __init__(self, guessing: bool = False, pause: int = FIRST) -> None:
        self.guessing = guessing
        self._pause, self._wait = pause, 0
        self._trial = -1  # steps of the present trial so far; -1: there is none
        self._won = 0  # its pairs in which what is tried was better
        self._pair, self._all = np.zeros((2, 2)), np.zeros((2, 2))  # of it by way: tokens and seconds
        self._tokens, self._seconds = [0.0, 0.0], [0.0, 0.0]  # of late, without guesses and with
        self._n = [0, 0]  # steps of each way since the other was on

    def like(self) -> Ways:
        """What is believed of another number of requests.

        That guesses pay there is soon tried, as every step loses if it is wrong; that they do not, as seldom as here.
        """
        other = Ways(self.guessing, self.FIRST if self.guessing else self._pause)
        other._wait = 0 if self.guessing else self._pause
        return other

    def now(self) -> bool:
        """Whether the present step is to guess."""
        return self.guessing != (self._trial >= 0 and self._trial // self.TURN % 2 == 0)

    def rate(self, guessing: bool) -> float:
        """Tokens a second of late; 0: not known."""
        return self._tokens[guessing] / self._seconds[guessing] if self._seconds[guessing] else 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        """Takes in a step, which went as `now` said."""
        way = self.now()
        if self._n[way]:  # one that was held up says nothing about its way
            seconds = min(seconds, 2 * self._seconds[way] / max(1.0, self._tokens[way]) * max(tokens, 1) + 1e-9)
        memory = self.MEMORY if way == self.guessing else 1.0
        self._tokens[way] = memory * self._tokens[way] + tokens
        self._seconds[way] = memory * self._seconds[way] + seconds
        self._n[way] += 1
        if self._trial >= 0:
            self._try(way, tokens, seconds)
            return
        self._wait -= 1
        if self._wait <= 0 and self._n[way] >= self.TURN * self.PAIRS:
            other = not way
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
        if (share > self.GAIN and 2 * self._won > n_pairs) if tried else share * self.GAIN > 1:
            self.guessing, self._pause = tried, self.FIRST
        else:
            self._pause = min(self._pause * (2 if share > self.CLEAR else 4), self.LONGEST)
        self._wait = self._pause

    def _share(self, sums: NDArray[np.float64]) -> float:
        """Tokens a second of the way that is tried over those of the usual one."""
        (tried_tokens, tried_seconds), (tokens, seconds) = sums[int(not self.guessing)], sums[int(self.guessing)]
        return float(tried_tokens * seconds / max(tokens * tried_seconds, 1e-12))


class Crowd:
    """Guesses for requests that share a step: of all that could be checked those that promise most.

    What a step costs grows by stairs rather than by rows, so that a guess which would not pay alone may pay beside
    others: which are checked is decided when all have been made.
    """

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator
        self._costs: dict[int, Costs] = {}  # by the number of requests: rows of several sequences cost otherwise
        self._ways: dict[int, Ways] = {}
        self._stakes: dict[tuple[int, bool, int, frozenset[int]], tuple[int, Stakes]] = {}
        self._prospects: dict[int, tuple[int, bool]] = {}  # by number: when it was asked whether a draft could pay
        self._n_rounds = 0
        self._asked = self._drafting = False  # in the present step: whether there are guesses, and a draft's
        self._began = self._spent = self._lent = 0.0  # of the present step: begin, seconds of guessing and of reading
        self._owed = 0.0  # seconds in which the draft has read prompts, with a part of which each step is charged

    def costs(self, n: int) -> Costs:
        """Of steps of n requests, by their rows."""
        if n not in self._costs:
            known = self._speculator.costs
            self._costs[n] = Costs([known[i + 1] for i in range(len(known))])
        return self._costs[n]

    def ways(self, n: int) -> Ways:
        """What is known of steps of n requests, or of the nearest number."""
        if n not in self._ways:
            nearest = min(self._ways, key=lambda other: abs(other - n), default=None)
            self._ways[n] = Ways() if nearest is None else self._ways[nearest].like()
        return self._ways[n]

    def propose(self, tasks: Sequence[Generation], room: int, began: float) -> list[int]:
        """Writes guesses behind the known tokens of each task's slot; returns how many each got.

        room:   rows that the step may have beyond one for each task
        began:  when the step did
        """
        speculator, n = self._speculator, len(tasks)
        self._began, self._spent, self._lent = began, 0.0, 0.0
        self._n_rounds += 1
        self._drafting = speculator.least > 0 or self._may_pay(n)
        self._asked = speculator.least > 0 or (self.ways(n).now() and (self._drafting or bool(speculator.texts)))
        if not self._asked:
            return [0] * n
        for task in tasks:
            speculator.request_of(task).begin()
        began = perf_counter()
        most = speculator.most if speculator.least else max(1, min(speculator.most, LONGEST, 2 * room // n))
        chances = [self._guess(task, n, min(most, room, task.most_guesses)) for task in tasks]
        self._spent = perf_counter() - began
        counts = self._best(chances, room)
        for task, count in zip(tasks, counts, strict=True):
            del speculator.request_of(task).now.kinds[count:]
        return counts

    def _guess(self, task: Generation, n: int, limit: int) -> list[float]:
        """Guesses for one of n requests, made by what promises more: how likely each is right."""
        speculator, slot, began = self._speculator, task.slot, perf_counter()
        request = speculator.request_of(task)
        now = request.now
        draft, ngram = request.sources["draft"], request.sources["ngram"]
        ready = draft.ready and self._drafting and speculator.is_worth_reading(task, request)
        model = speculator.model if ready or speculator.least else None
        search = bool(speculator.texts) and not request.unsearched and (ngram.ready or speculator.least > 0)
        request.rest(1)
        if limit < 1:
            return []
        chances: list[float] = []
        if search:
            guess, kinds = speculator.search(slot, request, limit)
            chances = [speculator.ngram_odds[request.sampled][kind] for kind in kinds]
            if guess and (not model or sum(accumulate(chances, mul)) >= draft.gained):
                now.source, now.kinds = "ngram", kinds
                slot.tokens[slot.n_tokens : slot.n_tokens + len(guess)] = guess
        if not now.source and model:
            now.source = "draft"
            stakes = self._stakes_for(n, request.sampled, limit, task.end_ids)
            try:
                shares = model.guess(slot.sequence, slot.tokens, slot.n_tokens, task.sampler, stakes, request).tolist()
            except EdgertError:  # the draft's memory is full, or its weights are damaged: the target goes on alone
                draft.give_up()
                shares = []
            now.kinds = [bisect_right(SURE, share) for share in shares]
            chances = [speculator.draft_odds[request.sampled][kind] for kind in now.kinds]
        now.seconds = perf_counter() - began
        if now.source == "draft" and chances:
            usual = speculator.draft_cost(len(chances))
            if now.seconds > 2 * usual:  # it has read a prompt, which the whole reply is to pay for
                self._lent += now.seconds - usual
                now.seconds = usual
            else:
                speculator.draft_cost.learn(len(chances), now.seconds)
        return chances if now.source else []

    def _may_pay(self, n: int) -> bool:
        """Whether a draft could pay for n requests by what is known of costs and odds, if luck is with it: else it is
        not even tried, since to be tried it reads all prompts."""
        asked, found = self._prospects.get(n, (0, False))
        if n in self._prospects and self._n_rounds - asked < 64:
            return found
        speculator, costs = self._speculator, self.costs(n)
        if speculator.model is not None:
            # Those that are checked are likelier than most.
            chance = max(odds.mean for odds in speculator.draft_odds) ** 0.5
            best, tokens = 0.0, float(n)
            for m in range(1, min(len(costs) - n, LONGEST * n) + 1):
                each = -(-m // n)
                tokens += chance**each
                best = max(best, tokens / (costs[n + m] + n * speculator.draft_cost(each)))
            found = best > Ways.GAIN * n / costs[n]
        self._prospects[n] = self._n_rounds, found
        return found

    def _pace(self, n: int) -> float:
        """Tokens a second that n requests make without guesses."""
        return max(n / self.costs(n)[n], self.ways(n).rate(False))

    def _best(self, chances: Sequence[Sequence[float]], room: int) -> list[int]:
        """How many guesses of each request are checked: of all the likeliest, as many as pay together."""
        n = len(chances)
        if self._speculator.least:
            counts = []
            for made in chances:
                counts.append(min(len(made), room))
                room -= counts[-1]
            return counts
        each = [(likely, i) for i, made in enumerate(chances) for likely in accumulate(made, mul)]
        each.sort(key=itemgetter(0), reverse=True)  # a guess never comes before the one that it follows
        costs, pace = self.costs(n), self._pace(n)
        count, best, gain = 0, 0.0, 0.0
        for m, (likely, _) in enumerate(each[:room], 1):
            gain += likely
            net = gain - pace * (costs[n + m] - costs[n])
            if net > best:
                count, best = m, net
        taken = Counter(i for _, i in each[:count])
        return [taken[i] for i in range(n)]

    def _stakes_for(self, n: int, sampled: bool, most: int, end_ids: frozenset[int]) -> Stakes:
        """When the draft is to stop, reckoned anew every few rounds: where a guess more is worth less than its time
        and that of a row, if this comes as cheap as it can."""
        key = n, sampled, most, end_ids
        known = self._stakes.get(key)
        if known is None or self._n_rounds - known[0] >= 16:
            if len(self._stakes) > 64:
                self._stakes.clear()
            speculator, costs, pace = self._speculator, self.costs(n), self._pace(n)
            odds = speculator.draft_odds[sampled]
            row = min((costs[n + m] - costs[n]) / m for m in range(1, max(2, len(costs) - n)))
            floor = 0.0 if speculator.least else pace * (speculator.draft_cost.step + row) / max(odds.mean, 0.1)
            floors = np.full(most + 1, floor)
            nothing = np.zeros(most + 1)
            ends = np.array(sorted(end_ids), np.int64)
            unknown = np.zeros(most + 1, np.int64)
            stakes = Stakes(most, floors, speculator.p_min, BOUNDS, odds.values, ends, nothing, unknown)
            known = self._stakes[key] = self._n_rounds, stakes
        return known[1]

    def learn(self, tasks: Sequence[Generation], counts: Sequence[int]) -> None:
        """Takes in a step that has ended: how long it took, and what was accepted."""
        seconds, n, guessed = perf_counter() - self._began, len(tasks), sum(counts)
        speculator, costs, ways = self._speculator, self.costs(n), self.ways(n)
        costs.learn(n + guessed, seconds - self._spent)
        if not self._asked:
            ways.learn(n, seconds)
            return
        share, pace = (costs[n + guessed] - costs[n]) / guessed if guessed else 0.0, self._pace(n)
        made = n
        for task, count in zip(tasks, counts, strict=True):
            request, right = speculator.request_of(task), task.n_accepted
            made += right
            if not request.now.source:
                continue
            if not speculator.least:
                spent = request.now.seconds + share * count
                request.sources[request.now.source].learn(right, spent, pace, sure=count > 0)
            odds = (speculator.ngram_odds if request.now.source == "ngram" else speculator.draft_odds)[request.sampled]
            for i, kind in enumerate(request.now.kinds[: right + 1]):
                odds.learn(kind, i < right)
        if not speculator.least:
            self._owed += self._lent
            part = self._owed / SPREAD if ways.now() else 0.0
            self._owed -= part
            ways.learn(made, seconds - self._lent + part)
