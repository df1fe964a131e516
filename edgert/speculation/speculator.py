"""Chooses what to guess, and how much: the length that promises most tokens a second."""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Backend, Round, Stakes
from edgert.errors import EdgertError
from edgert.speculation.draft_model import DraftModel
from edgert.speculation.economics import Costs, Line, Odds, Source
from edgert.speculation.ngram import NgramMemory

if TYPE_CHECKING:
    from edgert.generation.slots import Slot
    from edgert.generation.task import Generation

SPEC_MAX = 15  # tokens guessed for one step, unless told otherwise
MEMORY = 1 << 16  # tokens of ended requests that are remembered
PATIENCE = 8  # steps without anything found, after which it is looked for ever more seldom
SELDOM = 32  # steps from one search to the next, at most
APART = 16  # rounds from one that goes a little further than pays to the next
ROUNDS = 8  # rounds that a draft which pays makes at once
BURST = 0.024  # seconds that these take, about: so long a reader may wait for his text
SAVED = 0.4  # of the seconds of a token, by a draft that does well
CURIOUS = 0.7  # times the chance with which guessing goes on in other rounds
BOLD = 2  # guesses by which a round goes further than usual whatever is believed of the cost
SELDOM_BOLD = 3  # of so many rounds that go further one is bold where the cost was seen
SEEN = 8  # steps of a size after which that is so
LONG_ENOUGH = 5  # agreeing tokens in the present text with which no other text is asked
# Classes of guesses: by how many tokens agreed before an n-gram's, by the draft model's own probability of its token.
AGREED = (3, 4, 5, 7, 10, 16, 32)
AGREED_ODDS = (0.35, 0.45, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
SURE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
BOUNDS = np.array(SURE)
SURE_ODDS = (0.08, 0.18, 0.28, 0.38, 0.48, 0.58, 0.68, 0.78, 0.87, 0.94, 0.97, 0.99)


@dataclass
class Guesses:
    """What one request has at stake in the present step.

    kinds:    the class of each guess
    seconds:  what making them took
    """

    source: str = ""
    kinds: list[int] = field(default_factory=list)
    seconds: float = 0.0


class Walked(NamedTuple):
    """A round of several that were one walk.

    n:         guesses that were checked
    accepted:  of them those that were right
    seconds:   of all of it
    """

    guesses: Guesses
    n: int
    accepted: int
    seconds: float


class Request:
    """What is known about one request's guesses."""

    def __init__(self, sampled: bool, step_seconds: float) -> None:
        self.sampled = sampled
        self.sources = {"ngram": Source(0.5, 0.1 * step_seconds), "draft": Source(1.2, 0.4 * step_seconds)}
        self.now = Guesses()
        self.walked: list[Walked] = []  # the present step's rounds, where these were one walk
        self.misses = 0  # searches in a row in which nothing that was said came again
        self.unsearched = 0  # steps until it is searched

    def begin(self) -> None:
        """Forgets what the step before had at stake."""
        self.now, self.walked = Guesses(), []

    def idle_steps(self, draft: bool, ngram: bool) -> int:
        """Steps in which nothing will be tried, of what there is."""
        waits = [self.sources["draft"].wait] if draft else []
        waits += [max(self.sources["ngram"].wait, self.unsearched)] if ngram else []
        return min(waits, default=SELDOM)

    def rest(self, steps: int) -> None:
        """Lets so many steps go by."""
        for source in self.sources.values():
            source.rest(steps)
        self.unsearched = max(0, self.unsearched - steps)


class Speculator:
    """Guesses for the requests of an engine, and learns from what became of them.

    costs:  of the target's steps, up to as many rows as may be guessed for
    model:  a draft model, or None
    ngram:  whether what was already said is searched
    target: what checks the guesses, where what it takes for a step depends on those before
    most, least:  tokens guessed in a step; with a `least` above 0 nothing is weighed and nothing pauses
    p_min:  a draft model's token that it holds less probable is not guessed, nor what would follow
    name:   where guesses come from, for people
    """

    def __init__(
        self,
        n_ctx: int,
        n_seq_max: int,
        costs: Costs,
        model: DraftModel | None = None,
        *,
        ngram: bool = True,
        target: Backend | None = None,
        most: int = SPEC_MAX,
        least: int = 0,
        p_min: float = 0.0,
        name: str = "",
    ) -> None:
        self.costs, self.model, self.name = costs, model, name
        self._target = target
        self._kept = 1  # rows that steps of one request have, guesses or not, where a change of them costs something
        self._plain_steps = 0  # since one had guesses
        self._latest: dict[bool, Request] = {}  # greedy, sampled
        self.most, self.least, self.p_min = most, min(least, most), p_min
        self.texts = [NgramMemory(n_ctx) for _ in range(n_seq_max)] if ngram else []
        self._owners: list[Request | None] = [None] * n_seq_max  # whose tokens each text holds
        self.ended = NgramMemory(MEMORY)
        self._interrupted = model.interrupted if model else memoryview(bytearray(8)).cast("q")
        self.ngram_odds = [Odds(AGREED_ODDS), Odds(AGREED_ODDS)]  # greedy, sampled
        self.draft_odds = [Odds(SURE_ODDS), Odds(SURE_ODDS)]
        self.draft_cost = Line(costs[1] / 15, costs[1] / 20)
        self._idle = 0  # steps in which nobody guesses
        self._paces: dict[int, tuple[float, float]] = {}  # requests at once -> tokens and seconds of late
        self._began = 0.0  # the present step
        self.checks: list[float] = []  # in it begin and end of each of the target's steps, where these were one walk
        # Seconds between two walks of a single round, of late: the middle one counts, since some have read prompts.
        self._rests = deque([0.0] * 7, 7)
        self.burst = BURST  # seconds that the rounds of one walk may take, about; who has others to serve sets less
        self._n_rounds = 0
        self._next_curious = APART
        self._curious = False
        self._n_curious = 0
        self._usual = 1.0  # guesses of the draft that were checked in a round, of late
        self._known_stakes: dict[tuple[bool, int, int, frozenset[int], bool], tuple[int, Stakes]] = {}

    def pace(self, n: int) -> float:
        """Tokens a second that n requests have made together lately, at least those of plain steps."""
        tokens, seconds = self._paces.get(n, (0.0, 1.0))
        return max(tokens / seconds, n / self.costs[n])

    @property
    def idle(self) -> bool:
        """Whether nothing is worth a try in the step that begins, which then need not be proposed for nor learned."""
        if not self._idle:
            return False
        self._idle -= 1
        self._leave_size()
        return True

    @property
    def interrupted(self) -> memoryview[int]:
        """A word; who sets it to 1, in any thread, has a step of several rounds end with the present one."""
        return self._interrupted

    def wake(self) -> None:
        """There are other requests than before."""
        self._idle = 0

    def propose(self, tasks: Sequence[Generation], room: int) -> list[int]:
        """Writes guesses behind the known tokens of each task's slot; returns how many each got.

        room:  rows that the step may have beyond one for each task
        """
        self._began = perf_counter()
        self._n_rounds += 1
        together = len(tasks) == 1 and tasks[0].takes_chosen
        self._curious = self._n_rounds >= self._next_curious and not self.least and not self.costs.change
        if self._curious:
            self._next_curious = self._n_rounds + APART
            self._n_curious += 1
        pace, rows, counts = self.pace(len(tasks)), len(tasks), []
        for task in tasks:
            request = self.request_of(task)
            request.begin()
            limit = min(self.most, room, task.most_guesses)
            count = self._guess(task, request, rows, pace, limit, together) if limit > 0 else 0
            counts.append(count)
            rows += count
            room -= count
        return counts

    def request_of(self, task: Generation) -> Request:
        """What is known about a task's guesses."""
        if task.guessing is None:
            sampled = task.options.sampling.temperature != 0
            task.guessing = request = Request(sampled, self.costs[1])
            if self.costs.change:  # a try is dear: what the latest request has found out, this one goes by
                if sampled in self._latest:
                    request.sources = {name: copy(one) for name, one in self._latest[sampled].sources.items()}
                self._latest[sampled] = request
        return task.guessing

    def is_worth_reading(self, task: Generation, request: Request) -> bool:
        """Whether a draft can gain as much, in what is left of a reply, as it takes to read what it has missed."""
        assert self.model is not None
        saved = self.costs[1] * SAVED * task.most_guesses
        return saved >= self.model.behind(task.slot.sequence, task.slot.n_tokens, request)

    def _guess(self, task: Generation, request: Request, rows: int, pace: float, limit: int, together: bool) -> int:
        now, began, slot = request.now, perf_counter(), task.slot
        draft, ngram = request.sources["draft"], request.sources["ngram"]
        draft_ready = self.model is not None and (draft.ready or self.least > 0)
        search = bool(self.texts) and not request.unsearched and (ngram.ready or self.least > 0)
        request.rest(1)
        count = 0
        if search:
            guess, kinds, net = self._from_memory(slot, request, rows, pace, limit)
            if guess and (not draft_ready or net >= self._bar(request, pace)):
                now.source, now.kinds, count = "ngram", kinds, len(guess)
                slot.tokens[slot.n_tokens : slot.n_tokens + count] = guess
        if not count and draft_ready and (self.least or self.is_worth_reading(task, request)):
            now.source = "draft"
            count = self._from_model(task, request, rows, pace, limit, together)
        if now.source and not request.walked:
            now.seconds = perf_counter() - began
        return count

    def _from_memory(
        self, slot: Slot, request: Request, rows: int, pace: float, limit: int
    ) -> tuple[list[int], list[int], float]:
        """A guess from what was said, as long as pays; its classes, and the tokens it promises."""
        misses = request.misses
        guess, kinds = self.search(slot, request, limit)
        if not guess:
            return guess, kinds, 0.0
        odds = self.ngram_odds[request.sampled]
        chances = [odds[kind] for kind in kinds]
        count, net = self._best_length(chances, rows, pace)
        if self.costs.change and not self.least and rows + count > self._kept:
            net -= pace * self.costs.change  # there; before the way back there is more to repeat, as a rule
            there = self._best_length(chances[: self._kept - rows], rows, pace) if self._kept > rows else (0, 0.0)
            count, net = (count, net) if net > there[1] else there
            if not count:
                request.misses = misses
                self._miss(request)
        return guess[:count], kinds[:count], net

    def search(self, slot: Slot, request: Request, limit: int) -> tuple[list[int], list[int]]:
        """A guess from this text, or from those that have ended, and its classes."""
        text, n = self.texts[slot.sequence], slot.n_tokens
        text.sync(slot.tokens, n, grown=self._owners[slot.sequence] is request)
        self._owners[slot.sequence] = request
        guess, agreed = text.find(slot.tokens, n, limit)
        if agreed < LONG_ENOUGH and self.ended.n:
            other, longer = self.ended.find(slot.tokens, n, limit)
            if longer > agreed:
                guess, agreed = other, longer
        if not guess:
            self._miss(request)
            return guess, []
        request.misses = 0
        return guess, [bisect_right(AGREED, agreed + i) for i in range(len(guess))]

    def _miss(self, request: Request) -> None:
        """A search has brought nothing."""
        request.misses += 1
        if request.misses >= PATIENCE:  # a text without repetitions
            request.unsearched = min(1 << min(request.misses - PATIENCE, 8), SELDOM)

    def _from_model(
        self, task: Generation, request: Request, rows: int, pace: float, limit: int, together: bool
    ) -> int:
        """Guesses of the draft model, until it is too unsure of them.

        together:  whether they may be checked at once, where the draft can go on to the target's step; the task then
                   finds the tokens that were chosen
        """
        model, slot = self.model, task.slot
        assert model is not None
        odds, n = self.draft_odds[request.sampled], slot.n_tokens
        began = perf_counter()
        if self._kept > rows and not self.least:
            limit = min(limit, self._kept - rows)  # more would cost the target a change
        try:
            stakes = self._stakes(request, rows, pace, limit, task.end_ids)
            if self._curious:
                stakes = self._further(stakes, rows)
            if together and model.checks:
                most_rounds, reach = self._most_rounds(request) if stakes.ease else 1, task.most_guesses
                arguments = slot.sequence, slot.tokens, n, task.sampler, stakes, request
                if (found := model.rounds(*arguments, most_rounds, reach)) is not None:
                    return self._checked(task, request, found, model.times)
            shares = model.guess(slot.sequence, slot.tokens, n, task.sampler, stakes, request).tolist()
        except EdgertError:  # the draft's memory is full, or its weights are damaged: the target goes on alone
            request.sources["draft"].give_up()
            return 0
        if shares:
            self.draft_cost.learn(len(shares), perf_counter() - began)
        kinds = request.now.kinds
        kinds += [bisect_right(SURE, share) for share in shares]
        if kinds:
            odds.meet(kinds[0])
        count, _ = self._best_length([odds[kind] for kind in kinds], rows, pace)
        if count or not stakes.ease:
            count = min(count + stakes.further, len(kinds))
        del kinds[count:]
        return count

    def _bar(self, request: Request, pace: float) -> float:
        """Tokens that what was said must promise to be asked in place of the draft: as many as that gains, and those of
        the time in which it later reads them, and in which steps between walks are not shared by rounds."""
        assert self.model is not None
        alone = self._between * (1 - 1 / self._most_rounds(request)) if self.model.checks else 0.0
        return request.sources["draft"].net(pace) + pace * (self.model.catching_up + alone)

    @property
    def _between(self) -> float:
        """Seconds between two walks."""
        return sorted(self._rests)[len(self._rests) // 2]

    def _worth_a_stop(self, request: Request, rows: int, pace: float, most: int) -> int:
        """Tokens that must agree with what was said for rounds of the draft to end there; 0: that never pays."""
        odds, bar = self.ngram_odds[request.sampled], self._bar(request, pace)
        for agreed in AGREED[AGREED.index(LONG_ENOUGH) :]:
            chances = [odds[bisect_right(AGREED, agreed + i)] for i in range(most)]
            if self._best_length(chances, rows, pace)[1] >= bar:
                return agreed
        return 0

    def _most_rounds(self, request: Request) -> int:
        """How many rounds are to be one walk: in all but the first the draft alone guesses, by the same stakes."""
        if self.least:
            return 1
        return max(1, min(ROUNDS, int(self.burst / self.costs[3]), request.sources["draft"].proven))

    def _checked(
        self, task: Generation, request: Request, rounds: Sequence[Round], times: Sequence[tuple[float, float]]
    ) -> int:
        """Takes in guesses that the target has checked in the same walk."""
        n_checked, ended = 0, perf_counter()
        began = ended - sum(itertools.chain(*times))
        task.chosen, self.checks = [], []
        for (shares, checked, chosen), (guessing, checking) in zip(rounds, times, strict=True):
            if not chosen:
                break  # the usual way says what is wrong
            kinds = [bisect_right(SURE, share) for share in shares[:checked].tolist()]
            if len(shares):
                self.draft_odds[request.sampled].meet(bisect_right(SURE, shares[0]))
            request.walked.append(
                Walked(Guesses("draft", kinds, guessing), checked, len(chosen) - 1, guessing + checking)
            )
            task.chosen.append((checked, chosen))
            self.checks += (began + guessing, began := began + guessing + checking)
            if len(shares):
                self.draft_cost.learn(len(shares), guessing)
            n_checked += checked
        self._n_rounds += len(task.chosen) - 1
        request.rest(len(task.chosen) - 1)
        return n_checked

    def _stakes(self, request: Request, rows: int, pace: float, most: int, end_ids: frozenset[int]) -> Stakes:
        """When the draft is to stop, reckoned anew every few rounds."""
        searches = bool(self.texts) and request.sources["ngram"].ready
        key = request.sampled, rows, most, end_ids, searches
        known = self._known_stakes.get(key)
        if known is None or self._n_rounds - known[0] >= 16:
            if len(self._known_stakes) > 64:
                self._known_stakes.clear()
            odds = self.draft_odds[request.sampled]
            floors = self._floors(odds.mean, rows, pace, most)
            ends = np.array(sorted(end_ids), np.int64)
            costs, sizes = self.costs, range(rows, rows + most + 1)
            extra = np.array([0.0 if self.least else pace * (costs[n] - costs[rows]) for n in sizes])
            unknown = np.array([not costs.known(n) for n in sizes], np.int64)
            repeated = self._worth_a_stop(request, rows, pace, most) if searches else 0
            stakes = Stakes(most, floors, self.p_min, BOUNDS, odds.values, ends, extra, unknown, repeated=repeated)
            known = self._known_stakes[key] = self._n_rounds, stakes
        return known[1]

    def _further(self, stakes: Stakes, rows: int) -> Stakes:
        """The same for a round that goes further than pays, or sizes held up when they were measured would never be
        tried again: as a rule a little further, sometimes so far that even a belief which is far off is put right."""
        usual = round(self._usual) + BOLD
        bold = not self.costs.known(rows + usual, SEEN) or self._n_curious % SELDOM_BOLD == 0
        if bold and usual <= stakes.most:
            return replace(stakes, most=usual, ease=0.0, further=BOLD)
        return replace(stakes, ease=CURIOUS, further=1)

    def _floors(self, mean: float, rows: int, pace: float, most: int) -> NDArray[np.float64]:
        """float64 (most + 1,): after so many guesses, the least chance that all are right with which guessing on
        promises more tokens than its time would give otherwise."""
        floors = np.zeros(most + 1)
        sums = list(itertools.accumulate(mean**i for i in range(1, 5)))
        for count in range(max(self.least, 1), most):
            cost = self.costs[rows + count]
            floors[count] = min(
                pace * (i * self.draft_cost.step + self.costs[rows + count + i] - cost) / gain
                for i, gain in enumerate(sums, 1)
            )
        return floors

    def _best_length(self, chances: list[float], rows: int, pace: float) -> tuple[int, float]:
        """How many guesses to check, and the tokens that this promises beyond those of its time."""
        if self.least:
            return len(chances), 0.0
        count, best, likely, gain, cost = 0, 0.0, 1.0, 0.0, self.costs[rows]
        for i, chance in enumerate(chances, 1):
            likely *= chance
            gain += likely
            net = gain - pace * (self.costs[rows + i] - cost)
            if net > best:
                count, best = i, net
        if not count:  # to learn what is thought dear, if that is a mere belief
            run = 0
            for i, chance in enumerate(itertools.accumulate(chances, operator.mul), 1):
                run = i if chance > 0.5 else run
            if run and not self.costs.known(rows + run):
                return run, 0.0
        return count, best

    def learn(self, tasks: Sequence[Generation], counts: Sequence[int]) -> None:
        """Takes in a step that has ended: how long it took, and what was accepted."""
        seconds = perf_counter() - self._began
        found = [
            (task.guessing, task.guessing.now, count, task.n_accepted)
            for task, count in zip(tasks, counts, strict=True)
            if task.guessing
        ]
        if found and (walked := found[0][0].walked):
            rest = (seconds - sum(one.seconds for one in walked)) / len(walked)
            if len(walked) == 1:
                self._rests.append(rest)
            between = self._between
            for guesses, n, accepted, seconds in walked:
                # What a step costs is that of one alone, however many rounds share what lies between walks.
                self._take_in(seconds + between, seconds + rest, [(found[0][0], guesses, n, accepted)])
        else:
            self._take_in(seconds, seconds, found)
        if not sum(counts) and not self.least:
            drafts, searches = self.model is not None, bool(self.texts)
            self._idle = min((request.idle_steps(drafts, searches) for request, *_ in found), default=0)
            for request, *_ in found:
                request.rest(self._idle)

    def _take_in(self, seconds: float, spent: float, found: Sequence[tuple[Request, Guesses, int, int]]) -> None:
        """Learns from a step: of each request what it had at stake, how many guesses were checked, how many right.

        seconds: that such a step takes; spent: that went by
        """
        n, guessed = len(found), sum(count for _, _, count, _ in found)
        if self._target is None or self._target.settled:
            self.costs.learn(n + guessed, seconds - sum(now.seconds for _, now, _, _ in found))
        self._keep_size(n, guessed)
        extra = self.costs[max(n + guessed, self._kept)] - self.costs[n]
        plain = n / self.costs[n]
        made = 0
        for request, now, count, accepted in found:
            made += accepted + 1
            if not now.source:
                continue
            if now.source == "draft" and not self._curious:
                self._usual += 0.1 * (count - self._usual)
            if not self.least:
                share = extra * count / guessed if guessed else extra / n
                request.sources[now.source].learn(accepted, now.seconds + share, plain, sure=count > 0)
            odds = (self.ngram_odds if now.source == "ngram" else self.draft_odds)[request.sampled]
            for i, kind in enumerate(now.kinds[: accepted + 1]):
                odds.learn(kind, i < accepted)
        tokens, of = self._paces.get(n, (0.0, 0.0))
        self._paces[n] = 0.98 * tokens + made, 0.98 * of + spent

    def _keep_size(self, n: int, guessed: int) -> None:
        """Keeps in mind what size the target's steps have since one had guesses."""
        if n > 1 or self._target is None or not self.costs.change:
            return
        if guessed:
            self._kept, self._plain_steps = max(self._target.rows_of(1 + guessed), self._kept), 0
        else:
            self._leave_size()

    def _leave_size(self) -> None:
        """There was a plain step: after some the target takes no more rows than they have."""
        self._plain_steps += 1
        if self._target is not None and self._plain_steps >= self._target.settling:
            self._kept = 1

    def rest(self, slot: Slot) -> None:
        """Nothing is guessed for the slot for now."""
        if self.model is not None:
            self.model.backend.rest(slot.sequence)

    def give_back(self, seconds: float) -> float:
        """As `Backend.give_back`, of the draft model."""
        return self.model.backend.give_back(seconds) if self.model is not None else math.inf

    def remember(self, slot: Slot, start: int) -> None:
        """Keeps a text that has ended, from token `start` on."""
        if self.texts and slot.n_tokens > start:
            self.ended.append(np.array(slot.tokens[start : slot.n_tokens]))

    def close(self) -> None:
        """Closes the draft model."""
        if self.model is not None:
            self.model.backend.close()
