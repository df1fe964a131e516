"""Answers that are not computed here and now: by an upstream server, from the result cache, by another model."""

from __future__ import annotations

import gc
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from fake import PATIENCE, backend_of, fake_model, hashed, held, says
from harness import Server, impatient, line_template, open_stream, serving, serving_model, wait_for
from test_leaving import endless, fake, idle

from edgert.errors import EdgertError
from edgert.options import SamplingParams
from edgert.server import running, sse
from edgert.server.choice import Choice
from edgert.server.registry import Spec
from edgert.server.results import Results
from edgert.server.service import Settings
from edgert.server.upstream import MARK, Upstream

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
LONG = [{"role": "user", "content": "x" * 300}]


def far(server: Server, **options: Any) -> Upstream:
    return Upstream(f"{server.url}/v1", model="fake", **options)


def test_what_is_too_long_goes_upstream() -> None:
    with (
        serving_model(fake_model(says("from afar"), n_ctx=1024)) as cloud,
        serving_model(fake_model(says("from here"), n_ctx=64), upstream=far(cloud)) as edge,
    ):
        here, there = edge.ok(CHAT, messages=HI), edge.ok(CHAT, messages=LONG)
        assert (here["choices"][0]["message"]["content"], here.get("served_by")) == ("from here", None)
        assert (there["choices"][0]["message"]["content"], there["served_by"]) == ("from afar", "upstream")
        assert edge.ok("/v1/completions", prompt="x" * 300 + "\n")["choices"][0]["text"] == "from afar"
        client = openai.OpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0)
        for messages, text in ((HI, "from here"), (LONG, "from afar")):
            raw = client.chat.completions.with_raw_response.create(model="fake", messages=messages, stream=True)  # type: ignore[call-overload]
            assert raw.headers.get(MARK) == (None if messages is HI else "upstream")
            assert "".join(c.choices[0].delta.content or "" for c in raw.parse() if c.choices) == text
        assert edge.fails(CHAT, messages=HI, temperature=-1)["param"] == "temperature"  # stays a mistake


@pytest.mark.parametrize("stream", [False, True])
def test_what_waits_too_long_goes_upstream(stream: bool) -> None:
    with (
        serving_model(fake_model(says("from afar"))) as cloud,
        serving_model(endless(n_seq_max=1), upstream=far(cloud)) as edge,
    ):
        first = open_stream(edge)
        wait_for(lambda: fake(edge).n_evaluated > 20)
        impatient(edge, 0.2)
        if stream:
            events = edge.events(CHAT, messages=HI)
            assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "from afar"
        else:
            assert edge.ok(CHAT, messages=HI)["served_by"] == "upstream"
        first.close()
        wait_for(lambda: idle(edge))


def test_what_finds_no_place_goes_upstream() -> None:
    with (
        serving_model(fake_model(says("from afar"))) as cloud,
        serving_model(endless(n_seq_max=1), parallel=1, queue=1, upstream=far(cloud)) as edge,
    ):
        inside = [open_stream(edge) for _ in range(2)]
        wait_for(lambda: edge.service.admission.inside == 2)
        assert edge.ok(CHAT, messages=HI)["served_by"] == "upstream"
        for connection in inside:
            connection.close()
        wait_for(lambda: idle(edge))


