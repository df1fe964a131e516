"""Prompts that are read between the steps of replies, where a step can be interrupted."""

from __future__ import annotations

from typing import Any

import pytest
from fake import prompt_of, told
from paged_fake import PagedFake
from test_engine_schedules import by_hand, check, finish, generation, result

from edgert.errors import DoesNotFitError
from edgert.generation import Limits
from edgert.generation.lockstep import PIECE
from edgert.speculation import Speculator
from edgert.speculation.economics import Costs
from edgert.speculation.speculator import BURST

PARTS = 3  # that a window takes


def reading(n_prompt: int, users: tuple[str, ...] = ("b",), n_window: int = 16) -> Any:
    """An engine with a reply that runs, and prompts of so many tokens that come then."""
    backend = PagedFake(n_ctx=400, n_batch=64, n_seq_max=6, parts=PARTS)
    backend.n_window = n_window
    engine = by_hand(backend, Limits(prefix_cache="off"))
    reply = generation([1, 2, 3], user="a", max_tokens=200)
    engine.submit(reply)
    for _ in range(3):
        engine._turn()
    backend.batches.clear()
    prompts = [generation(prompt_of(i, n_prompt), user=user, max_tokens=5) for i, user in enumerate(users)]
    for task in prompts:
        engine.submit(task)
    return backend, engine, reply, prompts


def test_every_step_of_a_window_gives_a_reply_its_token() -> None:
    backend, engine, reply, (prompt,) = reading(64)
    before, turn = reply.n_predicted, 0
    while not prompt.n_predicted:
        engine._turn()
        turn += 1
        check(engine, backend)
        assert reply.n_predicted == before + turn
    # A step in which a window ends goes on with the next if there is time.
    assert PARTS + 3 * (PARTS - 1) <= turn <= 4 * PARTS
    assert prompt.n_predicted == 1  # the last window's logits, and no step of its own for them
    windows = [batch for batch in backend.batches if len(batch) > 1]
    assert [len(batch) for batch in windows] == [16] * 4
    assert all(len(set(batch.sequences)) == 1 for batch in windows)
    finish(engine, [reply, prompt])
    assert result(reply) == (told([1, 2, 3], 200), "length")
    assert result(prompt) == (told(prompt_of(0, 64), 5), "length")
    assert engine.snapshot().prompt_tokens == 3 + 64
    assert backend.n_pages == 0


@pytest.mark.parametrize("n_prompt", [41, 32 + 2, 32 + 1])
def test_what_is_no_whole_window_is_read_between_steps_too(n_prompt: int) -> None:
    backend, engine, reply, (prompt,) = reading(n_prompt)
    engine._turn()
    sequence = prompt.slot.sequence
    before, turns = reply.n_predicted, 0
    while not prompt.n_predicted:
        engine._turn()
        turns += 1
        check(engine, backend)
        assert reply.n_predicted == before + turns
    finish(engine, [prompt])
    assert result(prompt) == (told(prompt_of(0, n_prompt), 5), "length")
    of_prompt = [batch for batch in backend.batches if sequence in batch.sequences and batch.positions[0] < n_prompt]
    pieces = [batch.positions.tolist() for batch in of_prompt if set(batch.sequences) == {sequence}]
    end = [] if n_prompt == 33 else [list(range(32, n_prompt))]  # a single token is read as a reply's next one is
    assert pieces == [list(range(16)), list(range(16, 32)), *end]
    finish(engine, [reply])


@pytest.mark.parametrize("n_prompt, lengths", [(63, [PIECE] * 3 + [15]), (100, [64, PIECE, PIECE, 4])])
def test_ends_longer_than_a_piece_are_read_in_several(n_prompt: int, lengths: list[int]) -> None:
    backend, engine, reply, (prompt,) = reading(n_prompt, n_window=64)
    engine._turn()
    sequence = prompt.slot.sequence
    finish(engine, [prompt, reply])
    assert result(prompt) == (told(prompt_of(0, n_prompt), 5), "length")
    batches = [batch for batch in backend.batches if set(batch.sequences) == {sequence}]
    assert [len(batch) for batch in batches if batch.positions[0] < n_prompt] == lengths


def test_users_read_a_window_each_in_turn() -> None:
    backend, engine, reply, prompts = reading(160, ("b", "c"))
    while not any(task.n_predicted for task in prompts):
        engine._turn()
        check(engine, backend)
        assert abs(prompts[0].slot.n_cached - prompts[1].slot.n_cached) <= 16
    finish(engine, [*prompts, reply])
    for i, task in enumerate(prompts):
        assert result(task) == (told(prompt_of(i, 160), 5), "length")


