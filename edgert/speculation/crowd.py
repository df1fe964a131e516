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

from edgert.backends.base import Stakes
from edgert.speculation.draft_model import NEAR, Text
from edgert.speculation.economics import Costs, Line
from edgert.speculation.prospects import promised
from edgert.speculation.speculator import BOUNDS, SAVED, SURE, Request, Speculator
from edgert.speculation.ways import Ways

if TYPE_CHECKING:
    from edgert.generation.task import Generation

LONGEST = 8  # guesses for one of several requests in a step
SHARED = 0.3  # times what guesses for one take, for each further one in the same steps, as long as it is not measured
PROMISING = 1.05  # times as many tokens a second that guesses must promise for a start with them
SPREAD = 64  # steps of a reply, about, which pay for what the draft has read of its prompt


class Crowd:
    """Guesses for requests that share a step: of all that could be checked those that promise most.

    What a step costs grows by stairs rather than by rows, so that a guess which would not pay alone may pay beside
    others: which are checked is decided when all have been made.
    """

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator
        self._costs: dict[int, Costs] = {}  # by the number of requests
        self._ways: dict[tuple[int, bool], Ways] = {}  # by that number, and whether most of them are sampled
        self._stakes: dict[tuple[int, bool, int, frozenset[int]], tuple[int, Stakes]] = {}
        self._draft_costs: dict[int, Line] = {}  # by the number of requests that it guesses for
        self._prospects: dict[tuple[int, bool], tuple[int, float]] = {}  # as the ways: when it was reckoned, and what
        self._n_rounds = 0
        # In the present step: whether there can be guesses, a draft's, whether there are, and whether most requests
        # are sampled.
        self._able = self._drafting = self._asked = self._sampled = False
        self._began = self._spent = self._lent = 0.0  # of the present step: begin, seconds of guessing and of reading
        self._idle = 0  # steps from now on in which nothing is guessed or learned
        self._owed = 0.0  # seconds in which the draft has read prompts, with a part of which each step is charged

    def costs(self, n: int) -> Costs:
        """Of steps of n requests: `costs[1]` without guesses, `costs[1 + m]` with m of them.

        As sizes of their own, what is dear for n rows and what is dear at the moment could not be told apart: steps of
        fewer are never seen beside them, and guesses seemed ever cheaper.
        """
        if n not in self._costs:
            known = self._speculator.costs
            self._costs[n] = Costs([known[rows] for rows in range(min(n, len(known)), len(known) + 1)])
        return self._costs[n]

    def ways(self, n: int, sampled: bool = False) -> Ways:
        """What is known of steps of n requests, most of them sampled or not, or of those nearest to them."""
        key = n, sampled
        if key not in self._ways:
            nearest = min(self._ways, key=lambda other: (other[1] != sampled, abs(other[0] - n)), default=None)
            if nearest is not None:
                self._ways[key] = self._ways[nearest].like(doubtful=n > nearest[0] or sampled > nearest[1])
            else:
                self._ways[key] = Ways(self._promise(n, sampled) > PROMISING)
        return self._ways[key]

    @property
    def idle(self) -> bool:
        """Whether nothing is guessed in the step that begins, which then need not be proposed for nor learned: between
        steps all that is touched comes from memory, and for some requests that was up to a thirtieth of a step."""
        if not self._idle:
            return False
        self._idle -= 1
        return True

    def wake(self) -> None:
        """There are other requests than before."""
        self._idle = 0
        self._speculator.wake()

    def propose(self, tasks: Sequence[Generation], room: int, began: float) -> list[int]:
        """Writes guesses behind the known tokens of each task's slot; returns how many each got.

        room:   rows that the step may have beyond one for each task
        began:  when the step did
        """
        speculator, n = self._speculator, len(tasks)
        self._began, self._spent, self._lent = began, 0.0, 0.0
        self._n_rounds += 1
        self._sampled = 2 * sum(task.options.sampling.temperature != 0 for task in tasks) > n
        self._drafting = speculator.least > 0 or self._promise(n, self._sampled) > 1
        self._able = self._drafting or bool(speculator.texts)
        self._asked = speculator.least > 0 or (self._able and self.ways(n, self._sampled).now())
        if not self._asked:
            return [0] * n
        for task in tasks:
            speculator.request_of(task).begin()
        began = perf_counter()
        most = speculator.most if speculator.least else max(1, min(speculator.most, LONGEST, 2 * room // n))
        chances = self._guess(tasks, [min(most, room, task.most_guesses) for task in tasks])
        self._spent = perf_counter() - began
        counts = self._best(chances, room)
        for task, count in zip(tasks, counts, strict=True):
            del speculator.request_of(task).now.kinds[count:]
        return counts

    def _guess(self, tasks: Sequence[Generation], limits: Sequence[int]) -> list[list[float]]:
        """Guesses for each of these, up to so many, made by what promises more: how likely each is right."""
        chances, drafting, pace = list[list[float]](), list[int](), self._pace(len(tasks))
        for i, (task, limit) in enumerate(zip(tasks, limits, strict=True)):
            found, model_promises = self._from_memory(task, limit, pace)
            chances.append(found)
            if model_promises:
                drafting.append(i)
        if drafting:
            asked = [(tasks[i], limits[i]) for i in drafting]
            for i, found in zip(drafting, self._from_model(len(tasks), asked), strict=True):
                chances[i] = found
        return chances

    def _from_memory(self, task: Generation, limit: int, pace: float) -> tuple[list[float], bool]:
        """What was said for one request, and whether the draft is to be asked instead."""
        speculator, slot, began = self._speculator, task.slot, perf_counter()
        request = speculator.request_of(task)
        now, draft, ngram = request.now, request.sources["draft"], request.sources["ngram"]
        ready = draft.ready and self._drafting and self._is_worth_reading(task, request, pace)
        asks = limit > 0 and speculator.model is not None and (ready or speculator.least > 0)
        search = bool(speculator.texts) and not request.unsearched and (ngram.ready or speculator.least > 0)
        request.rest(1)
        if limit < 1 or not search:
            return [], asks
        guess, kinds = speculator.search(slot, request, limit)
        chances = [speculator.ngram_odds[request.sampled][kind] for kind in kinds]
        if not guess or (asks and sum(accumulate(chances, mul)) < draft.gained):
            return [], asks
        now.source, now.kinds = "ngram", kinds
        slot.tokens[slot.n_tokens : slot.n_tokens + len(guess)] = guess
        now.seconds = perf_counter() - began
        return chances, False

    def _is_worth_reading(self, task: Generation, request: Request, pace: float) -> bool:
        """As the speculator's, beside others: the text is read from near its end on, and less is to be gained."""
        model = self._speculator.model
        if model is None:
            return False
        saved = SAVED / pace * task.most_guesses
        return saved >= model.behind(task.slot.sequence, task.slot.n_tokens, request, NEAR)

    def _from_model(self, n: int, asked: Sequence[tuple[Generation, int]]) -> list[list[float]]:
        """Guesses of the draft for some of n requests, each with its limit."""
        speculator, began = self._speculator, perf_counter()
        assert speculator.model is not None
        requests = [speculator.request_of(task) for task, _ in asked]
        texts = [
            Text(
                task.slot.sequence,
                task.slot.tokens,
                task.slot.n_tokens,
                task.sampler,
                self._stakes_for(n, request.sampled, limit, task.end_ids),
                request,
            )
            for (task, limit), request in zip(asked, requests, strict=True)
        ]
        found, chances = speculator.model.guess_together(texts), list[list[float]]()
        self._lent = speculator.model.read  # which the whole replies are to pay for
        seconds = perf_counter() - began - self._lent
        for request, shares in zip(requests, found, strict=True):
            now = request.now
            now.source, now.seconds = "draft", seconds / len(asked)
            if shares is None:  # the target goes on alone
                request.sources["draft"].give_up()
            now.kinds = [] if shares is None else [bisect_right(SURE, share) for share in shares.tolist()]
            odds = speculator.draft_odds[request.sampled]
            if now.kinds:
                odds.meet(now.kinds[0])
            chances.append([odds[kind] for kind in now.kinds])
        if most := max(map(len, chances)):
            line = self._draft_costs.setdefault(len(asked), self._draft_cost(len(asked)))
            line.learn(most, seconds)
        return chances

    def _draft_cost(self, n: int) -> Line:
        """Seconds of the draft's guesses for n requests, by how many the longest has."""
        if n in self._draft_costs:
            return self._draft_costs[n]
        speculator = self._speculator
        together = speculator.model is not None and speculator.model.together
        one, times = speculator.draft_cost, 1 + SHARED * (n - 1) if together else n
        return Line(times * max(0.0, one(0)), times * one.step)

    def _promise(self, n: int, sampled: bool) -> float:
        """Tokens a second that a draft promises for n requests, by what is known of costs and odds, over those
        without. Where these are not more it is not even tried, since to be tried it reads texts."""
        key = n, sampled
        asked, found = self._prospects.get(key, (-64, 0.0))
        if self._n_rounds - asked < 64:
            return found
        speculator, costs = self._speculator, self.costs(n)
        found, model = 0.0, speculator.model
        if model is not None:
            odds, line = speculator.draft_odds[sampled], self._draft_cost(n)
            read = n * NEAR * model.reading / SPREAD
            seconds = [costs[i] for i in range(1, len(costs) + 1)]
            found = promised(seconds, odds.typical(n), odds.mean, LONGEST, lambda depth: line(depth) + read)
        self._prospects[key] = self._n_rounds, found
        return found

    def _pace(self, n: int) -> float:
        """Tokens a second that n requests make without guesses."""
        return max(n / self.costs(n)[1], self.ways(n, self._sampled).rate(False))

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
            net = gain - pace * (costs[1 + m] - costs[1])
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
            row = min((costs[1 + m] - costs[1]) / m for m in range(1, max(2, len(costs))))
            floor = 0.0 if speculator.least else pace * (self._draft_cost(n).step / n + row) / max(odds.mean, 0.1)
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
        speculator, costs, ways = self._speculator, self.costs(n), self.ways(n, self._sampled)
        costs.learn(1 + guessed, seconds - self._spent)
        if not self._asked:
            self._idle = Ways.UNWATCHED
            if self._able:
                ways.learn(n, seconds)
                self._idle = ways.rest()
            self._n_rounds += self._idle
            return
        share, pace = (costs[1 + guessed] - costs[1]) / guessed if guessed else 0.0, self._pace(n)
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
            ways.learn(made, seconds - self._lent + part, self._lent)
