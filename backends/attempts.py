"""What is being tried at this moment, written down, so that who dies of it is not followed by the next.

A library of another backend, or its driver, may end the process that tries it; the note then outlives its writer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from edgert import ending
from edgert.devices import probe
from edgert.errors import BackendUnavailableError
from edgert.notes import Notes

FATAL = "the process that tried it last ended in the middle of it: test it in a process of its own with `edgert doctor`"


@contextmanager
def noted(backend: str, choice: str, *, once: bool = False) -> Iterator[None]:
    """Says to others, while it lasts, that a backend is tried for a choice; the cpu backend ends no process.

    once:  whoever was warned may try it again the next time

    Raises: BackendUnavailableError when the last who tried it is gone without having ended it.
    """
    if backend == "cpu":
        yield
        return
    notes, key = Notes("attempts"), f"{backend} {choice}"
    found = notes.get(key)
    if type(found) is int and found != os.getpid() and not probe.runs(found):
        if once:
            notes.put(key, None)
        raise BackendUnavailableError(FATAL)
    notes.put(key, os.getpid())
    try:
        with ending.current().calls(lambda: notes.put(key, None)):  # whose process may end before a library returns
            yield
    finally:
        notes.put(key, None)
