"""What an answer looks like on its way to the screen, however it is cut; and what is kept of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgert.cli.answer import DIM, PLAIN, Painter, printable, rates
from edgert.cli.terminal import clean, is_open, unquote
from edgert.conversation import Conversation
from edgert.errors import EdgertError
from edgert.reply import Stats


def paint(pieces: list[str]) -> str:
    painter = Painter()
    return "".join(painter.push(piece) for piece in pieces) + painter.close()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("<think>\nhm\n</think>\n\nyes", f"{DIM}hm{PLAIN}\n\nyes"),
        ("\n<think>hm</think>yes", f"{DIM}hm{PLAIN}\n\nyes"),
        ("<think>never ends", f"{DIM}never ends{PLAIN}"),
        ("write <think> in a text", "write <think> in a text"),
        ("<think>a</think>b<think>c", f"{DIM}a{PLAIN}\n\nb<think>c"),
        ("<thin", "<thin"),
        ("<thin air", "<thin air"),
        ("a\x1b[2J\x07\tb\r\n\x9b31m", "a[2J\tb\n31m"),
        ("", ""),
    ],
)
def test_thinking_and_controls(text: str, shown: str) -> None:
    assert paint([text]) == shown
    assert paint(list(text)) == shown


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "/think>", "<th", "ink>", "a", " ", "b c", "\x1b["])))
def test_cuts_do_not_matter(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert paint(pieces) == paint([text]) == paint(list(text))


@given(st.text())
def test_nothing_that_moves_the_cursor(text: str) -> None:
    assert all(c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") for c in printable(text))


@given(st.lists(st.sampled_from(["ask", "answer", "empty", "undo", "regen", "clear"])))
def test_turns_always_alternate(steps: list[str]) -> None:
    conversation = Conversation("be kind")
    for step in steps:
        waiting = bool(conversation.turns) and conversation.turns[-1]["role"] == "user"
        if step == "ask" and not waiting:
            conversation.ask("q")
        elif step in ("answer", "empty") and waiting:
            conversation.answer("a" if step == "answer" else " \n")
        elif step == "undo":
            conversation.undo()
        elif step == "regen":
            conversation.forget_answer()
        elif step == "clear":
            conversation.clear()
        roles = [turn["role"] for turn in conversation.turns]
        assert roles == (["user", "assistant"] * len(roles))[: len(roles)]
        assert conversation.messages()[0] == {"role": "system", "content": "be kind"}


def test_a_question_cannot_follow_a_question() -> None:
    conversation = Conversation()
    conversation.ask("one")
    with pytest.raises(ValueError):
        conversation.ask("two")


def test_saved_and_loaded(tmp_path: Path) -> None:
    conversation = Conversation("sys", model="m")
    conversation.ask("你好 \ud800".encode("utf-8", "replace").decode())
    conversation.answer("a")
    conversation.save(tmp_path / "c.json")
    assert Conversation.load(tmp_path / "c.json") == conversation
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
GOOD = {"format": "edgert conversation 1", "model": "m", "system": None, "turns": TURNS}


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"turns": 3},
        {"turns": TURNS[:1]},
        {"turns": TURNS[::-1]},
        {"turns": [{"role": "user"}, TURNS[1]]},
        {"turns": [{"role": "user", "content": 3}, TURNS[1]]},
        {"turns": [3, 4]},
        {"system": 3},
        {"model": None},
    ],
)
def test_damaged_conversations(tmp_path: Path, change: dict[str, object]) -> None:
    """Reliability row 14, as far as the transcript goes."""
    path = tmp_path / "c.json"
    path.write_text(json.dumps(GOOD))
    assert len(Conversation.load(path).turns) == 2
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(EdgertError):
        Conversation.load(path)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"null"])
def test_files_that_are_no_conversation(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "c.json").write_bytes(data)
    with pytest.raises(EdgertError):
        Conversation.load(tmp_path / "c.json")


@pytest.mark.parametrize(
    ("typed", "opened", "message"),
    [
        ("a", False, "a"),
        ('"""', True, ""),
        ('"""a', True, "a"),
        ('"""a\nb"""', False, "a\nb"),
        ('"""\na\n"""', False, "a"),
        ('""""""', False, ""),
        ('say """x""" now', False, 'say """x""" now'),
        ('"""""', True, '""'),
    ],
)
def test_quotes(typed: str, opened: bool, message: str) -> None:
    assert is_open(typed) is opened and unquote(typed) == message


def test_stray_bytes_are_replaced() -> None:
    assert clean(b"ok \xc4\xe3 \xff".decode("utf-8", "surrogateescape")) == "ok \ufffd \ufffd"
    clean("\ud83d").encode()


def test_an_answer_whose_tokens_all_came_at_once_has_no_rate() -> None:
    """Guesses that are right bring a short answer in one step: "0.0 tok/s" would be false."""
    assert rates(Stats.of(79, 1, 0.1, 9, 0.2, first_n=9)) == "prompt 1 + 79 cached tokens, 10.0 tok/s · answer 9 tokens"
    assert rates(Stats.of(0, 1, 0.1, 9, 0.2, first_n=1)) == "prompt 1 tokens, 10.0 tok/s · answer 9 tokens, 40.0 tok/s"
