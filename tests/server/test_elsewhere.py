"""Answers that are not computed here and now: by an upstream server, from the result cache, by another model."""

from __future__ import annotations

import socket
from typing import Any

import openai
import pytest
from fake import fake_model, hashed, says
from harness import Server, impatient, line_template, open_stream, serving, serving_model, wait_for
from test_leaving import endless, fake, idle

from edgert.errors import EdgertError
from edgert.options import SamplingParams
from edgert.server import running
from edgert.server.choice import Choice
from edgert.server.registry import Spec
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
