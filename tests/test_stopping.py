"""Stop strings: where a reply ends, and what is held back until that is known."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import pytest
from fake import END_OF_TURN, FakeBackend, FakeDecoder, FakeTokenizer, fake_model, says
from hypothesis import given, settings
from hypothesis import strategies as st

from edgert.model import Model
from edgert.options import SamplingParams
from edgert.stopping import StopStrings


@settings(max_examples=500)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_what_is_shown_does_not_depend_on_the_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    ends = [(i + len(s), i) for s in stops for i in range(len(text)) if text.startswith(s, i)]
    expected = text[: min(ends)[1]] if ends else text
    borders = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    rule, shown, stopped = StopStrings(stops), "", False
    for a, b in itertools.pairwise(borders):
        piece, stopped = rule.push(text[a:b])
        shown += piece
        assert expected.startswith(shown)
        if stopped:
            break
    assert stopped == bool(ends)
    assert shown + rule.flush() == expected


def test_only_what_may_become_a_stop_is_held_back() -> None:
    rule = StopStrings(["x" * 200, "END"])
    assert rule.push("Hello E") == ("Hello ", False)
    assert rule.push("N") == ("", False)
    assert rule.push("Tx") == ("ENT", False)
    assert rule.push("y") == ("xy", False)


def test_stop_string_over_several_tokens_is_never_sent() -> None:
    with fake_model(says("one two three four")) as model:
        chunks = list(model.generate("\n", True, stop="two three"))
        assert "".join(c.text for c in chunks) == "one "
        assert [c.text for c in chunks if "t" in c.text] == []
        assert chunks[-1].finish_reason == "stop"
        assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)


@pytest.mark.parametrize(
    "stop, text, spelled",
    [
        ("two three", "one ", "one "),
        ("ne t", "o", "o"),
        ("o", "", ""),
        ("fourth", "one two three four🙂", "one two three four🙂"),
        ("🙂", "one two three four", "one two three four"),
        ("r🙂", "one two three fou", "one two three fou"),
    ],
)
def test_logprobs_spell_what_is_shown(stop: str, text: str, spelled: str) -> None:
    with fake_model(says("one two three four🙂")) as model:
        reply = model.generate("\n", stop=stop, logprobs=True)
        assert reply.text == text
        assert bytes(score.token for score in reply.logprobs).decode() == spelled
        shown, told = "", b""
        for chunk in model.generate("\n", True, stop=stop, logprobs=True):
            shown, told = shown + chunk.text, told + bytes(score.token for score in chunk.logprobs)
            assert len(told.decode("utf-8", "ignore")) <= len(shown)
        assert told.decode() == shown == text


def test_a_token_that_is_shown_in_part_is_told() -> None:
    """Tokens of several characters, the stop string in the middle of one."""

    class Words(FakeTokenizer):
        def piece(self, token: int) -> bytes:
            return b"hello " if token == ord("h") else super().piece(token)

        def stream_decoder(self, *, special: Collection[int] = ()) -> FakeDecoder:
            return FakeDecoder(self, special)

    backend: Any = FakeBackend(says("ahbh"))
    with Model(backend, Words(), None, SamplingParams(temperature=0)) as model:  # type: ignore[arg-type]
        for stop, text, tokens in (("llo b", "ahe", "ah"), ("hello b", "a", "a"), ("b", "ahello ", "ah")):
            reply = model.generate("\n", stop=stop, logprobs=True)
            assert (reply.text, "".join(chr(score.token) for score in reply.logprobs)) == (text, tokens)


def test_a_long_stop_that_never_comes_delays_nothing() -> None:
    with fake_model(says("one two three four")) as model:
        stop = "one two three five" + "x" * 200
        texts = [c.text for c in model.generate("\n", True, stop=stop)]
        assert texts == ["one two three f", "ou", "r", ""]
        texts = [c.text for c in model.generate("\n", True, stop="y" * 200)]
        assert texts == [*"one two three four", ""]


def test_a_stop_cut_short_by_the_end_is_shown() -> None:
    with fake_model(says("one tw")) as model:
        reply = model.generate("\n", stop=["two"])
        assert (reply.text, reply.finish_reason) == ("one tw", "stop")
        reply = model.generate("\n", stop=["two"], max_tokens=5)
        assert (reply.text, reply.finish_reason) == ("one t", "length")


@pytest.mark.parametrize("stop", ["", [], ["", ""], [""]])
def test_empty_stops_are_ignored(stop: Any) -> None:
    with fake_model(says("text", END_OF_TURN)) as model:
        reply = model.generate("\n", stop=stop)
        assert (reply.text, reply.finish_reason) == ("text", "stop")
