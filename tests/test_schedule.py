"""The scheduler's rules alone: whose turn it is, who is refused, how much of a prompt a step reads."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgert.errors import QueueFullError
from edgert.generation.schedule import AGE, DECODE_WEIGHT, Line, Pace, Queue, shared_out, wide_part
from edgert.generation.task import Scoring, Task


def task(user: str = "", *, arrived: float = 0.0, priority: int = 0, n: int = 10, wait: float = math.inf) -> Task:
    made = Scoring(np.zeros(n, np.int32), 1)
    made.user, made.priority, made.arrived, made.queue_end = user, priority, arrived, arrived + wait
    return made


def order(queue: Queue, now: float = 0.0, cost: int = 0) -> list[str]:
    """Users in the order of their turns, each charged for what he takes."""
    users = []
    while found := queue.take(now):
        queue.started(found, cost, now)
        users.append(found.user)
    return users


# Turns


def test_one_user_first_come_first_served() -> None:
    queue, tasks = Queue(), [task(n=n, arrived=n) for n in range(1, 20)]
    for each in tasks:
        queue.add(each)
    assert [queue.take(99.0) for _ in tasks] == tasks
    assert queue.take(99.0) is None and len(queue) == 0


def test_fifty_requests_of_one_user_do_not_starve_another() -> None:
    queue = Queue()
    for i in range(50):
        queue.add(task("many", arrived=i))
    for _ in range(3):
        first = queue.take(50.0)
        assert first
        queue.started(first, 100, 50.0)
    queue.add(task("one", arrived=51))
    assert order(queue, 52.0, 100)[0] == "one"


def test_tokens_count_not_requests() -> None:
    """Long prompts against short ones: each user gets as many tokens."""
    queue = Queue()
    for _ in range(60):
        queue.add(task("long"))
        queue.add(task("short"))
    tokens = {"long": 0, "short": 0}
    for _ in range(44):
        found = queue.take(0.0)
        assert found
        cost = 100 if found.user == "long" else 10
        queue.started(found, cost, 0.0)
        tokens[found.user] += cost
    assert abs(tokens["long"] - tokens["short"]) <= 100


def test_tokens_of_replies_count_more() -> None:
    queue = Queue()
    for user in ("talks", "reads", "talks", "reads"):
        queue.add(task(user))
    talks, reads = queue.take(0.0), queue.take(0.0)
    assert talks and reads and (talks.user, reads.user) == ("talks", "reads")
    queue.charge(talks, 10)
    queue.started(reads, 10 * DECODE_WEIGHT - 1, 0.0)
    assert order(queue) == ["reads", "talks"]


def test_who_was_away_saves_nothing_up() -> None:
    queue = Queue()
    queue.add(task("early"))
    early = queue.take(0.0)
    assert early
    for _ in range(10):
        queue.add(task("busy"))
    for _ in range(5):
        busy = queue.take(0.0)
        assert busy
        queue.started(busy, 1000, 0.0)
    queue.ended(early)
    for _ in range(5):
        queue.add(task("early"))
    assert order(queue, 0.0, 1000)[:4].count("early") == 2


def test_priority_goes_first_and_waiting_raises_it() -> None:
    queue = Queue()
    queue.add(task("slow", arrived=0.0))
    for i in range(3):
        queue.add(task("urgent", arrived=1.0 + i, priority=2))
    first = queue.take(5.0)
    assert first and first.user == "urgent"
    late = 2 * AGE + 1
    queue.started(first, 10, late)
    second = queue.take(late)
    assert second and second.user == "slow"
    one = Queue()
    for priority, arrived in ((0, 0.0), (1, AGE - 1), (1, AGE + 1)):
        one.add(task(arrived=arrived, priority=priority))
    turns = [(t.priority, t.arrived) for t in (one.take(AGE + 2) for _ in range(3)) if t]
    assert turns == [(1, AGE - 1), (0, 0.0), (1, AGE + 1)]


def test_a_bound_and_when_to_come_again() -> None:
    queue = Queue(3)
    for i in range(3):
        queue.add(task(arrived=i))
    with pytest.raises(QueueFullError) as caught:
        queue.add(task())
    assert (caught.value.n_waiting, caught.value.retry_after) == (3, 1.0)
    for now in (10.0, 20.0):  # one begins each ten seconds
        found = queue.take(now)
        assert found
        queue.started(found, 1, now)
        queue.add(task())
    with pytest.raises(QueueFullError) as caught:
        queue.add(task())
    assert caught.value.retry_after == 30.0
    assert "30 s" in str(caught.value)


def test_who_waits_too_long_is_found_and_forgotten() -> None:
    queue = Queue(4)
    soon, later, never = task(wait=1.0), task(wait=2.0), task()
    for each in (never, later, soon):
        queue.add(each)
    assert queue.overdue(0.9) == []
    assert queue.overdue(1.5) == [soon]
    queue.drop(later)
    assert queue.overdue(9.0) == []
    assert list(queue) == [never] and len(queue) == 1
    assert queue.take(9.0) is never


def test_who_left_is_not_kept() -> None:
    """Many come and leave behind one who waits: what is left of them is bounded."""
    queue = Queue(3)
    queue.add(task("first", priority=1))
    queue.add(task("other", wait=1e6))
    for _ in range(1000):
        gone = task("other", wait=1e6)
        queue.add(gone)
        queue.drop(gone)
    assert sum(map(len, queue._heaps.values())) < 100 and len(queue._timed) < 100
    for i in range(10_000):
        passing = task(f"user {i}")
        queue.add(passing)
        queue.drop(passing)
    assert len(queue._served) <= 4100 and len(queue._heaps) < 100
    assert order(queue) == ["first", "other"]


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["add", "take", "drop", "back", "end", "late"]), st.integers(0, 3))))
def test_nobody_is_lost_or_comes_twice(actions: list[tuple[str, int]]) -> None:
    """Whatever is done, the queue holds those that were added and not taken, dropped or overdue."""
    queue, now = Queue(8), 0.0
    waiting: list[Task] = []
    running: list[Task] = []
    for action, n in actions:
        now += 1.0
        if action == "add":
            each = task(f"u{n}", arrived=now, wait=6.0 if n == 3 else math.inf, priority=n % 2)
            try:
                queue.add(each)
                waiting.append(each)
            except QueueFullError:
                assert len(waiting) == 8
        elif action == "take":
            found = queue.take(now)
            assert (found is None) == (not waiting)
            if found:
                waiting.remove(found)
                running.append(found)
        elif action == "drop" and waiting:
            queue.drop(waiting.pop(n % len(waiting)))
        elif action == "back" and running:
            each = running.pop(n % len(running))
            queue.put_back(each)
            waiting.append(each)
        elif action == "end" and running:
            queue.ended(running.pop(n % len(running)))
        elif action == "late":
            for each in queue.overdue(now):
                assert now >= each.queue_end
                waiting.remove(each)
        assert len(queue) == len(waiting)
        assert set(queue) == set(waiting)
    while found := queue.take(now):
        waiting.remove(found)
        queue.ended(found)
    assert not waiting
    for each in running:
        queue.ended(each)
    assert not queue._active


# Pace


class Machine:
    """Steps that cost what a real one's do: the weights once, then rows, dearer the more they look back; with noise."""

    def __init__(self, decode: float, row: float, look: float, wide: float, noise: float = 0.2) -> None:
        self.decode, self.row, self.look, self.wide, self.noise = decode, row, look, wide, noise
        self.rng = random.Random(1)

    def seconds(self, n_replies: int, n_single: int, n_wide: int, depth: int) -> float:
        """wide: what a row in a whole window costs, as a part of what it costs alone"""
        rows = n_single + self.wide * n_wide
        time = self.decode + self.row * (n_replies - 1 + rows) + self.look * depth * rows
        return time * (1 + self.noise * self.rng.random())


