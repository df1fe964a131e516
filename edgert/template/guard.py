"""Control tokens are what a template writes; names of them in the texts that it is given stay text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from edgert.errors import RequestError

_THINKING = re.compile(r"[<\[]/?think(ing)?[>\]]", re.IGNORECASE)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_. -]*")


class Guard:
    """Puts a mark into the names of control tokens in given texts.

    A name is known by its first two characters. A mark goes between them, and behind a last character that
    could begin a name with what the template writes next. Where a text begins with a sign that is the second
    character of names, a mark goes before it. Texts without such places are not touched.
    """

    def __init__(self, control_texts: Collection[str]) -> None:
        seconds: dict[str, set[str]] = {}
        starts: set[str] = set()
        for text in control_texts:
            seconds.setdefault(text[0], set()).update(text[1:2])
            starts.update(c for c in text[1:2] if not c.isalnum() and not c.isspace())
        thinking = "|".join(re.escape(t) for t in control_texts if _THINKING.fullmatch(t))
        places = [
            f"{re.escape(first)}(?=[{re.escape(''.join(sorted(follow)))}]|$(?!\n))"
            for first, follow in sorted(seconds.items())
        ]
        start = f"^(?=[{re.escape(''.join(sorted(starts)))}])" if starts else ""
        self._user = _pattern("|".join(filter(None, [start, *places])))
        self._model = _pattern(f"(?!{thinking})(?:{'|'.join(places)})" if thinking and places else "|".join(places))

    def cut(self, values: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The values with marks in them, and the mark; "" when no text needed one."""
        if self._user is None or not any(map(self._user.search, texts_in(values))):
            return values, ""
        used = "".join(texts_in(values))
        mark = next((c for c in map(chr, range(0x10FFFD, 0x100000, -1)) if c not in used), None)
        if mark is None:
            raise RequestError("messages", "hold every character of Unicode's private planes")
        return self._cut(values, mark, False), mark

    def _cut(self, value: Any, mark: str, model: bool) -> Any:
        if isinstance(value, str):
            pattern = self._model if model else self._user
            return value if pattern is None else pattern.sub(lambda m: m[0] + mark, value)
        if isinstance(value, Mapping):
            model = model or value.get("role") == "assistant"
            return {
                self._cut(key, mark, model): item
                if key == "role" and isinstance(item, str) and _PLAIN_NAME.fullmatch(item)
                else self._cut(item, mark, model)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._cut(item, mark, model) for item in value]
        return value


def _pattern(expression: str) -> re.Pattern[str] | None:
    return re.compile(expression) if expression else None


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a value, those of its names too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_in(key)
            yield from texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)
