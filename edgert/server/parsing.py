"""What a model writes, told apart: text, thoughts, calls of tools."""

from __future__ import annotations

from typing import Any, Protocol

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
