"""What speculation believes of costs and odds: measured, and moved by what is seen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from fake import FakeBackend
from numpy.typing import NDArray

from edgert.backends.base import Batch
from edgert.speculation import economics
from edgert.speculation.economics import Costs, Odds, Source


def test_costs_are_measured_and_nothing_stays_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Slow(FakeBackend):
        def forward(self, batch: Batch) -> NDArray[np.float32]:
            nonlocal now
            now += 0.001 * len(batch)
            return super().forward(batch)

    monkeypatch.setattr(economics, "perf_counter", lambda: now)
    backend = Slow()
    costs = Costs.measure(backend, 12)
    assert backend.length(0) == 0 and len(costs) == 12
    assert 2.0 < costs[4] / costs[1] < 6.0
    assert all(costs[n] <= costs[n + 1] for n in range(1, 12))


def test_odds_move_from_what_is_believed_to_what_is_seen() -> None:
    odds = Odds([0.2, 0.9])
    assert odds[0] == pytest.approx(0.2)
    for i in range(400):
        odds.learn(0, i % 4 != 0)
    assert odds[0] == pytest.approx(0.75, abs=0.05)
    assert odds[1] == pytest.approx(0.9)


def test_a_source_that_does_not_pay_pauses_longer_each_time() -> None:
    source, tries = Source(0.5, 0.1), []
    for step in range(3000):
        if source.ready:
            tries.append(step)
            source.learn(0, 0.2, 1.0)
        else:
            source.rest()
    gaps = [b - a for a, b in itertools.pairwise(tries) if b - a > 1]
    assert gaps == sorted(gaps) and len(set(gaps)) >= 3
    assert len(tries) < 40
    for _ in range(2000):
        if source.ready:
            source.learn(2, 0.2, 1.0)
        else:
            source.rest()
    assert source.net(1.0) > 1.5
