"""Files that hold a conversation with what the backend has cached of it, so that it goes on without being read again.

    8 bytes   magic
    8 bytes   length of the header, little-endian
    header    JSON: format, edgert's version, transcript, number of tokens, facts of the backend, bytes of each part
    tokens    int32
    data      the backend's packed keys and values
    32 bytes  SHA-256 of all before

Everything is checked before anything of it is used.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import stat
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.devices import probe
from edgert.errors import RequestError, SessionError

MAGIC = b"EDGERTkv"
FORMAT = 1
MOST_HEADER = 64 << 20  # bytes
SHORTEST = 48  # bytes of magic, length and checksum
UNFINISHED_SECONDS = 3600  # after which nobody writes to a file any more


@dataclass(frozen=True)
class Session:
    """What a file holds.

    tokens:      int32 (n,), evaluated in this order
    transcript:  what the program that saved it wishes to have back
    facts:       what the backend says of the data, as JSON can hold it
    data:        uint8 (n_bytes,)
    """

    tokens: NDArray[np.int32]
    transcript: Mapping[str, Any]
    facts: Mapping[str, Any]
    data: NDArray[np.uint8]


def write(
    path: Path,
    tokens: NDArray[np.int32],
    transcript: Mapping[str, Any],
    facts: Mapping[str, Any],
    chunks: Sequence[NDArray[np.uint8]],
) -> None:
    """Writes a session; an older file of the name stays whole until the new one is.

    Raises: SessionError when it cannot be written; RequestError for a transcript that JSON cannot hold.
    """
    from edgert.files import replace

    try:
        edgert_version = version("edgert")
    except PackageNotFoundError:
        edgert_version = ""
    header = {
        "format": FORMAT,
        "edgert": edgert_version,
        "transcript": dict(transcript),
        "n_tokens": len(tokens),
        "facts": dict(facts),
        "n_bytes": sum(chunk.nbytes for chunk in chunks),
    }
    try:
        text = json.dumps(header).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError("transcript", f"must be what JSON can hold: {error}") from error
    part: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _forget_unfinished(path)
        # a name of its own: nobody else writes to it, and it is no link to somewhere
        number, name = tempfile.mkstemp(".part", f"{path.name}.", path.parent)
        part = Path(name)
        digest = hashlib.sha256()
        with open(number, "wb") as file:  # for the user alone to read
            pieces: list[bytes] = [MAGIC, struct.pack("<Q", len(text)), text, tokens.astype("<i4").tobytes()]
            for piece in (*pieces, *(chunk.tobytes() for chunk in chunks)):
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())
        replace(part, path)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise SessionError(f"{path} cannot be written ({getattr(error, 'strerror', None) or error}).") from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def _forget_unfinished(path: Path) -> None:
    """Removes what a process left that was killed while it wrote a session of this name."""
    for part in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > UNFINISHED_SECONDS:
                part.unlink()


def read(path: Path) -> Session:
    """Reads what `write` wrote. Raises: SessionError when a byte of it is not as it was."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            return _parse(path, _checked(path, file))
    except (OSError, ValueError) as error:
        raise SessionError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    except MemoryError as error:
        raise SessionError(f"{path} is larger than the memory that is left.") from error


def _open_at_once(path: str, flags: int) -> int:
    """Does not wait for who may write to a pipe of that name."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _checked(path: Path, file: BufferedReader) -> NDArray[np.uint8]:
    """All bytes but the checksum, which is right."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise SessionError(f"{path} is no file.")
    size = status.st_size
    start = file.read(16)
    if not start.startswith(MAGIC):
        raise SessionError(f"{path} is not a session that edgert saved.")
    if size < SHORTEST or struct.unpack("<Q", start[8:])[0] > min(MOST_HEADER, size - SHORTEST):
        raise _damaged(path)
    available = probe.probe().memory_available
    if size > available:
        raise SessionError(f"{path} has {size >> 20} MiB, and {available >> 20} MiB of memory are available.")
    content = np.empty(size - 32, np.uint8)
    content[:16] = np.frombuffer(start, np.uint8)
    if file.readinto(content[16:].data) != size - 48:
        raise _damaged(path)
    if hashlib.sha256(content.data).digest() != file.read():
        raise _damaged(path)
    return content


def _parse(path: Path, content: NDArray[np.uint8]) -> Session:
    n_header = int.from_bytes(content[8:16].tobytes(), "little")
    try:
        header = json.loads(content[16 : 16 + n_header].tobytes())
        if header["format"] != FORMAT:
            raise SessionError(f"{path} has the session format {header['format']!r}; this edgert reads {FORMAT}.")
        n_tokens, n_bytes = int(header["n_tokens"]), int(header["n_bytes"])
        transcript, facts = dict(header["transcript"]), dict(header["facts"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _damaged(path) from error
    start = 16 + n_header
    if n_tokens < 0 or n_bytes < 0 or start + 4 * n_tokens + n_bytes != len(content):
        raise _damaged(path)
    tokens = np.frombuffer(content, "<i4", n_tokens, start).astype(np.int32)
    return Session(tokens, transcript, facts, content[start + 4 * n_tokens :])


def _damaged(path: Path) -> SessionError:
    return SessionError(f"{path} is damaged: save the session again.")
