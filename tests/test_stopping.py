"""Stop strings: where a reply ends, and what is held back until that is known."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from fake import END_OF_TURN, fake_model, says
from hypothesis import given, settings
from hypothesis import strategies as st

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
