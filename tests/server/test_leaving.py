"""Clients that leave, time-outs, failures, and more requests than there are places."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from fake import PATIENCE, FakeBackend, fake_model, hashed, held, says, soon
from harness import HI, Server, impatient, open_stream, serving_model, wait_for

from edgert.errors import EdgertError
from edgert.server import running, sse
from edgert.server.service import Settings

CHAT = "/v1/chat/completions"


def endless(**options: Any) -> Any:
    return fake_model(lambda tokens: ord("a"), n_ctx=100_000, delay=0.005, **options)


def fake(server: Server) -> FakeBackend:
    backend = server.model().backend
    assert isinstance(backend, FakeBackend)
    return backend


def idle(server: Server) -> bool:
    """Whether nothing is computed any more."""
    before = fake(server).n_evaluated
    time.sleep(0.05)
    return fake(server).n_evaluated == before and not server.service.admission.inside


def leave(server: Server, connection: socket.socket) -> None:
    """Closes a connection, for which the server then works no longer: two seconds by the steps of its engine."""
    before = len(fake(server).batches)
    connection.close()
    wait_for(lambda: idle(server))
    assert len(fake(server).batches) - before < 2 / fake(server).delay


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_generation_ends_when_the_client_leaves(stream: bool, n: int) -> None:
    with serving_model(endless()) as server:
        connection = open_stream(server, stream=stream, n=n)
        wait_for(lambda: fake(server).n_evaluated > 30)
        leave(server, connection)


def test_a_client_that_leaves_while_its_prompt_is_read() -> None:
    with serving_model(endless(n_batch=16)) as server:
        connection = open_stream(server, messages=[{"role": "user", "content": "x" * 50_000}])
        wait_for(lambda: fake(server).n_evaluated > 100)
        leave(server, connection)
        assert fake(server).n_evaluated < 50_000


def test_clients_that_leave_the_queue_never_run() -> None:
    with serving_model(endless(n_seq_max=1)) as server:
        first = open_stream(server)
        wait_for(lambda: fake(server).n_evaluated > 20)
        queued = [open_stream(server, messages=[{"role": "user", "content": f"Q{i}"}]) for i in range(5)]
        wait_for(lambda: server.service.admission.inside == 6)
        for connection in queued:
            connection.close()
        wait_for(lambda: server.service.admission.inside == 1)
        first.close()
        wait_for(lambda: idle(server))
        assert not any(ord("Q") in batch.tokens for batch in fake(server).batches)


def test_pings_while_nothing_is_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.02)
    with serving_model(fake_model(says("ok"), n_ctx=4096)) as server:
        data = b""
        with held(fake(server)), open_stream(server) as connection:
            while data.count(b": ping\n\n") < 3:
                data += connection.recv(1 << 16)
            assert b'"content":"o"' not in data
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        with held(fake(server)) as stopped:
            stream = client.chat.completions.create(model="fake", messages=HI, stream=True)  # type: ignore[arg-type]
            assert stopped.wait(PATIENCE)
            time.sleep(0.1)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "ok"


def failing(after: int) -> Any:
    def rule(tokens: list[int]) -> int:
        if len(tokens) >= after:
            raise EdgertError("The engine is gone.")
        return ord("a")

    return fake_model(rule)


def test_a_failure_in_a_stream_is_told() -> None:
    with serving_model(failing(15)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(model="fake", messages=HI, stream=True)  # type: ignore[arg-type]
        with pytest.raises(openai.APIError, match="engine is gone"):
            list(stream)
        _, _, data = server.raw("POST", CHAT, json.dumps({"messages": HI, "stream": True}).encode())
        assert b"[DONE]" not in data
        assert b'"finish_reason":"stop"' not in data
        assert server.fails(CHAT, 500, messages=HI)["message"] == "The engine is gone."
        assert server.fails(CHAT, 500, messages=HI, n=3)["message"] == "The engine is gone."
        assert server.get("/health")[0] == 200
        wait_for(lambda: not server.service.admission.inside)


def test_what_is_inside_stays_inside() -> None:
    def rule(tokens: list[int]) -> int:
        raise RuntimeError("secret: " + bytes(t for t in tokens if t < 256).decode())

    with serving_model(fake_model(rule)) as server:
        error = server.fails(CHAT, 500, messages=[{"role": "user", "content": "my password"}])
        assert "RuntimeError" in error["message"]
        assert "password" not in error["message"]


def test_an_answer_that_takes_too_long() -> None:
    with serving_model(endless(), Settings(timeout=0.2)) as server:
        assert server.fails(CHAT, 504, messages=HI)["code"] == "timeout"
        _, _, data = server.raw("POST", CHAT, json.dumps({"messages": HI, "stream": True}).encode())
        assert b'"code":"timeout"' in data
        wait_for(lambda: idle(server))


def test_a_request_that_waits_too_long() -> None:
    with serving_model(endless(n_seq_max=1)) as server:
        first = open_stream(server)
        wait_for(lambda: fake(server).n_evaluated > 20)
        impatient(server, 0.2)
        status, headers, data = server.raw("POST", CHAT, json.dumps({"messages": HI}).encode())
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        assert b"did not begin" in data
        time.sleep(0.1)
        assert server.service.admission.inside == 1  # the first goes on
        first.close()
        wait_for(lambda: idle(server))


def test_six_hundred_at_once() -> None:
    with serving_model(fake_model(hashed, n_ctx=256, n_seq_max=8), parallel=8, queue=64) as server:
        lock = threading.Barrier(64)
        took: list[tuple[int, float, str | None]] = []

        def one(i: int) -> None:
            if i < 64:
                lock.wait()
            began = time.monotonic()
            status, headers, _ = server.raw("POST", CHAT, json.dumps({"messages": HI, "max_tokens": 20}).encode())
            took.append((status, time.monotonic() - began, headers.get("retry-after")))

        with ThreadPoolExecutor(200) as pool:
            list(pool.map(one, range(600)))
        statuses = [status for status, _, _ in took]
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) >= 72
        assert all(retry and int(retry) >= 1 for status, _, retry in took if status == 503)
        assert server.service.admission.inside == 0
        assert server.ok(CHAT, messages=HI)


def test_a_full_house_is_told_at_once() -> None:
    with serving_model(endless(n_seq_max=1), parallel=1, queue=2) as server:
        inside = [open_stream(server) for _ in range(3)]
        wait_for(lambda: server.service.admission.inside == 3)

        def ask() -> None:
            status, headers, _ = server.raw("POST", CHAT, json.dumps({"messages": HI}).encode())
            assert status == 503
            assert int(headers["retry-after"]) >= 1

        assert soon(0.1, ask)
        for connection in inside:
            connection.close()
        wait_for(lambda: idle(server))


def test_one_user_cannot_take_all_places() -> None:
    with serving_model(endless(n_seq_max=2), parallel=2, queue=6) as server:
        others = [open_stream(server, user="quiet")]
        wait_for(lambda: server.service.admission.inside == 1)
        greedy = [open_stream(server, user="greedy") for _ in range(6)]
        wait_for(lambda: server.service.admission.inside == 7)
        status, answer = server.post(CHAT, {"messages": HI, "user": "greedy"})
        assert status == 429
        assert answer["error"]["code"] == "rate_limit_exceeded"
        others.append(open_stream(server, user="quiet"))
        wait_for(lambda: server.service.admission.inside == 8)
        for connection in (*others, *greedy):
            connection.close()
        wait_for(lambda: idle(server))


def test_slow_clients_do_not_slow_others(server: Server) -> None:
    slow = [socket.create_connection((server.host, server.port)) for _ in range(50)]
    for connection in slow:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    assert soon(1, lambda: server.ok(CHAT, messages=HI, max_tokens=2))
    for connection in slow:
        connection.close()
    wait_for(lambda: not server.service.admission.inside)


def test_who_does_not_read_his_answer_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.05)
    monkeypatch.setattr(sse, "STUCK_SECONDS", 0.3)
    usual = running._bind

    def bind(host: str, port: int) -> socket.socket:
        listening = usual(host, port)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # which the answer soon fills, and this one:
        return listening

    monkeypatch.setattr(running, "_bind", bind)
    with serving_model(fake_model(lambda tokens: ord("a"), n_ctx=100_000)) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((server.host, server.port))
        fields = {"messages": HI, "stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 50_000}
        data = json.dumps(fields).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        wait_for(lambda: server.service.admission.inside)
        wait_for(lambda: idle(server))
        assert fake(server).n_evaluated < 50_000
        assert server.ok(CHAT, messages=HI, max_tokens=2)["choices"][0]["finish_reason"] == "length"


def test_many_at_once_get_their_own_texts() -> None:
    with serving_model(fake_model(hashed, n_ctx=256, n_seq_max=4)) as server:

        def one(i: int) -> tuple[int, str]:
            messages = [{"role": "user", "content": f"the same beginning for all, then {i % 25}"}]
            return i % 25, server.ok(CHAT, messages=messages, max_tokens=16)["choices"][0]["message"]["content"]

        alone = dict(one(i) for i in range(25))
        with ThreadPoolExecutor(16) as pool:
            assert all(alone[i] == text for i, text in pool.map(one, range(400)))
    assert len(set(alone.values())) == 25


def test_who_waits_is_told_that_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "GRACE_SECONDS", 0.1)
    with serving_model(endless()) as server:
        stream = open_stream(server)
        answers: list[Any] = []
        waiting = threading.Thread(target=lambda: answers.append(server.post(CHAT, {"messages": HI})))
        waiting.start()
        wait_for(lambda: server.service.admission.inside == 2)
        wait_for(lambda: fake(server).n_evaluated > 30)
    waiting.join()
    assert answers[0][0] == 503
    assert "shutting down" in answers[0][1]["error"]["message"]
    data = b""
    while piece := stream.recv(1 << 16):
        data += piece
    assert b"shutting down" in data
    assert b"[DONE]" not in data


def test_connections_are_kept(server: Server) -> None:
    connection = http.client.HTTPConnection(server.host, server.port)
    for _ in range(3):
        connection.request("POST", CHAT, json.dumps({"messages": HI, "max_tokens": 2}).encode())
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()
    connection.close()