def read(pace: Pace, machine: Machine, n_replies: int, n_prompt: int, window: int) -> list[float]:
    """Seconds of each step in which a prompt is read beside replies."""
    task: Any = Prompt("a", n_prompt)
    gaps = []
    while task.pending:
        budget, singles = pace.allows(n_replies, task.n_cached)
        parts = shared_out([task], budget, singles, window)
        ((_, count),) = parts
        n_wide = wide_part(task.n_cached, count, window)
        seconds = machine.seconds(n_replies, count - n_wide, n_wide, task.n_cached)
        pace.learn(n_replies, count - n_wide, n_wide, task.n_cached, seconds)
        gaps.append(seconds)
        task.pending, task.n_cached = task.pending - count, task.n_cached + count
    return gaps


MACHINES: dict[str, tuple[float, float, float, float]] = {
    "tiles": (2.3e-3, 0.25e-3, 0.7e-6, 0.25),
    "slow": (60e-3, 8e-3, 4e-6, 0.8),
    "much too slow": (0.5, 0.1, 5e-5, 0.9),
    "memory is the bottleneck": (10e-3, 0.1e-3, 1e-7, 1.0),
}


@pytest.mark.parametrize("window", [1, 64])
@pytest.mark.parametrize("n_replies", [1, 8])
@pytest.mark.parametrize("name", MACHINES)
def test_replies_wait_three_times_as_long_at_most_or_what_nobody_minds(name: str, n_replies: int, window: int) -> None:
    machine, comfort = Machine(*MACHINES[name]), 0.04
    pace = Pace(512, window, 3.0, comfort)
    read(pace, machine, 0, 200, window)
    usual = []
    for _ in range(20):
        usual.append(machine.seconds(n_replies, 0, 0, 0))
        pace.learn(n_replies, 0, 0, 0, usual[-1])
    gaps = read(pace, machine, n_replies, 4000, window)
    bound = max(3 * float(np.median(usual)), 2 * comfort + float(np.median(usual)))
    assert sum(gap > bound for gap in gaps) <= 1  # the first of its kind may be a surprise
    assert max(gaps) <= 3 * float(np.median(gaps))
    alone = sum(read(Pace(512, window, 3.0, comfort), machine, 0, 4000, window))
    assert sum(gaps) < 3 * alone


