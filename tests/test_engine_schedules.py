"""The engine driven step by step through random schedules, with faults: nobody is lost, mixed up or forgotten."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from fake import EOS, FakeDecoder, FakeTokenizer, hashed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_fake import PagedFake

from edgert.errors import DoesNotFitError, QueueFullError
from edgert.generation import Engine, Generation, Limits
from edgert.options import Options, SamplingParams
from edgert.reply import Chunk
from edgert.sampler import Sampler
from edgert.speculation import Speculator

GREEDY = SamplingParams(temperature=0)


def generation(prompt: list[int], **params: Any) -> Generation:
    options = Options.of(GREEDY, **params)
    decoder = FakeDecoder(FakeTokenizer(), ())
    return Generation(np.array(prompt, np.int32), options, Sampler(options.sampling, 260), decoder, {EOS})


def by_hand(backend: PagedFake, limits: Limits | None = None, speculator: Speculator | None = None) -> Engine:
    """An engine without a thread: the test calls `_turn`."""
    engine = Engine(backend, speculator, limits)
    engine._start = lambda: None  # type: ignore[method-assign]
    return engine


def result(task: Generation) -> tuple[list[int], str]:
    """Tokens, and how the task ended: a finish reason, or the name of an error; it must have ended once."""
    tokens: list[int] = []
    ends = []
    while not task.output.empty():
        item = task.output.get()
        assert not ends, "something came after the end"
        if isinstance(item, BaseException):
            ends.append(type(item).__name__)
        elif isinstance(item, Chunk):
            tokens += item.tokens
            if item.finish_reason:
                ends.append(item.finish_reason)
    assert len(ends) == 1, f"{len(ends)} ends"
    return tokens, ends[0]


def finish(engine: Engine, tasks: list[Generation], turns: int = 5000) -> None:
    for _ in range(turns):
        if all(task.done for task in tasks):
            break
        engine._turn()
    assert all(task.done for task in tasks)
    engine._turn()


def check(engine: Engine, backend: PagedFake) -> None:
    """What holds between any two steps."""
    slots = engine._slots._slots
    assert len(engine._work.tasks) <= engine.n_parallel
    assert [slot.task for slot in slots if slot.task] == sorted(engine._work.tasks, key=lambda task: task.slot.sequence)
    on_its_way = engine._work._piece  # its tokens are in the backend already
    for slot in slots:
        ahead = on_its_way.n_tokens if on_its_way and on_its_way.task is slot.task else 0
        assert slot.n_cached + ahead == backend.length(slot.sequence) == len(backend.cells[slot.sequence])
        assert slot.tokens[: slot.n_cached + ahead].tolist() == backend.cells[slot.sequence]
        for key in slot.keys:
            assert slot in engine._slots._index._holders[key]
    holders = Counter(key for slot in slots for key in slot.keys)
    assert holders == Counter({key: len(found) for key, found in engine._slots._index._holders.items()})


ASK = st.tuples(
    st.just("ask"),
    st.sampled_from(["a", "b", "c"]),
    st.integers(0, 3),  # which beginning
    st.integers(0, 150),  # how much of it
    st.lists(st.integers(0, 1), min_size=1, max_size=3),  # and what follows
    st.integers(1, 30),  # max_tokens
    st.integers(0, 2),  # priority
)
ACTIONS = st.lists(
    st.one_of(
        ASK,
        ASK,
        ASK,
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 10)),
        st.tuples(st.just("break"), st.sampled_from(["error", "full"])),
    ),
    min_size=10,
    max_size=40,
)
BEGINNINGS = [[(7 * i * (k + 1) + k) % 90 for i in range(150)] for k in range(4)]


schedules = given(
    actions=ACTIONS,
    mode=st.sampled_from(["shared", "user", "off"]),
    n_seq_max=st.integers(2, 6),
    n_parallel=st.integers(1, 4),
    n_cached=st.sampled_from([200, 300, 1200]),
    n_batch=st.sampled_from([5, 16, 64]),
    quota=st.sampled_from([None, 0, 60]),
    window=st.sampled_from([0, 0, 16]),
    parts=st.sampled_from([0, 1, 3]),
)


def run_schedule(
    actions: list[tuple[Any, ...]],
    mode: str,
    n_seq_max: int,
    n_parallel: int,
    n_cached: int,
    n_batch: int,
    quota: int | None,
    window: int,
    parts: int,
) -> None:
    """Every task ends once, with the text that it has alone; no slot or page leaks; quotas are kept."""
    backend = PagedFake(n_ctx=200, n_batch=n_batch, n_seq_max=n_seq_max, n_cached=n_cached, window=window, parts=parts)
    engine = by_hand(
        backend, Limits(n_parallel=n_parallel, n_queue=6, prefix_cache=mode, prefix_quota=quota, patience=0.0)
    )
    watch_quotas(engine)
    tasks: list[Generation] = []
    cancelled: set[Generation] = set()
    broken, full, n_refused = 0, 0, 0
    fault: list[str] = []

    def forward(batch: Any) -> None:
        if fault:
            raise OSError("fault") if fault.pop() == "error" else DoesNotFitError("fault")

    backend.before_forward = forward
    for action in actions:
        if action[0] == "ask":
            _, user, beginning, n, rest, most, priority = action
            prompt = BEGINNINGS[beginning][:n] + rest
            task = generation(prompt, user=user, max_tokens=most, priority=priority)
            try:
                engine.submit(task)
                tasks.append(task)
            except QueueFullError as error:
                assert error.n_waiting == len(engine._queue) >= 6 and error.retry_after >= 1
                n_refused += 1
        elif action[0] == "step":
            for _ in range(action[1]):
                engine._turn()
                check(engine, backend)
        elif action[0] == "cancel" and tasks:
            task = tasks[action[1] % len(tasks)]
            if not task.done:
                cancelled.add(task)
            task.cancelled = True
            engine._turn()
            assert task.done, "it goes on although nobody wants it"
        elif action[0] == "break":
            broken += action[1] == "error"
            full += action[1] == "full"
            fault.append(action[1])
            engine._turn()
            fault.clear()
    finish(engine, tasks)
    check(engine, backend)
    for task in tasks:
        tokens, end = result(task)
        told = task.prompt[: task._n_prompt].tolist()
        for token in tokens:
            assert token == hashed(told)
            told.append(token)
        if end == "length":
            assert len(tokens) == task.options.max_tokens or n_cached < 1200 or full
        else:
            reasons = {"cancelled": task in cancelled, "OSError": broken, "DoesNotFitError": n_cached < 1200 or full}
            assert reasons[end]
    counts = engine.snapshot()
    assert counts.refused == n_refused
    assert counts.finished + counts.cancelled + counts.failed == len(tasks)
    assert (counts.n_waiting, counts.n_running) == (0, 0) and not engine._queue._active
    assert mode != "off" or counts.prefixes == counts.cached_tokens == 0
    for slot in engine._slots._slots:
        engine._slots._clear(slot)
    assert backend.n_pages == 0
    assert len(engine._slots._index) == 0


relaxed: Any = settings(suppress_health_check=list(HealthCheck))
test_a_hundred_random_schedules = settings(relaxed, max_examples=100)(schedules(run_schedule))
test_a_thousand_random_schedules = pytest.mark.slow(settings(relaxed, max_examples=1000)(schedules(run_schedule)))


def watch_quotas(engine: Engine) -> None:
    """Makes it an error that a user beyond his quota displaces one within his, while others run."""
    slots = engine._slots
    choose = slots._victim

    def watched(user: str, idle: Any) -> Any:
        slot = choose(user, idle)
        if slot is not None:
            held = Counter[str]()
            for each in slots._slots:
                if each.task is not None or each.n_cached:
                    held[each.owner] += each.n_tokens
            pieces = Counter(each.owner for each in slots._slots if each.task is None and each.n_cached)
            beyond = held[slot.owner] > slots._quota or pieces[slot.owner] > slots._quota_slots
            assert beyond or held[user] <= max(slots._quota, 0.5)
        return slot

    slots._victim = watched  # type: ignore[method-assign]