@pytest.mark.parametrize("n_turns", range(1, 2 * PARTS))
def test_who_leaves_within_a_window_gives_it_back(n_turns: int) -> None:
    backend, engine, reply, (prompt,) = reading(160)
    for _ in range(n_turns):
        engine._turn()
    pages = backend.n_pages
    prompt.cancelled = True
    engine._turn()
    assert prompt.done and result(prompt) == ([], "cancelled")
    check(engine, backend)
    assert backend.n_pages < pages and engine._work._piece is None
    finish(engine, [reply])
    assert result(reply) == (told([1, 2, 3], 200), "length")


def test_one_that_is_set_aside_within_a_window_reads_it_again() -> None:
    backend, engine, reply, (prompt,) = reading(64)
    engine._turn()
    engine._turn()
    assert engine._work._piece is not None
    engine._admission.set_aside(prompt)
    check(engine, backend)
    finish(engine, [prompt, reply])
    assert result(prompt) == (told(prompt_of(0, 64), 5), "length")


def test_a_window_is_finished_at_once_when_no_reply_is_left() -> None:
    _, engine, reply, (prompt,) = reading(64)
    engine._turn()
    assert engine._work._piece is not None
    reply.cancelled = True
    engine._turn()
    assert engine._work._piece is None and prompt.slot.n_cached == 16
    finish(engine, [prompt])
    assert result(prompt) == (told(prompt_of(0, 64), 5), "length")


@pytest.mark.parametrize("fault", [OSError("fault"), DoesNotFitError("full")])
def test_a_window_that_fails_is_its_own_affair(fault: Exception) -> None:
    backend, engine, reply, (prompt,) = reading(64)

    def fail(batch: Any) -> None:
        if len(batch) == 16:
            backend.before_forward = None
            raise fault

    backend.before_forward = fail
    finish(engine, [prompt, reply])
    assert result(reply) == (told([1, 2, 3], 200), "length")
    ended = result(prompt)
    assert ended == (([], "OSError") if isinstance(fault, OSError) else (told(prompt_of(0, 64), 5), "length"))
    check(engine, backend)
    assert backend.n_pages == 0


def test_the_first_requests_of_all_reply_together() -> None:
    """Nothing is known of what steps take: it is learned although a prompt is always on its way."""
    backend = PagedFake(n_ctx=400, n_batch=64, n_seq_max=6, parts=PARTS)
    backend.n_window = 16
    engine = by_hand(backend, Limits(prefix_cache="off", comfort=0.0))
    tasks = [generation(prompt_of(0, 16), user="a", max_tokens=100)]
    engine.submit(tasks[0])
    engine._turn()
    tasks += [generation(prompt_of(i, 40), user="a", max_tokens=100) for i in range(1, 6)]
    for task in tasks[1:]:
        engine.submit(task)
    engine._turn()
    assert engine._work._pace.usual(1) > 0 and engine._work._n_left > 100
    finish(engine, tasks)
    for i, task in enumerate(tasks):
        assert result(task) == (told(prompt_of(i, 40 if i else 16), 100), "length")


def test_ends_of_short_prompts_that_come_together_are_read_in_one_piece() -> None:
    backend, engine, reply, prompts = reading(60, ("b", "c"), n_window=64)
    engine._work._pace.read(1000, 1e-3)
    finish(engine, [*prompts, reply])
    pieces = [len(batch) for batch in backend.batches if len(set(batch.sequences)) == 1 and len(batch) > 1]
    assert pieces[0] == 60  # when that has been read the other may be the only one, and is read as such
    for i, task in enumerate(prompts):
        assert result(task) == (told(prompt_of(i, 60), 5), "length")


def test_beside_a_prompt_walks_of_several_rounds_are_short() -> None:
    bursts: list[tuple[bool, float]] = []

    class Watched(Speculator):
        def propose(self, tasks: Any, room: int) -> list[int]:
            bursts.append((engine._work._piece is not None, self.burst))
            return super().propose(tasks, room)

    backend = PagedFake(n_ctx=400, n_batch=64, n_seq_max=6, parts=PARTS)
    backend.n_window = 16
    engine = by_hand(backend, Limits(prefix_cache="off", comfort=0.004), Watched(400, 6, Costs([0.001] * 20)))
    reply = generation([1, 2, 3], user="a", max_tokens=200)
    engine.submit(reply)
    for _ in range(3):
        engine._turn()
    prompt = generation(prompt_of(0, 64), user="b", max_tokens=5)
    engine.submit(prompt)
    finish(engine, [prompt, reply])
    assert set(bursts) == {(True, 0.004), (False, BURST)}
    assert result(reply) == (told([1, 2, 3], 200), "length")