def test_a_window_is_not_torn_where_it_is_read_soon_enough() -> None:
    """Then a prompt is computed beside others as it is alone."""
    machine = Machine(*MACHINES["tiles"])
    pace = Pace(512, 64, 3.0, 0.04)
    read(pace, machine, 0, 640, 64)
    for _ in range(9):
        pace.learn(1, 0, 0, 0, 2.3e-3)
    budget, _ = pace.allows(1, 0)
    assert budget >= 64 and budget % 64 == 0
    assert pace.allows(1, 0)[0] >= pace.allows(1, 2000)[0] >= pace.allows(1, 4000)[0] == 64


def test_a_prompt_alone_is_read_as_fast_as_it_goes_but_can_be_stopped() -> None:
    fast, slow = Pace(512, 64, 3.0, 0.04), Pace(512, 64, 3.0, 0.04)
    assert fast.allows(0, 0) == (512, 512)
    for _ in range(5):
        fast.learn(0, 1, 511, 0, 0.1)
        slow.learn(0, 1, 511, 0, 10.0)
    assert fast.allows(0, 0)[0] == 512
    budget, singles = slow.allows(0, 0)
    assert budget == singles and 0.05 < singles * 10.0 / 512 <= 0.5


@settings(max_examples=300)
@given(points=st.lists(st.tuples(st.floats(0, 8000), st.floats(0, 1)), min_size=1, max_size=50), x=st.floats(0, 8000))
def test_no_cost_is_below_nothing(points: list[tuple[float, float]], x: float) -> None:
    line = Line()
    for point in points:
        line.add(*point)
    assert math.isfinite(line(x)) and line(x) >= -1e-9


def test_a_line_follows_what_changes() -> None:
    line = Line()
    for i in range(100):
        line.add(40.0 * i, 1.0 + 0.01 * 40 * i)
    assert line(0) == pytest.approx(1, rel=0.01) and line(4000) == pytest.approx(41, rel=0.01)
    for i in range(100):
        line.add(40.0 * i, 2.0 + 0.02 * 40 * i)
    assert line(1000) == pytest.approx(22, rel=0.1)
    line.add(3800, 1e6)
    assert line(3800) < 90


