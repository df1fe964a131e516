"""What one rendering of a template may use of time and memory, and has used.

Time is checked in every loop, macro, call and filter. Every text, list or number that an expression makes is
measured before it is made where it could be large, and charged to the render's account. That needs no signal
and no process, so it works in any thread on any system.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic, thread_time
from typing import Any

SECONDS = 1.0
OWN = 0.25  # of the time that a render must have computed itself: a busy machine's pauses are none of its
LONGEST = 1 << 20  # characters of one text, elements of one list; grows with the input
ACCOUNT = 64 << 20  # bytes of everything that a render makes; grows with the input
_DEEPEST = 64  # lists within lists
_ELEMENT = 8  # what an element weighs beside its characters
_MOST_BITS = 1 << 14
WIDEST = 1000  # digits or columns that a format may ask for

_NUMBER = re.compile(r"\d+")


class LimitError(Exception):
    """A template used more time or memory than a chat template needs."""


class Meter:
    """What one render may still use.

    given:   characters that come in, which larger outputs are fair for
    unseen:  a character that tojson keeps as it is
    """

    def __init__(self, given: int = 0, unseen: str = "", seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._deadline = monotonic() + seconds
        self._own_deadline = thread_time() + OWN * seconds
        self._longest = LONGEST + 4 * given
        self._left = ACCOUNT + 64 * given
        self.unseen = unseen

    def tick(self) -> None:
        if monotonic() > self._deadline and thread_time() > self._own_deadline:
            raise LimitError(f"it ran for more than {self._seconds:g} s")

    def check(self, length: int) -> None:
        """Refuses a text or list of that length before it is made."""
        if length > self._longest:
            raise LimitError(f"it makes a text or list longer than {self._longest:,}")

    def made(self, value: Any) -> Any:
        """Charges a new value to the account."""
        self.tick()
        if isinstance(value, str):
            self.check(len(value))
            self._charge(sys.getsizeof(value))
        elif isinstance(value, list | tuple | dict | set | frozenset):
            self._charge(64 * len(value))
            self.check(self.weigh(value))
        elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise LimitError("it makes a huge number")
        return value

    def reserve(self, elements: int) -> None:
        """Refuses a list of small texts before it is made."""
        self.check(elements * (_ELEMENT + 1))
        if 64 * elements > self._left:
            raise LimitError("it uses too much memory")

    def _charge(self, n_bytes: int) -> None:
        self._left -= n_bytes
        if self._left < 0:
            raise LimitError("it uses too much memory")

    def weigh(self, value: Any, depth: int = 0) -> int:
        """Characters of a value with all that it holds, as often as it holds it; a number counts as some."""
        if isinstance(value, str):
            return len(value) + _ELEMENT
        if isinstance(value, Mapping):
            items: Iterable[Any] = (part for item in value.items() for part in item)
        elif isinstance(value, list | tuple | set | frozenset):
            items = value
        else:
            return _ELEMENT
        if depth > _DEEPEST:
            raise LimitError("it nests lists too deeply")
        total = _ELEMENT
        for item in items:
            total += self.weigh(item, depth + 1)
            if total > self._longest:
                break
        return total


_METER: ContextVar[Meter] = ContextVar("meter")


def current() -> Meter:
    """The meter of the render that runs."""
    return _METER.get()


@contextmanager
def metered(meter: Meter) -> Iterator[Meter]:
    """Everything inside is measured by this meter."""
    token = _METER.set(meter)
    try:
        yield meter
    finally:
        _METER.reset(token)


def check_bits(bits: int) -> None:
    """Refuses an integer of so many bits before it is made. Raises: LimitError, as the next three."""
    if bits > _MOST_BITS:
        raise LimitError("it makes a huge number")


def check_format(text: str, mark: str, args: Any) -> None:
    """Formats may be wide by what they ask for and by how often they name an argument."""
    if "*" in text or re.search(r"\{[^{}]*\{", text) or any(int(width[:9]) > WIDEST for width in _NUMBER.findall(text)):
        raise LimitError("it formats with an unusual width")
    meter = current()
    meter.check(len(text) + text.count(mark) * (WIDEST * 2 + meter.weigh(args) * 10 if mark in text else 0))


def check_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    """Refuses a text that grows too long by replacing."""
    text, old, new = str(text), str(old), str(new)
    current().check(len(text) + (text.count(old) * (len(new) - len(old)) if len(new) > len(old) else 0))


def check_split(text: str, separator: Any) -> None:
    """Refuses a text that falls into too many pieces; separator: no text, or empty, stands for white space."""
    meter = current()
    if isinstance(separator, str) and separator:
        meter.reserve(text.count(separator) + 1)
    else:
        meter.reserve(len(text) // 2 + 1 if len(text) > LONGEST >> 2 else 0)
