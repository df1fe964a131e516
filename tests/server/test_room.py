"""A model that is asked for while others have all the memory: it waits for one of them, and takes its place."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from fake import PATIENCE, backend_of, held
from harness import Server, impatient, open_stream, serving, wait_for
from shelf import Shelf, names, text

from edgert.server import room
from edgert.server.registry import Place, Spec

LONG = {"max_tokens": 60, "ignore_eos": True}
FREELY: dict[str, Any] = {}


class Asked(list[Future[str]]):
    """Requests in work, in their order."""

    def __init__(self, go_on: Callable[[], None]) -> None:
        self.go_on = go_on

    def answers(self) -> list[str]:
        """What they were told, once the first may go on."""
        self.go_on()
        return [future.result(PATIENCE) for future in self]


@contextmanager
def asked(server: Server, *requests: tuple[str, dict[str, Any]]) -> Iterator[Asked]:
    """Requests, each of which came when the one before it was inside; the first one's model stands still until then."""
    with ThreadPoolExecutor(len(requests)) as pool, ExitStack() as standing:
        stopped = standing.enter_context(held(backend_of(server.model(requests[0][0]))))
        found = Asked(standing.close)
        for model, fields in requests:
            inside = server.service.admission.inside
            found.append(pool.submit(text, server, model, **fields))
            wait_for(lambda inside=inside: server.service.admission.inside > inside)  # type: ignore[misc]
            wait_for(stopped.is_set)
        yield found


@pytest.mark.parametrize("by", ["count", "memory"])
def test_a_model_in_use_is_waited_for_and_makes_room(shelf: Shelf, by: str) -> None:
    shelf.most = 1 if by == "memory" else 99
    specs = [Spec("a", "a"), Spec("b", "b")]
    with serving(specs, shelf, models_max=1 if by == "count" else 0) as server:
        with asked(server, ("a", LONG), ("b", FREELY)) as requests:
            time.sleep(0.1)
            assert names(server) == ["a"] and not any(request.done() for request in requests)
            long, other = requests.answers()
            assert len(long) == 60 and other == "I am b"  # the first loses nothing
        assert names(server) == ["b"]
        assert text(server, "a") == "I am a"


def test_who_waits_too_long_for_a_model_is_told_so(shelf: Shelf) -> None:
    with serving([Spec("a", "a"), Spec("b", "b")], shelf, models_max=1) as server:
        with asked(server, ("a", LONG)) as requests:
            impatient(server, 0.2)
            status, headers, data = server.raw("POST", "/v1/completions", b'{"prompt": "x", "model": "b"}')
            assert status == 503 and int(headers["retry-after"]) >= 1 and b"became idle" in data
            assert [len(answer) for answer in requests.answers()] == [60]
        impatient(server, 0)
        assert text(server, "b") == "I am b"


def test_they_are_served_in_the_order_in_which_they_came(shelf: Shelf) -> None:
    with serving([Spec(name, name) for name in "abcd"], shelf, models_max=1) as server:
        with asked(server, ("a", LONG), ("c", FREELY), ("b", FREELY), ("d", FREELY)) as requests:
            assert requests.answers()[1:] == ["I am c", "I am b", "I am d"]
        assert shelf.loads == ["a", "c", "b", "d"]


def test_those_who_wait_for_one_model_share_it(shelf: Shelf) -> None:
    with serving([Spec("a", "a"), Spec("b", "b")], shelf, models_max=1) as server:
        with asked(server, ("a", LONG), *[("b", FREELY)] * 5) as requests:
            assert set(requests.answers()[1:]) == {"I am b"}
        assert shelf.loads == ["a", "b"]


def test_who_leaves_while_waiting_costs_nobody_a_model(shelf: Shelf) -> None:
    with serving([Spec("a", "a"), Spec("b", "b")], shelf, models_max=1) as server:
        with asked(server, ("a", LONG)) as requests:
            connection = open_stream(server, model="b")
            wait_for(lambda: server.service.admission.inside == 2)
            connection.close()
            wait_for(lambda: server.service.admission.inside == 1)
            assert [len(answer) for answer in requests.answers()] == [60]
        assert text(server, "a") == "I am a"
        assert shelf.loads == ["a"]


def test_a_model_whose_caller_left_while_it_was_loaded_is_kept(shelf: Shelf) -> None:
    hold, begun = threading.Event(), threading.Event()

    def load(source: Any, **options: Any) -> Any:
        if source == "b":
            begun.set()
            hold.wait(PATIENCE)
        return shelf(source, **options)

    with serving([Spec("a", "a"), Spec("b", "b")], load) as server:
        connection = open_stream(server, model="b")
        wait_for(begun.is_set)
        connection.close()
        wait_for(lambda: not server.service.admission.inside)
        hold.set()
        wait_for(lambda: names(server) == ["a", "b"])
        assert text(server, "b") == "I am b"
        assert shelf.loads == ["a", "b"]


def test_requests_that_end_all_the_time_do_not_put_the_turn_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "TURN", 0.3)
    line, place = room.Line(3), Place(Spec("a", "a"))

    async def attempt() -> bool:
        return line.drains(place)

    async def busy_model() -> None:
        while True:
            line.wake()
            await asyncio.sleep(0)

    async def waiting() -> None:
        others = asyncio.create_task(busy_model())
        await line.turn(attempt, lambda: place)
        others.cancel()

    asyncio.run(waiting())
    assert not line.drains(place)


def test_a_model_that_is_never_idle_lets_others_have_their_turn(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "TURN", 0.1)
    with serving([Spec("a", "a", {"delay": 0.01}), Spec("b", "b")], shelf, models_max=1) as server:
        ended = threading.Event()

        def crowd() -> int:
            n = 0
            while not ended.is_set():
                assert text(server, "a", max_tokens=8, ignore_eos=True)
                n += 1
            return n

        with ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(crowd) for _ in range(3)]
            wait_for(lambda: server.service.admission.inside == 3)
            try:
                assert text(server, "b") == "I am b"
            finally:
                ended.set()
            assert all(answer.result(PATIENCE) for answer in answers)