@settings(max_examples=200)
@given(
    steps=st.lists(
        st.tuples(
            *(st.integers(0, 9), st.integers(0, 63), st.integers(0, 7), st.integers(0, 8000), st.floats(1e-5, 10))
        ),
        max_size=30,
    ),
    n_batch=st.integers(1, 512),
    n_replies=st.integers(0, 8),
    window=st.sampled_from([1, 64]),
)
def test_whatever_was_measured_something_is_read(
    steps: list[tuple[int, int, int, int, float]], n_batch: int, n_replies: int, window: int
) -> None:
    pace = Pace(n_batch, window, 3.0, 0.04)
    for replies, single, wide, depth, seconds in steps:
        if replies + single + wide:
            pace.learn(replies, single, 64 * wide if window > 1 else 0, depth, seconds)
    n_replies = min(n_replies, n_batch - 1)
    for depth in (0, 100, 7000):
        budget, singles = pace.allows(n_replies, depth)
        assert singles >= 1 and 1 <= budget <= n_batch - n_replies


# Sharing a step


class Prompt:
    def __init__(self, user: str, pending: int, cached: int = 0) -> None:
        self.user, self.slot = user, self
        self.pending, self.n_cached = pending, cached


def prompts(*given: tuple[str, int]) -> Any:
    return [Prompt(user, pending) for user, pending in given]


def test_users_get_equal_parts_and_the_rest_goes_to_who_can_use_it() -> None:
    tasks = prompts(("a", 1000), ("a", 1000), ("b", 50), ("c", 400))
    parts = {id(each): count for each, count in shared_out(tasks, 300)}
    assert [parts.get(id(each), 0) for each in tasks] == [125, 0, 50, 125]


def test_where_there_is_not_enough_for_all_they_take_turns() -> None:
    tasks = prompts(("a", 100), ("b", 100), ("c", 100))
    first = [shared_out(tasks, 16, 16, 64, turn)[0][0].user for turn in range(4)]
    assert first == ["a", "b", "c", "a"]


def test_parts_end_where_the_backend_computes_best() -> None:
    task = Prompt("a", 1000, cached=100)
    seen = []
    while task.pending:
        ((_, count),) = shared_out([task], 200, 200, 64)  # type: ignore[list-item]
        task.pending, task.n_cached = task.pending - count, task.n_cached + count
        seen.append(task.n_cached)
    assert seen[-1] == 1100
    assert all(end % 64 == 0 for end in seen[:-1])
    assert all(b - a <= 200 for a, b in pairwise([100, *seen]))


def test_prompts_side_by_side_are_read_by_the_windows_that_they_are_read_by_alone() -> None:
    tasks: Any = [Prompt("a", n) for n in (110, 70, 64, 30, 300, 127)] + [Prompt("b", n) for n in (100, 63)]
    for turn in range(100):
        waiting = [each for each in tasks if each.pending]
        if not waiting:
            break
        for each, count in shared_out(waiting, 192, 12, 64, turn):
            full = (each.n_cached + each.pending) // 64 * 64
            assert each.n_cached >= full or (each.n_cached % 64, count % 64) == (0, 0)
            each.pending, each.n_cached = each.pending - count, each.n_cached + count
    assert turn < 50 and not any(each.pending for each in tasks)


def test_tokens_outside_windows_are_few() -> None:
    task: Any = Prompt("a", 300, cached=50)
    seen = []
    while task.pending:
        ((_, count),) = shared_out([task], 128, 10, 64)
        task.pending, task.n_cached = task.pending - count, task.n_cached + count
        seen.append(task.n_cached)
    assert seen == [60, 128, 256, 320, 330, 340, 350]


