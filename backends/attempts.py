"""What is being tried at this moment, written down, so that who dies of it is not followed by the next.

A library of another backend, or its driver, may end the process that tries it; the note then outlives its writer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from edgert.devices import probe
from edgert.devices.notes import Notes

FATAL = "the process that tried it last ended in the middle of it: test it in a process of its own with `edgert doctor`"


@contextmanager
def noted(key: str) -> Iterator[None]:
    """While it lasts, others read that this process tries something."""
    notes = Notes("attempts")
    notes.put(key, os.getpid())
    try:
        yield
    finally:
        notes.put(key, None)


def was_fatal(key: str) -> bool:
    """Whether the last who tried it is gone without having ended it; said once, so that who insists may try again."""
    notes = Notes("attempts")
    found = notes.get(key)
    if type(found) is not int or found == os.getpid() or probe.runs(found):
        return False
    notes.put(key, None)
    return True
