"""The end of work that is not done: told to whoever does it, or not waited for where it cannot be told."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Never, ParamSpec, TypeVar
from weakref import WeakSet

# `process_group` of a child whose end its parent decides: Ctrl+C in a terminal goes to all of the parent's group.
OWN_GROUP = None if sys.platform == "win32" else 0
LOOK_SECONDS = 0.1  # between two looks of a child at its parent

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Stopped(BaseException):
    """Work has ended because it was told to: no error, after which something else would be tried."""


class Stop:
    """Tells work to end, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = False
        self._ends: list[Callable[[], object]] = []

    def tell(self) -> None:
        """Ends the work at its next look, and at once what it waits for."""
        with self._lock:
            self._told, ends = True, list(self._ends)
        for end in ends:
            end()

    def check(self) -> None:
        """A look at whether the work shall end. Raises: Stopped."""
        if self._told:
            raise Stopped

    @contextlib.contextmanager
    def calls(self, end: Callable[[], object]) -> Iterator[None]:
        """While the block runs, `tell` calls `end`, which ends what the block waits for. Raises: Stopped."""
        with self._lock:
            self.check()
            self._ends.append(end)
        try:
            yield
        finally:
            with self._lock:
                self._ends.remove(end)

    def over(self, call: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result:
        """What a call returns, in which `current` is this one."""
        token = _CURRENT.set(self)
        try:
            return call(*given, **named)
        finally:
            _CURRENT.reset(token)


_NOBODYS = Stop()  # of work that nobody tells to end: in a main thread Ctrl+C does
_CURRENT: ContextVar[Stop] = ContextVar("stop", default=_NOBODYS)


def current() -> Stop:
    """What would tell the work of this thread to end."""
    return _CURRENT.get()


def check() -> None:
    """A look, between two parts of a long work, at whether it shall end. Raises: Stopped."""
    _CURRENT.get().check()


_threads: WeakSet[threading.Thread] = WeakSet()


def begin(work: Callable[[], object], name: str) -> threading.Thread:
    """A thread for what may take long and cannot be told to end: neither Python nor `leave` waits for it."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def leave(code: int) -> Never:
    """Ends the program. Where threads of `begin` still work it ends as it is, because Python would take from under
    them what they use."""
    if any(thread.is_alive() for thread in _threads):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def with_parent() -> None:
    """Lets this process, a child that works for its parent alone, end when that has ended, in whatever way."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=look, name="edgert-parent", daemon=True).start()
