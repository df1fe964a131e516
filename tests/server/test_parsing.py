"""What a model writes, told apart, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgert.server.parsing import Calls, Delta, Parser, Plain, Thoughts


def read(parser: Parser, pieces: list[str], reason: str = "stop") -> tuple[str, str, list[Any], str]:
    """Content, thoughts, calls as (name, arguments), finish reason."""
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.push(piece)
    tail, reason = parser.end(reason)
    content = thoughts = ""
    calls: list[list[str]] = []
    for delta in [*deltas, *tail]:
        content += delta.get("content", "")
        thoughts += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                assert call["id"].startswith("call_")
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return content, thoughts, [(name, json.loads(arguments)) for name, arguments in calls], reason


def cut(text: str, places: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in itertools.pairwise(borders)]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "</x>"}}\n</tool_call>'
ADD = ("add", {"a": 1, "b": "</x>"})
LISTED = '<tool_call>[{"name": "add", "arguments": {}}, {"name": "now"}]</tool_call>'
TOOLS: dict[str, dict[str, Any]] = {"add": {}, "now": {}}
ADDS: dict[str, dict[str, Any]] = {"add": {}}
cuts = st.lists(st.integers(0, 400), max_size=12)


@settings(max_examples=200)
@given(
    case=st.sampled_from(
        [
            (CALL, "", [ADD], "tool_calls"),
            ("I add.\n\n" + CALL, "I add.", [ADD], "tool_calls"),
            (CALL + "\n" + CALL + "\n", "", [ADD, ADD], "tool_calls"),
            (LISTED, "", [("add", {}), ("now", {})], "tool_calls"),
            ("a < b and <tool", "a < b and <tool", [], "stop"),
            ("just text  \n", "just text  \n", [], "stop"),
            ("<tool_call>broken</tool_call>", "<tool_call>broken</tool_call>", [], "stop"),
            (
                '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
                '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
                [],
                "stop",
            ),
            (
                '<tool_call>{"name": "add", "arguments": {"a": 1}',
                '<tool_call>{"name": "add", "arguments": {"a": 1}',
                [],
                "stop",
            ),
            ('<tool_call>{"name": "now", "arguments": {}}', "", [("now", {})], "tool_calls"),
            (
                '<tool_call>{"name": "now", "arguments": "{\\"x\\": 2}"}</tool_call>',
                "",
                [("now", {"x": 2})],
                "tool_calls",
            ),
            ("", "", [], "stop"),
        ]
    ),
    places=cuts,
)
def test_calls_between_marks(case: Any, places: list[int]) -> None:
    text, content, calls, reason = case
    assert read(Calls(TOOLS), cut(text, places)) == (content, "", calls, reason)


@settings(max_examples=100)
@given(
    case=st.sampled_from(
        [
            ('{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})], "tool_calls"),
            (
                '[{"name": "add", "arguments": {}}, {"name": "now", "arguments": {}}]',
                "",
                [("add", {}), ("now", {})],
                "tool_calls",
            ),
            (
                '{"name": "add", "parameters": {}}; {"name": "now", "parameters": {}}',
                "",
                [("add", {}), ("now", {})],
                "tool_calls",
            ),
            ('{"answer": 4}', '{"answer": 4}', [], "stop"),
            ("It is 4.", "It is 4.", [], "stop"),
        ]
    ),
    places=cuts,
)
def test_bare_calls(case: Any, places: list[int]) -> None:
    text, content, calls, reason = case
    assert read(Calls(TOOLS, bare=True), cut(text, places)) == (content, "", calls, reason)


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_the_reason_agrees_with_the_content(reason: str) -> None:
    assert read(Calls(ADDS), ["no call"], reason)[3] == reason
    assert read(Calls(ADDS), [CALL[:30]], reason)[3] == reason
    assert read(Calls(ADDS), [CALL], reason)[3] == ("tool_calls" if reason == "stop" else "length")


@settings(max_examples=200)
@given(
    case=st.sampled_from(
        [
            ("<think>\nhm, 2 < 3\n\nso\n</think>\n\nFour.", False, "Four.", "hm, 2 < 3\n\nso"),
            ("\n<think>hm</think>Four.", False, "Four.", "hm"),
            ("hm</think>\nFour.", True, "Four.", "hm"),
            ("hm, and no end", True, "", "hm, and no end"),
            ("<think></think>\n\nFour.", False, "Four.", ""),
            ("  Four <think>.", False, "  Four <think>.", ""),
            ("<thinking", False, "<thinking", ""),
            ("<th", False, "<th", ""),
            ("", False, "", ""),
        ]
    ),
    places=cuts,
)
def test_thoughts(case: Any, places: list[int]) -> None:
    text, begun, content, thoughts = case
    assert read(Thoughts(Plain(), begun), cut(text, places)) == (content, thoughts, [], "stop")


def test_thoughts_then_calls() -> None:
    found = read(Thoughts(Calls(ADDS), False), list(f"<think>add</think>\n{CALL}"))
    assert found == ("", "add", [ADD], "tool_calls")


def test_text_is_not_held_longer_than_it_must() -> None:
    parser = Thoughts(Calls(ADDS), False)
    assert parser.push("Hello") == [{"content": "Hello"}]
    assert parser.push(" wor") == [{"content": " wor"}]
    assert parser.push("ld <to") == [{"content": "ld"}]
    assert parser.push("ast>") == [{"content": " <toast>"}]


@settings(max_examples=200)
@given(text=st.text('<>/thinkool_ca \n{}[]"x', max_size=60), places=cuts, bare=st.booleans(), begun=st.booleans())
def test_nothing_is_lost(text: str, places: list[int], bare: bool, begun: bool) -> None:
    """Every text comes out, save marks and white space, the same for any cuts."""
    whole = read(Thoughts(Calls(ADDS, bare), begun), [text])
    assert read(Thoughts(Calls(ADDS, bare), begun), cut(text, places)) == whole
    if not begun and "<think>" not in text and "<tool_call>" not in text:
        assert whole[0] == text
