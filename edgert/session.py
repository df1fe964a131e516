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

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import SessionError

MAGIC = b"EDGERTkv"
FORMAT = 1
MOST_HEADER = 64 << 20  # bytes


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
    """Writes a session; an older file of the name stays whole until the new one is."""
    from edgert.download import replace

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
    text = json.dumps(header, ensure_ascii=False).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    digest = hashlib.sha256()
    try:
        with open(part, "wb") as file:
            os.chmod(part, 0o600)  # what was said is the user's own
            pieces: list[bytes] = [MAGIC, struct.pack("<Q", len(text)), text, tokens.astype("<i4").tobytes()]
            for piece in (*pieces, *(chunk.tobytes() for chunk in chunks)):
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())
        replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SessionError(f"{path} cannot be written ({error.strerror}).") from error


def read(path: Path) -> Session:
    """Reads what `write` wrote. Raises: SessionError when a byte of it is not as it was."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SessionError(f"{path} cannot be read ({error.strerror}).") from error
    damaged = SessionError(f"{path} is damaged: save the session again.")
    if not content.startswith(MAGIC):
        raise SessionError(f"{path} is not a session that edgert saved.")
    if len(content) < 48 or hashlib.sha256(memoryview(content)[:-32]).digest() != content[-32:]:
        raise damaged
    (n_header,) = struct.unpack("<Q", content[8:16])
    if n_header > min(MOST_HEADER, len(content) - 48):
        raise damaged
    try:
        header = json.loads(content[16 : 16 + n_header])
        if header["format"] != FORMAT:
            raise SessionError(f"{path} has the session format {header['format']}; this edgert reads {FORMAT}.")
        n_tokens, n_bytes = int(header["n_tokens"]), int(header["n_bytes"])
        transcript, facts = dict(header["transcript"]), dict(header["facts"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged from error
    start = 16 + n_header
    if n_tokens < 0 or n_bytes < 0 or start + 4 * n_tokens + n_bytes + 32 != len(content):
        raise damaged
    tokens = np.frombuffer(content, "<i4", n_tokens, start).astype(np.int32)
    return Session(tokens, transcript, facts, np.frombuffer(content, np.uint8, n_bytes, start + 4 * n_tokens))
