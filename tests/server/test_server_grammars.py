"""Grammars over HTTP: JSON mode, schemas, expressions, GBNF on every route, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from harness import Server

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


def text_of(reply: Any) -> str:
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "stop"
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@pytest.mark.parametrize("path, prompt", [(CHAT, {"messages": HI}), (PLAIN, {"prompt": "x\n"})])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"grammar": 'root ::= "{\\"n\\": " [12] "}"'},
        {"regex": r'\{"n": [12]\}'},
    ],
)
def test_every_kind_on_every_route(server: Server, path: str, prompt: Any, fields: dict[str, Any]) -> None:
    assert json.loads(text_of(server.ok(path, **prompt, **fields)))["n"] in (1, 2)
    events = server.events(path, **prompt, **fields)
    text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for e in events for c in e["choices"])
    assert json.loads(text)["n"] in (1, 2)


def test_the_official_client_parses(server: Server) -> None:
    from pydantic import BaseModel

    class Answer(BaseModel):
        n: bool

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    reply = client.chat.completions.parse(model="fake", messages=HI, response_format=Answer)  # type: ignore[arg-type]
    assert reply.choices[0].message.parsed is not None


def test_a_limit_is_told(server: Server) -> None:
    reply = server.ok(CHAT, messages=HI, json_schema=SCHEMA, max_tokens=2)
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "("}}}},
            "response_format.json_schema.schema",
        ),
        ({"json_schema": {"not": {}}}, "json_schema"),
        ({"regex": "(?=x)"}, "regex"),
        ({"regex": "(" * 60_000}, "regex"),
        ({"grammar": "nonsense"}, "grammar"),
        ({"grammar": 'root ::= "a"', "regex": "a"}, "regex"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_refused(server: Server, fields: dict[str, Any], param: str, stream: bool) -> None:
    assert server.fails(CHAT, messages=HI, stream=stream, **fields)["param"] == param
    assert server.ok(CHAT, messages=HI)


def test_text_is_free(server: Server) -> None:
    assert text_of(server.ok(CHAT, messages=HI, response_format={"type": "text"})).startswith("Hello")
