"""What a model writes, told apart: text, thoughts, calls of tools."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from edgert.server.calls import calls_in
from edgert.stopping import overlap

Delta = dict[str, Any]


class Parser(Protocol):
    """Reads one answer piece by piece; what it gives are OpenAI's deltas."""

    def push(self, text: str) -> list[Delta]:
        """The deltas that are certain after a piece."""

    def end(self, reason: str) -> tuple[list[Delta], str]:
        """The deltas still held back, and the finish reason, given the engine's."""


class Plain:
    """All is text."""

    def push(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []

    def end(self, reason: str) -> tuple[list[Delta], str]:
        return [], reason


class Thoughts:
    """Thoughts between <think> and </think> at the beginning of an answer become `reasoning_content`.

    inner:  reads what follows
    begun:  whether the prompt has opened the thoughts already
    """

    BEGIN, END = "<think>", "</think>"

    def __init__(self, inner: Parser, begun: bool) -> None:
        self._inner = inner
        self._state = "thinking" if begun else "start"
        self._held = ""
        self._fresh = True  # white space at the beginning of a part is no part of it

    def push(self, text: str) -> list[Delta]:
        if self._state == "answer":
            return self._answer(text)
        self._held += text
        if self._state == "start":
            begin = self._held.lstrip()
            if len(begin) < len(self.BEGIN) and self.BEGIN.startswith(begin):
                return []
            if not begin.startswith(self.BEGIN):
                self._state, self._fresh = "answer", False
                return self._answer(self._release())
            self._state, self._held = "thinking", begin[len(self.BEGIN) :]
        thought, found, rest = self._held.partition(self.END)
        if found:
            self._state, self._held = "answer", ""
            deltas = self._thought(thought.rstrip())
            self._fresh = True
            return deltas + self._answer(rest)
        sure, self._held = _sure(self._held, self.END)
        return self._thought(sure)

    def _release(self) -> str:
        held, self._held = self._held, ""
        return held

    def _thought(self, text: str) -> list[Delta]:
        if self._fresh:
            text = text.lstrip()
        self._fresh = self._fresh and not text
        return [{"reasoning_content": text}] if text else []

    def _answer(self, text: str) -> list[Delta]:
        if self._fresh:
            text = text.lstrip()
        self._fresh = self._fresh and not text
        return self._inner.push(text) if text else []

    def end(self, reason: str) -> tuple[list[Delta], str]:
        held = self._release()
        self._fresh = self._fresh and self._state != "start"
        deltas = self._thought(held) if self._state == "thinking" else self._answer(held)
        tail, reason = self._inner.end(reason)
        return deltas + tail, reason


class Calls:
    """Calls of tools between marks, or, where an answer may be nothing but calls, at its beginning.

    tools:  schemas of arguments by the tools' names; what calls another tool stays text
    bare:   whether an answer that begins like JSON is a call
    marks:  how calls begin and end; an end of "" is that of the answer
    """

    BEGIN, END = "<tool_call>", "</tool_call>"

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        bare: bool = False,
        marks: Sequence[tuple[str, str]] = ((BEGIN, END),),
    ) -> None:
        self._tools, self._marks = tools, marks
        self._held = ""
        self._state = "start" if bare else "text"
        self._begin = self._end = ""  # of the call that is read
        self._count = 0

    def push(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        while self._step(deltas):
            pass
        return deltas

    def _step(self, deltas: list[Delta]) -> bool:
        """Goes on as far as what is held allows; whether the state has changed."""
        if self._state == "start":
            begin = self._held.lstrip()
            if begin:
                self._state = "bare" if begin[0] in "{[" and not self._may_begin(begin) else "text"
            return bool(begin)
        if self._state == "text":
            places = [(at, mark) for mark in self._marks if (at := self._held.find(mark[0])) >= 0]
            if places:
                at, (self._begin, self._end) = min(places, key=lambda place: (place[0], -len(place[1][0])))
                before, self._held = self._held[:at], self._held[at + len(self._begin) :]
                self._state = "call"
                if before.strip():
                    deltas.append({"content": before.rstrip()})
                return True
            sure = min((_sure(self._held, begin)[0] for begin, _ in self._marks), key=len)
            self._held = self._held[len(sure) :]
            if sure:
                deltas.append({"content": sure})
            return False
        if self._state == "call" and self._end:
            inside, found, rest = self._held.partition(self._end)
            if not found:
                return False
            self._held, self._state = rest, "text"
            deltas += self._calls(inside) or [{"content": f"{self._begin}{inside}{self._end}"}]
            return True
        return False

    def _may_begin(self, text: str) -> bool:
        """Whether a text is, or may become, a mark."""
        return any(text.startswith(begin) or begin.startswith(text) for begin, _ in self._marks)

    def _calls(self, text: str) -> list[Delta]:
        """The calls that a text makes, none if it is no sound call."""
        deltas: list[Delta] = []
        for name, arguments in calls_in(text, self._tools):
            head = {"index": self._count, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            told = json.dumps(arguments, ensure_ascii=False)
            deltas.append({"tool_calls": [head | {"function": {"name": name, "arguments": ""}}]})
            deltas.append({"tool_calls": [{"index": self._count, "function": {"arguments": told}}]})
            self._count += 1
        return deltas

    def end(self, reason: str) -> tuple[list[Delta], str]:
        held, self._held = self._held, ""
        deltas: list[Delta] = []
        if self._state in ("call", "bare"):
            deltas = self._calls(held)
            if not deltas:
                deltas = [{"content": (self._begin if self._state == "call" else "") + held}]
        elif held and (not self._count or held.strip()):
            deltas = [{"content": held}]
        return deltas, "tool_calls" if self._count and reason == "stop" else reason


def _sure(text: str, mark: str) -> tuple[str, str]:
    """A text, cut before what may become the mark and the white space in front of that."""
    sure = text[: len(text) - overlap(text, mark)].rstrip()
    return sure, text[len(sure) :]