@settings(max_examples=300)
@given(
    given=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 300), st.integers(0, 200)), max_size=6),
    budget=st.integers(0, 512),
    singles=st.integers(1, 100),
    window=st.sampled_from([1, 16, 64]),
    turn=st.integers(0, 100),
)
def test_a_step_is_never_overfull_and_never_idle(
    given: list[tuple[str, int, int]], budget: int, singles: int, window: int, turn: int
) -> None:
    tasks: Any = [Prompt(*each) for each in given]
    parts = shared_out(tasks, budget, singles, window, turn)
    assert sum(count for _, count in parts) <= budget
    assert sum(count - wide_part(each.slot.n_cached, count, window) for each, count in parts) <= singles
    assert all(0 < count <= each.slot.pending for each, count in parts)
    assert len({id(each) for each, _ in parts}) == len(parts)
    assert bool(parts) == bool(tasks and budget)


def test_where_several_prompts_are_read_each_gets_its_time() -> None:
    pace = Pace(512, 64, 3.0, 0.0)
    for _ in range(20):
        pace.learn(2, 0, 0, 0, 0.005)
    alone = pace.seconds(2)
    assert alone == pytest.approx(0.8 * 3 * 0.005 - 0.005)
    assert pace.seconds(2, 3) == pytest.approx(3 * alone)
    assert pace.seconds(2, 100) == 0.04
    assert pace.seconds(2, 1, spent=0.01) == pytest.approx(0.8 * 3 * 0.005 - 0.01)
    assert pace.seconds(2, 9, spent=1.0) == 0.0
    slow = Pace(512, 64, 3.0, 0.0)
    slow.learn(2, 0, 0, 0, 0.1)
    assert slow.seconds(2, 9) == slow.seconds(2, 1) == pytest.approx(0.14)


def test_what_a_step_of_other_replies_takes_is_told_from_steps_beside_prompts() -> None:
    """Under load there is always a prompt on its way: no step of eight replies goes by without one."""
    pace = Pace(512, 64, 3.0, 0.0)
    assert pace.seconds(1) == 0.0  # nothing is known yet
    pace.went_beside(1, 0.003)
    assert pace.usual(1) == 0.003 and pace.usual(8) == 0.0
    for _ in range(20):
        pace.learn(1, 0, 0, 0, 0.002)
        pace.went_beside(1, 0.003)
        pace.went_beside(8, 0.009)
    assert pace.usual(1) == pytest.approx(0.002) and pace.usual(8) == pytest.approx(0.006)
    assert pace.seconds(8, spent=0.009) == pytest.approx(0.8 * 3 * 0.006 - 0.009)
    pace.went_beside(8, 10.0)
    assert pace.usual(8) < 0.01  # once held up, it is not thought slow


def test_short_prompts_that_come_together_are_read_first() -> None:
    pace = Pace(512, 64, 3.0, 0.0)
    for _ in range(20):
        pace.learn(2, 0, 0, 0, 0.002)
    part = pace.seconds(2)
    assert not pace.crowd(6, 700) and pace.seconds(2, 6, n_left=700) == pytest.approx(6 * part)  # their cost is unknown
    pace.read(64, 0.032)
    assert pace.crowd(6, 700) and pace.seconds(2, 6, n_left=700) == 0.04
    assert not pace.crowd(2, 8000) and pace.seconds(2, 2, n_left=8000) == pytest.approx(2 * part)
    assert not pace.crowd(1, 700) and pace.seconds(2, 1, n_left=700) == pytest.approx(part)


def test_a_slow_backend_reads_a_prompt_in_steps_that_are_worth_it() -> None:
    """Of a machine whose single token takes longer than a step shall: what is read at once does not dwindle to that."""
    pace = Pace(2048, 1, 3.0, 0.04)
    depth, steps = 0, []
    for _ in range(20):
        n, singles = pace.allows(0, depth)
        assert n == singles
        steps.append(n)
        pace.learn(0, n, 0, depth, 0.6 + 0.01 * n)
        depth += n
    assert steps[0] == 2048 and set(steps[1:]) == {64}
    pace.learn(1, 0, 0, depth, 0.6)
    assert pace.allows(1, depth)[0] < 200, "beside a reply it is the reply's wait that counts"
