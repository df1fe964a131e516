"""Guesses where several requests share a step: made only while that pays, and checked where they promise most."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_speculation import CHEAP, Chancy, speculating

from edgert.backends.base import Batch
from edgert.speculation import Speculator
from edgert.speculation.crowd import Crowd
from edgert.speculation.draft_model import DraftModel
from edgert.speculation.economics import Costs
from edgert.speculation.prospects import promised
from edgert.speculation.ways import Ways

STAIRS = [1.0 * (1 + (n > 8) * 0.5 + (n > 16) * 1.0) for n in range(1, 25)]  # seconds of a step by its rows


def share_of_guessing(ways: Ways, gain: float, steps: int, seed: int = 0) -> float:
    """Steps of a way that guesses, out of so many, where guessing makes `gain` times as many tokens a second."""
    draw, guessing = random.Random(seed), 0
    for _ in range(steps):
        way = ways.now()
        guessing += way
        tokens = draw.choice([8, 12, 16]) if way else 8
        seconds = tokens / (800.0 * (gain if way else 1.0)) * draw.uniform(0.9, 1.2)
        ways.learn(tokens, 8 * seconds if draw.random() < 0.02 else seconds)  # now and then one is held up
    return guessing / steps


@pytest.mark.parametrize("gain", [0.6, 0.8])
def test_guesses_that_do_not_pay_are_given_up(gain: float) -> None:
    ways = Ways()
    share_of_guessing(ways, gain, 600)
    assert not ways.guessing
    assert 0 < share_of_guessing(ways, gain, 20_000) < 0.02


def test_guesses_that_pay_are_kept() -> None:
    ways = Ways()
    share_of_guessing(ways, 1.4, 600)
    assert ways.guessing
    assert 0.95 < share_of_guessing(ways, 1.4, 20_000) < 1


def test_what_pays_is_found_anew() -> None:
    ways = Ways()
    for gain, wanted in ((0.7, False), (1.5, True), (0.7, False)):
        share_of_guessing(ways, gain, 12_000)
        assert ways.guessing is wanted


@pytest.mark.parametrize("gain", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("reading", [0.0, 0.2])
def test_trials_lose_a_hundredth_at_most(gain: float, reading: float) -> None:
    """reading: seconds in which a draft reads the texts of all requests when a trial begins"""
    ways, draw, spent, lost, before = Ways(), random.Random(0), 0.0, 0.0, 99
    for _ in range(10_000):
        way = ways.now()
        read = reading if way and before > 3 * Ways.TURN else 0.0
        before = 0 if way else before + 1
        usual = 0.01 * draw.uniform(0.9, 1.2)
        seconds = usual / gain if way else usual
        spent += seconds + read
        lost += seconds + read - usual
        ways.learn(8, seconds, read)
    assert 0 < lost < 0.01 * spent


def test_that_guesses_pay_for_fewer_is_soon_tried_for_more() -> None:
    ways = Ways(guessing=True, pause=Ways.LONGEST).like()
    assert share_of_guessing(ways, 0.8, 200) < 0.25
    assert not ways.guessing


def test_most_steps_without_guesses_are_not_watched() -> None:
    """And a better way is found all the same."""
    ways, watched, steps = Ways(), 0, 0
    for gain, most in ((0.7, 20_000), (1.5, 40_000)):
        while steps < most and not ways.guessing:
            ways.learn(8, 0.01 / (gain if ways.now() else 1.0))
            watched += 1
            steps += 1 + ways.rest()
    assert ways.guessing and watched < steps / 5


def share_beside_others(gain: float, steps: int, seed: int) -> float:
    """The same on a machine that others keep busy for a while, again and again."""
    draw, ways, guessing, slow, left = random.Random(seed), Ways(), 0, 1.0, 0
    for _ in range(steps):
        if not left:
            slow, left = draw.choice([1, 1, 1, 1.5, 3]), draw.randrange(5, 60)
        left -= 1
        way = ways.now()
        guessing += way
        tokens = draw.choice([8, 12, 16]) if way else 8
        ways.learn(tokens, slow * tokens / (gain if way else 1.0) * draw.uniform(0.9, 1.2))
    return guessing / steps


@pytest.mark.parametrize(("gain", "least", "most"), [(0.8, 0, 0.03), (0.9, 0, 0.05), (0.97, 0, 0.1), (1.2, 0.9, 1)])
def test_a_busy_machine_does_not_make_the_choice(gain: float, least: float, most: float) -> None:
    shares = [share_beside_others(gain, 3000, seed) for seed in range(20)]
    assert least <= sum(shares) / len(shares) <= most


@pytest.mark.parametrize(
    ("rows_cost", "draft_seconds", "tried"), [(0.02, 0.05, True), (0.6, 0.05, False), (0.02, 0.9, False)]
)
def test_a_draft_that_cannot_pay_by_what_is_known_is_not_tried(
    rows_cost: float, draft_seconds: float, tried: bool
) -> None:
    speculator = Speculator(64, 8, Costs([1 + rows_cost * n for n in range(40)]), DraftModel(Chancy(n_ctx=64)))
    for steps in (1, 2, 3, 4) * 40:
        speculator.draft_cost.learn(steps, steps * draft_seconds)
    crowd = Crowd(speculator)
    assert (crowd._promise(4, False) > 1) is tried
    for _ in range(200):
        speculator.draft_cost.learn(4, 4 * 0.01)
    assert (crowd._promise(4, False) > 1) is tried  # asked anew now and then
    crowd._n_rounds += 64
    assert (crowd._promise(4, False) > 1) is (rows_cost < 0.5)


@pytest.mark.parametrize(
    ("chances", "mean", "draft", "ratio"),
    [
        ([0.5] * 4, 0.5, 0.0, 6 / 4),  # rows up to eight cost nothing
        ([0.9, 0.9, 0.1, 0.1], 0.0, 0.0, 6 / 4),
        ([0.9] * 4, 1.0, 0.0, 7.6 / 4),
        ([0.9] * 4, 1.0, 2.0, 11.2 / 3.5 / 4),
        ([0.9] * 8, 0.0, 0.0, 15.2 / 8 / 1.5),  # all of the next stair
        ([0.1] * 8, 0.0, 0.0, 8.8 / 8 / 1.5),
    ],
)
def test_what_guesses_promise(chances: list[float], mean: float, draft: float, ratio: float) -> None:
    seconds = STAIRS[len(chances) - 1 : 16]
    assert promised(seconds, chances, mean, 1 if mean == 0 else 2, lambda depth: draft) == pytest.approx(ratio)


def test_another_number_of_requests_begins_with_what_is_known() -> None:
    crowd = Crowd(Speculator(64, 8, Costs(CHEAP)))
    share_of_guessing(crowd.ways(7), 0.6, 2000)
    assert share_of_guessing(crowd.ways(8), 0.6, 200) < 0.1
    share_of_guessing(crowd.ways(3), 1.6, 4000)
    assert share_of_guessing(crowd.ways(2), 1.6, 200) > 0.9
    for doubtful in (crowd.ways(4), crowd.ways(3, True)):  # where they may pay less they are first tried
        assert not doubtful.guessing and 0.7 < share_of_guessing(doubtful, 1.6, 200) < 0.9


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("apart", [12, 60])
def test_ups_and_downs_of_the_machine_do_not_make_guesses_cheap(n: int, apart: int) -> None:
    """Three steps with guesses again and again, on a machine that others keep busy for a while, again and again."""
    true = [3.4, 3.45, 3.5, 3.55, 3.6, 3.8, 4.4, 4.9, *(9.1 + 0.03 * i for i in range(16))]
    for seed in range(10):
        costs, ratios = Crowd(Speculator(64, 8, Costs(true))).costs(n), list[float]()
        draw, slow, left = random.Random(seed), 1.0, 0
        for step in range(3000):
            if not left:
                slow, left = draw.choice([1, 1, 1, 1.5, 3]), draw.randrange(5, 60)
            left -= 1
            rows = draw.choice([9, 10, 12]) if step % apart < 3 else n
            costs.learn(1 + rows - n, slow * true[rows - 1] * draw.uniform(0.95, 1.3))
            ratios.append(costs[1 + 10 - n] / costs[1] / (true[9] / true[n - 1]))
        assert sorted(ratios)[300] > 0.8 and sorted(ratios)[-300] < 1.2


@pytest.mark.parametrize(
    ("chances", "counts"),
    [
        ([[0.9]] + 7 * [[]], [0] * 8),  # one alone is not worth the next stair
        (8 * [[0.8]], [1] * 8),  # together they are
        (8 * [[0.5]], [0] * 8),
        (8 * [[0.95, 0.95]], [1] * 8),  # as far as the stair goes
        ([[0.9, 0.9, 0.9, 0.9], *(7 * [[0.7, 0.1]])], [3, 1, 1, 1, 1, 1, 0, 0]),  # the likeliest of all
    ],
)
def test_guesses_are_checked_where_they_pay_together(chances: list[list[float]], counts: list[int]) -> None:
    assert Crowd(Speculator(64, 8, Costs(STAIRS)))._best(chances, 15) == counts


def test_where_nothing_can_pay_steps_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row costs as much as a step: few of those that two requests share are proposed for."""
    proposed, propose = list[int](), Crowd.propose

    def counted(crowd: Crowd, tasks: Sequence[Any], room: int, began: float) -> list[int]:
        proposed.append(len(tasks))
        return propose(crowd, tasks, room, began)

    monkeypatch.setattr(Crowd, "propose", counted)
    backend = Chancy(n_ctx=400, n_seq_max=2)
    with speculating(backend, Chancy(n_ctx=400, n_seq_max=2), [1.0 * n for n in range(1, 25)], ngram=False) as model:
        streams = [model.generate("abc" * (1 + i), True, ignore_eos=True, max_tokens=300) for i in range(2)]
        for stream in streams:
            stream.reply()
    shared = [batch for batch in backend.batches if len(set(batch.sequences.tolist())) > 1]
    assert len(shared) > 100 and all(len(batch) == 2 for batch in shared[1:])
    assert 0 < len(proposed) < len(shared) / 10


