"""Where a text that has more tokens than anybody can use stops being encoded.

A prompt that is longer than the context is refused with its count. The count is exact where it is had soon; of
megabytes it would take seconds, in which others wait for the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter

from edgert.errors import ContextFullError

PATIENCE = 0.5  # seconds in which all tokens are counted

_CURRENT: ContextVar[Limit | None] = ContextVar("limit", default=None)


class Limit:
    """So many tokens are of use; who is known to have more is refused once the patience is over.

    end:  when that is
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.end = perf_counter() + PATIENCE

    def check(self, least: int) -> None:
        """Raises: ContextFullError when so many tokens, which there are at least, are too many, and time is over."""
        if least > self.most and perf_counter() > self.end:
            raise ContextFullError(least, self.most, whole=False)


@contextmanager
def at_most(n_tokens: int) -> Iterator[None]:
    """What is encoded within, in threads that begin there too, has so many tokens at most or is refused as above.

    Whether it has remains to be checked: of texts that are encoded in time all tokens are told.
    """
    token = _CURRENT.set(Limit(n_tokens))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> Limit | None:
    """The limit that holds here."""
    return _CURRENT.get()