@contextmanager
def scripted(talk: Callable[[socket.socket], object]) -> Iterator[Upstream]:
    """An upstream server that says what `talk` says to each connection, whose request has been read."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(32) as pool:

        def answer(connection: socket.socket) -> None:
            with connection:
                data = b""
                while b"\r\n\r\n" not in data:
                    data += connection.recv(1 << 16)
                head, _, body = data.partition(b"\r\n\r\n")
                left = int(re.search(rb"content-length: (\d+)", head.lower())[1]) - len(body)  # type: ignore[index]
                while left:
                    left -= len(connection.recv(left))
                talk(connection)

        def accept() -> None:
            while True:
                try:
                    pool.submit(answer, listening.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield Upstream(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", timeout=PATIENCE)
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def silent(gone: threading.Semaphore) -> Callable[[socket.socket], None]:
    """Says nothing until the other side has left."""

    def talk(connection: socket.socket) -> None:
        connection.recv(1)
        gone.release()

    return talk


def test_an_upstream_that_is_silent_holds_up_nobody_and_hears_who_leaves() -> None:
    gone = threading.Semaphore(0)
    with (
        scripted(silent(gone)) as upstream,
        serving_model(fake_model(says("ok"), n_ctx=64), upstream=upstream) as edge,
    ):
        waiting = [open_stream(edge, messages=LONG, stream=i % 2 == 0) for i in range(24)]
        wait_for(lambda: upstream.inside == 24)
        assert edge.ok(CHAT, messages=HI)["choices"][0]["message"]["content"] == "ok"
        assert edge.ok("/tokenize", content="abc")["tokens"]
        for connection in waiting:
            connection.close()
        assert all(gone.acquire(timeout=PATIENCE) for _ in waiting)
        wait_for(lambda: not upstream.inside)


def test_an_upstream_that_is_silent_for_too_long() -> None:
    with scripted(silent(threading.Semaphore(0))) as upstream:
        upstream.timeout = 0.2
        with serving_model(fake_model(says("ok"), n_ctx=64), upstream=upstream) as edge:
            assert edge.fails(CHAT, messages=LONG)["code"] == "context_length_exceeded"
            assert edge.fails(CHAT, messages=LONG, stream=True)["code"] == "context_length_exceeded"
        assert not upstream.inside


def test_an_upstream_gets_no_more_than_it_may() -> None:
    with scripted(silent(threading.Semaphore(0))) as upstream:
        upstream.most = 2
        with serving_model(fake_model(says("ok"), n_ctx=64), upstream=upstream) as edge:
            waiting = [open_stream(edge, messages=LONG) for _ in range(2)]
            wait_for(lambda: upstream.inside == 2)
            assert edge.fails(CHAT, messages=LONG)["code"] == "context_length_exceeded"
            for connection in waiting:
                connection.close()
            wait_for(lambda: not upstream.inside)


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def piece(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_pings_never_stand_within_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.02)

    def talk(connection: socket.socket) -> None:
        connection.sendall(STREAM + piece(b'data: {"choices": ['))
        time.sleep(0.3)
        connection.sendall(piece(b"]}\n\ndata: [DO") + piece(b"NE]\n\n") + b"0\r\n\r\n")

    with scripted(talk) as upstream, serving_model(fake_model(says("ok"), n_ctx=64), upstream=upstream) as edge:
        assert edge.events(CHAT, messages=LONG) == [{"choices": []}]


@pytest.mark.parametrize("end", [b"", piece(b"data: {}\n\ndata: {"), b"nonsense"])
def test_an_upstream_that_breaks_off(end: bytes) -> None:
    with (
        scripted(lambda connection: connection.sendall(STREAM + piece(b"data: {}\n\n") + end)) as upstream,
        serving_model(fake_model(says("ok"), n_ctx=64), upstream=upstream) as edge,
    ):
        body = json.dumps({"messages": LONG, "stream": True}).encode()
        status, _, data = edge.raw("POST", CHAT, body)
        assert status == 200 and b"[DONE]" not in data
        last = json.loads(data.strip().rpartition(b"data: ")[2])
        assert last["error"]["message"] == "The upstream server broke off its answer."
        wait_for(lambda: not upstream.inside)


def said(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@pytest.mark.parametrize(
    "answer, status, message",
    [
        (said("500 Oh", b"{}"), 400, "context size of 64"),
        (said("307 Away", b"", "Location: http://127.0.0.1:1/"), 400, "context size of 64"),
        (said("204 Nothing", b""), 400, "context size of 64"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + said("200 OK", b'{"id": 1}'), 200, ""),
        (b"", 400, "context size of 64"),
        (b"\0\0\0\0", 400, "context size of 64"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", 400, "context size of 64"),
        (said("200 OK", b"[1]"), 502, "not JSON"),
        (said("200 OK", b"[" * 100_000), 502, "not JSON"),
        (said("422 No", b'{"error": {"message": "Not so."}}'), 422, "refused: Not so."),
        (said("422 No", b"\xff"), 422, "refused."),
    ],
)
def test_what_upstreams_say(answer: bytes, status: int, message: str) -> None:
    with (
        scripted(lambda connection: connection.sendall(answer)) as upstream,
        serving_model(fake_model(says("ok"), n_ctx=64), upstream=upstream) as edge,
    ):
        found, body = edge.post(CHAT, {"messages": LONG})
        assert found == status, body
        assert message in body["error"]["message"] if message else body == {"id": 1, "served_by": "upstream"}
        assert not upstream.inside


def test_without_its_upstream_the_error_is_ours() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = Upstream(f"http://127.0.0.1:{closed.getsockname()[1]}/v1")
        with serving_model(fake_model(says("ok"), n_ctx=64), upstream=gone) as edge:
            assert edge.fails(CHAT, messages=LONG)["code"] == "context_length_exceeded"
            assert edge.ok(CHAT, messages=HI)


@pytest.mark.parametrize("url", ["", "host/v1", "ftp://host/v1", "http://", "http://host:x/v1", "http://host:0"])
def test_what_is_no_upstream(url: str) -> None:
    with pytest.raises(EdgertError, match="upstream: must be such as"):
        Upstream(url)


def test_keys_of_the_upstream() -> None:
    with serving_model(fake_model(says("from afar"), n_ctx=1024), Settings(api_keys=("k",))) as cloud:
        for key, status in (("k", 200), ("wrong", 400)):
            with serving_model(fake_model(says("ok"), n_ctx=16), upstream=far(cloud, key=key)) as edge:
                assert edge.post(CHAT, {"messages": LONG[:1], "max_tokens": 2})[0] == status


# Results


def test_the_same_question_is_answered_once() -> None:
    with serving_model(fake_model(hashed, n_ctx=512), result_cache=8) as server:
        first = server.ok(CHAT, messages=HI, max_tokens=20)
        n = fake(server).n_evaluated
        second = server.ok(CHAT, messages=HI, max_tokens=20)
        assert fake(server).n_evaluated == n
        assert (first.get("served_by"), second["served_by"]) == (None, "result-cache")
        assert second["choices"] == first["choices"]
        assert second["usage"]["completion_tokens"] == 20
        events = server.events(CHAT, messages=HI, max_tokens=20)
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
        assert text == first["choices"][0]["message"]["content"]
        assert fake(server).n_evaluated == n
        for other in ({"max_tokens": 21}, {"user": "x"}, {"stop": "q"}, {"logprobs": True}, {"n": 2}):
            before = fake(server).n_evaluated
            server.ok(CHAT, **{"messages": HI, "max_tokens": 20} | other)
            assert fake(server).n_evaluated > before


def test_a_model_that_took_the_place_of_another_gives_its_own_answers() -> None:
    """Also where the memory of the one that went has become that of the new one."""
    results = Results(4)
    keys = []
    for _ in range(20):
        model = fake_model(hashed)
        keys.append(results.key(model, [[1, 2]], 1, {"max_tokens": 2}, ""))
        assert keys[-1] == results.key(model, [[1, 2]], 1, {"max_tokens": 2}, "")
        model.close()
        del model
        gc.collect()
    assert len(set(keys)) == 20


def test_what_chance_decides_is_not_kept() -> None:
    wild = SamplingParams(temperature=100, top_k=0, top_p=1, min_p=0)
    with serving_model(fake_model(hashed, wild, n_ctx=512), result_cache=8) as server:
        texts = {server.ok(CHAT, messages=HI, max_tokens=20)["choices"][0]["message"]["content"] for _ in range(4)}
        assert len(texts) == 4
        seeded = [server.ok(CHAT, messages=HI, max_tokens=20, seed=3) for _ in range(2)]
        assert seeded[1]["served_by"] == "result-cache"


def test_it_is_off_by_default_and_bounded(server: Server) -> None:
    assert "served_by" not in [server.ok(CHAT, messages=HI) for _ in range(2)][1]
    with serving_model(fake_model(hashed, n_ctx=512), result_cache=2) as small:
        for text in "abc":
            small.ok(CHAT, messages=[{"role": "user", "content": text}], max_tokens=2)
        again = [small.ok(CHAT, messages=[{"role": "user", "content": t}], max_tokens=2).get("served_by") for t in "ca"]
        assert again == ["result-cache", None]


# The choice between two models


def test_the_small_model_answers_what_it_is_sure_of() -> None:
    def load(source: Any, **_: Any) -> Any:
        model = fake_model(says(f"I am {source}"), n_ctx=1024)
        model.template = line_template("\n")
        if source == "small":

            def bend(logits: Any) -> None:  # it doubts after a question mark
                if any(ord("?") in cells[-8:] for cells in model.backend.cells.values()):  # type: ignore[attr-defined]
                    logits[:] /= 100

            model.backend.bend = bend  # type: ignore[attr-defined]
        return model

    choices = {"auto": Choice("auto", "small", "large", prompt=200, tokens=4, sure=0.5)}
    with serving([Spec("small", "small"), Spec("large", "large")], load, choices=choices) as server:

        def who(content: str, model: str = "auto") -> str:
            reply = server.ok(CHAT, model=model, messages=[{"role": "user", "content": content}])
            assert reply["choices"][0]["message"]["content"] == f"I am {reply['model']}"
            name: str = reply["model"]
            return name

        assert who("easy") == "small"
        assert who("hard?") == "large"
        assert who("x" * 300) == "large"
        assert who("hard?", "small") == "small"
        listed = {model["id"]: model for model in server.get("/v1/models")[1]["data"]}
        assert listed["auto"]["meta"] == {"small": "small", "large": "large"}


@pytest.fixture
def pair() -> Iterator[Server]:
    """A choice between two; the small one doubts after a question mark."""

    def load(source: Any, **_: Any) -> Any:
        model = fake_model(says(f"I am {source}"), n_ctx={"small": 200, "large": 1024}[source])
        model.template = line_template("\n")
        if source == "small":

            def bend(logits: Any) -> None:
                if any(ord("?") in cells for cells in backend_of(model).cells.values()):
                    logits[:] /= 100

            backend_of(model).bend = bend
        return model

    choices = {"auto": Choice("auto", "small", "large", tokens=4, sure=0.5)}
    with serving([Spec("small", "small"), Spec("large", "large")], load, choices=choices) as server:
        yield server


@pytest.mark.parametrize("text, name", [("easy", "small"), ("hard?", "large"), ("x" * 300, "large")])
def test_every_route_that_answers_chooses(pair: Server, text: str, name: str) -> None:
    reply = pair.ok("/v1/completions", model="auto", prompt=text + "\n")
    assert (reply["model"], reply["choices"][0]["text"]) == (name, f"I am {name}")
    messages = [{"role": "user", "content": text}]
    for path, body in (
        ("/api/chat", {"messages": messages}),
        ("/api/generate", {"prompt": text}),
        ("/api/generate", {"prompt": text + "\n", "raw": True}),
    ):
        reply = pair.ok(path, model="auto", stream=False, **body)
        assert (reply["model"], reply.get("response") or reply["message"]["content"]) == (name, f"I am {name}")
    assert pair.ok(f"{CHAT}/input_tokens", model="auto", messages=messages)["input_tokens"] == len(text) + 8


def test_several_prompts_go_where_the_hardest_goes(pair: Server) -> None:
    for prompts, name in ((["a\n", "b\n"], "small"), (["a\n", "b?\n"], "large")):
        reply = pair.ok("/v1/completions", model="auto", prompt=prompts)
        assert {choice["text"] for choice in reply["choices"]} == {f"I am {name}"}


def test_a_choice_is_a_model_by_its_name(pair: Server) -> None:
    client = openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none")
    for model in client.models.list():
        assert client.models.retrieve(model.id).id == model.id


def test_who_leaves_while_the_small_one_reads_frees_his_place(pair: Server) -> None:
    assert pair.ok(CHAT, model="large", messages=HI)
    small = pair.model("small")
    with held(backend_of(small)) as stopped:
        connection = open_stream(pair, model="auto")
        assert stopped.wait(PATIENCE)
        connection.close()
        wait_for(lambda: not pair.service.admission.inside)
    wait_for(lambda: not small.snapshot().n_running)
    assert small.snapshot().cancelled == 1


def test_what_is_too_long_for_the_small_model_is_the_large_ones() -> None:
    def load(source: Any, **_: Any) -> Any:
        model = fake_model(says(f"I am {source}"), n_ctx={"small": 64, "large": 1024}[source])
        model.template = line_template("\n")
        return model

    choices = {"auto": Choice("auto", "small", "large")}
    with serving([Spec("small", "small"), Spec("large", "large")], load, choices=choices) as server:
        for n, name in ((10, "small"), (100, "large")):
            reply = server.ok(CHAT, model="auto", messages=[{"role": "user", "content": "x" * n}])
            assert reply["model"] == name
        error = server.fails(CHAT, model="auto", messages=[{"role": "user", "content": "x" * 2000}])
        assert (error["code"], error["n_ctx"]) == ("context_length_exceeded", 1024)


def test_a_choice_among_nothing() -> None:
    with pytest.raises(EdgertError, match="b is none"):
        running.service_of([Spec("a", "a")], lambda *_: None, choices={"x": Choice("x", "a", "b")})  # type: ignore[arg-type, return-value]