def test_requests_that_share_steps_are_guessed_for_and_stay_what_they_are() -> None:
    """A draft that is its target, costs that say guesses are free: whatever the clock says, some steps have them."""
    all_are_there = threading.Event()

    class Gated(Chancy):
        def forward(self, batch: Batch) -> NDArray[np.float32]:
            all_are_there.wait()
            return super().forward(batch)

    backend, draft = Gated(n_ctx=400, n_seq_max=4), Chancy(n_ctx=400, n_seq_max=4)
    requests: list[dict[str, Any]] = [{"temperature": i % 2, "seed": i, "max_tokens": 300} for i in range(4)]
    with speculating(backend, draft, ngram=False) as model:
        streams = [model.generate("abc" * (1 + i), True, ignore_eos=True, **r) for i, r in enumerate(requests)]
        all_are_there.set()
        together = [stream.reply() for stream in streams]
    with speculating(Chancy(n_ctx=400, n_seq_max=4), ngram=False) as model:
        alone = [model.generate("abc" * (1 + i), ignore_eos=True, **r) for i, r in enumerate(requests)]
    assert [reply.tokens for reply in together] == [reply.tokens for reply in alone]
    assert any(len(set(batch.sequences.tolist())) > 1 and len(batch) > 4 for batch in backend.batches)


def test_a_least_number_of_guesses_needs_no_draft() -> None:
    """With n-grams alone, for requests that share steps."""
    with speculating(Chancy(n_ctx=400, n_seq_max=2), None, least=2) as model:
        streams = [model.generate("abc" * (1 + i), True, ignore_eos=True, max_tokens=60) for i in range(2)]
        assert [stream.reply().stats.predicted_n for stream in streams] == [60, 60]
