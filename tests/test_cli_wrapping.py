"""Answers are broken between words while they come, at any width and however they are cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wcwidth import wcswidth

from edgert.cli import wrapping
from edgert.cli.wrapping import NEAR, Wrapper, wrapped_whole

LINE = "The sound of the waves, an ethereal melody, a lone figure, lost in the depths of a sea."


def at(width: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wrapping, "_columns", lambda: width)


def in_pieces(pieces: list[str]) -> str:
    wrapper = Wrapper()
    return "".join(wrapper.push(piece) for piece in pieces) + wrapper.close()


@pytest.mark.parametrize(
    ("width", "text", "lines"),
    [
        (
            30,
            LINE,
            ["The sound of the waves, an", "ethereal melody, a lone", "figure, lost in the depths of", "a sea."],
        ),
        (26, LINE[:40], ["The sound of the waves, an", "ethereal melo"]),  # which fills the first line
        (25, LINE[:40], ["The sound of the waves,", "an ethereal melo"]),
        (20, "a word " + "x" * 50 + " bc", ["a word " + "x" * 50 + " bc"]),  # the terminal breaks what is longer than
        (20, "a word " + "x" * 51 + " bc", ["a word " + "x" * 51, "bc"]),  # a line, after 20 and 40 columns
        (20, "some words " + "x" * 39 + " b", ["some words", "x" * 39, "b"]),
        (20, "- item   of a list, spaces kept", ["- item   of a list,", "spaces kept"]),
        (20, "  two  \n\n    \nlines\n", ["  two  ", "", "    ", "lines", ""]),
        (20, "one\ttwo three four", ["one\ttwo three", "four"]),
        (20, "你好，世界。今天天气很好。", ["你好，世界。今天天气", "很好。"]),
        (20, "你好，世界。今天天很好。然", ["你好，世界。今天天很", "好。然"]),
        (20, "你好，世界。今天天真很好（然）", ["你好，世界。今天天真", "很好（然）"]),
        (20, "你好世界今天天气很好，然", ["你好世界今天天气很", "好，然"]),  # no line begins with a comma
        (20, "你好世界今天天气很「好」", ["你好世界今天天气很", "「好」"]),  # and none ends with an opening
        (20, "你好世界today天气很好", ["你好世界today天气很", "好"]),
        (20, "아름다운 바다의 노래를 듣고", ["아름다운 바다의", "노래를 듣고"]),
        (20, "smile 😀😀😀 and 👩‍👩‍👧‍👦👩‍👩‍👧‍👦👩‍👩‍👧‍👦", ["smile 😀😀😀 and", "👩‍👩‍👧‍👦👩‍👩‍👧‍👦👩‍👩‍👧‍👦"]),
        (20, "naïve cafés cre\u0301mes", ["naïve cafés cre\u0301mes"]),  # 18 columns, one a combining accent
        (20, "it is in https://example.org/a/b/c for more", ["it is in https://example.org/a/b/c for", "more"]),
    ],
)
def test_lines(monkeypatch: pytest.MonkeyPatch, width: int, text: str, lines: list[str]) -> None:
    at(width, monkeypatch)
    assert wrapped_whole(text).split("\n") == lines
    assert in_pieces(list(text)).split("\n") == lines


@pytest.mark.parametrize(
    "code",
    [
        "```python\nfor x in range(1000): print(x, x + 1, x + 2)\n```",
        "~~~\nfor x in range(1000): print(x, x + 1, x + 2)\n```\nstill code that is long, longer\n~~~",
        "- list\n  ````\n  one two three four five six seven\n  ```\n  one two three four five six\n  ````",
        "```\nnever ends and never ends and never ends",
    ],
)
def test_code_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    at(20, monkeypatch)
    after = "\nand text after it is broken again" if not code.endswith("ends") else ""
    broken = "\nand text after it is\nbroken again" if after else ""
    assert wrapped_whole(code + after) == in_pieces(list(code + after)) == code + broken


def test_code_within_a_line_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    at(20, monkeypatch)
    assert wrapped_whole("```x``` and text that is long\nand so on and on and on") == (
        "```x``` and text\nthat is long\nand so on and on and\non"
    )


def test_styles_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    at(20, monkeypatch)
    text = "\x1b[2mhidden thoughts, and\x1b[0m more of them"
    assert wrapped_whole(text) == "\x1b[2mhidden thoughts, and\x1b[0m\nmore of them"


def test_text_is_held_back_near_the_edge_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And there no more than the word."""
    at(60, monkeypatch)
    wrapper, given_, shown = Wrapper(), "", ""
    for character in LINE:
        shown += wrapper.push(character)
        given_ += character
        word = given_.rpartition(" ")[2]
        held = given_.replace("\n", " ")[len(shown.replace("\n", " ")) :]
        near = len(shown.rpartition("\n")[2]) >= 60 - NEAR
        assert held.strip() in (word if near else "", "")
    assert len(shown) > 60


def test_a_terminal_that_changes_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    at(30, monkeypatch)
    wrapper = Wrapper()
    shown = wrapper.push("The sound of the waves, ")
    at(40, monkeypatch)
    shown += wrapper.push("an ethereal melody, ")
    at(20, monkeypatch)
    shown += wrapper.push("a lone figure, lost in the depths ") + wrapper.close()
    assert shown.split("\n") == [
        "The sound of the waves, an ethereal",
        "melody, a lone",
        "figure, lost in the",
        "depths ",
    ]


LETTERS = st.sampled_from("ab好，「é한😀-/")


@given(st.text(LETTERS | st.just(" ")), st.integers(2, 50), st.lists(st.integers(0, 200), max_size=20))
def test_cuts_do_not_matter_and_nothing_is_lost(text: str, width: int, cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        at(width, patch)
        whole = wrapped_whole(text)
        places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
        assert in_pieces([text[a:b] for a, b in pairwise(places)]) == in_pieces(list(text)) == whole
    assert "".join(whole.split()) == "".join(text.split())


@given(st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=40), st.integers(20, 90))
def test_no_line_is_too_long(words: list[str], width: int) -> None:
    """Where no word takes more columns than are watched."""
    with pytest.MonkeyPatch.context() as patch:
        at(width, patch)
        lines = wrapped_whole(" ".join(words)).split("\n")
    assert max(map(wcswidth, lines)) <= width
