"""Where a text that has more tokens than anybody can use stops being encoded.

A prompt that is longer than the context is refused with its count. The count is exact where it is had soon; of
megabytes it would take seconds, in which others wait for the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from edgert.errors import ContextFullError

PATIENCE = 200_000  # words and steps of joining in which all tokens are counted: about half a second

LONG = 2_000_000  # characters of a text that its length alone may refuse: to cut it into words keeps the interpreter

_CURRENT: ContextVar[Limit | None] = ContextVar("limit", default=None)


class Limit:
    """So many tokens are of use; who is known to have more is refused once the patience is over.

    It is work that ends it, not time: the same text has the same answer on a busy machine.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._left = PATIENCE

    def refuse(self, least: int) -> None:
        """Says that a text of megabytes has so many tokens at least, before any of it is read.

        Raises: ContextFullError when these are too many.
        """
        if least > self.most:
            raise ContextFullError(least, self.most, whole=False)

    def check(self, work: int, least: int) -> None:
        """Says that `work` more is to be done, and that there are so many tokens at least.

        Raises: ContextFullError when these are too many, after much work.
        """
        self._left -= work
        if least > self.most and self._left < 0:
            raise ContextFullError(least, self.most, whole=False)


@contextmanager
def at_most(n_tokens: int) -> Iterator[None]:
    """What is encoded within, in threads that begin there too, has so many tokens at most or is refused as above.

    Whether it has remains to be checked: of texts of less work all tokens are told.
    """
    token = _CURRENT.set(Limit(n_tokens))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> Limit | None:
    """The limit that holds here."""
    return _CURRENT.get()
