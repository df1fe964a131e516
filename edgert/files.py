"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

PART = ".part"  # ends the names of files that are not whole


def replace(source: Path, target: Path) -> None:
    """Puts a finished file in its place so that a power cut leaves the old one or the new one, whole."""
    with open(source, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
    if sys.platform != "win32":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def whole(target: Path) -> Iterator[FileIO]:
    """A file to write, which takes its place when the block ends, and leaves nothing behind when that fails.

    Until then it has no name where the system can do so, and nothing is left of it after a kill either.
    """
    handle, part = _without_name(target.parent), ""
    if handle is None:
        handle, part = tempfile.mkstemp(PART, f"{target.name}.", target.parent)
    try:
        with FileIO(handle, "r+") as file:
            yield file
            if not part:
                part = _named(handle, target)
        os.replace(part, target)
    except BaseException:
        if part:
            with contextlib.suppress(OSError):
                os.unlink(part)
        raise


def _without_name(folder: Path) -> int | None:
    """A file of this folder's disk that goes when it is closed; None where there is no such thing."""
    if sys.platform != "linux" or not os.path.isdir("/proc/self/fd"):
        return None
    with contextlib.suppress(OSError):
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    return None


def _named(handle: int, target: Path) -> str:
    part = f"{target}.{secrets.token_hex(4)}{PART}"
    # A folder to start from, which a whole path does not need, lets Python follow the link to the file.
    os.link(f"/proc/self/fd/{handle}", part, src_dir_fd=handle, follow_symlinks=True)
    return part


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Writes all of some bytes, of which the system takes a part at a time."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
