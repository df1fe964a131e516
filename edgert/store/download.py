"""Brings one file from a URL: it resumes, checks, and never shows a partial file under the final name."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from edgert.errors import EdgertError
from edgert.files import replace

CHUNK = 1 << 18
RETRIES = 5  # attempts in a row that bring no new byte
CALLS = 2  # attempts in a row at a server that has not answered yet
CONNECT_SECONDS = 5.0  # for a connection to be there; what comes over it may take longer
Opener = Callable[[str, Mapping[str, str]], Any]


class DownloadError(EdgertError):
    """A file could not be fetched whole and unchanged; what arrived so far is kept for the next try."""


class _Again(Exception):
    """This attempt failed in a way that another may not.

    wait:      what the server asked for, in seconds
    answered:  whether there was a server at all
    """

    def __init__(self, reason: str, wait: float = 0.0, *, answered: bool = True) -> None:
        super().__init__(reason)
        self.wait = wait
        self.answered = answered


def sha256_of(path: Path) -> str:
    """The hex digest of a file's bytes."""
    import hashlib

    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_space(folder: Path, needed: int) -> None:
    """Raises: DownloadError when the disk of the folder has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"The download needs {needed / 1e6:.0f} MB and {folder} has {free / 1e6:.0f} MB free: "
            "make room, or set EDGERT_MODELS to a folder on a larger disk."
        )


@contextlib.contextmanager
def exclusive(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds a lock file while the block runs; a second process waits. The system frees it when one dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if waiting:
            waiting()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def fetch(
    url: str,
    target: Path,
    *,
    open_url: Opener,
    sha256: str = "",
    size: int = 0,
    progress: Callable[[int, int], None] | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Path:
    """Downloads to `target`, from where an earlier attempt stopped.

    Bytes arrive in `target.part`, with what the server said about them in `target.part.json`; only a whole
    file with the right digest is renamed to `target`.

    sha256:    hex digest the file must have; "" checks the length alone
    size:      bytes, where known beforehand; 0: unknown
    progress:  called with (bytes present, bytes in all or 0)

    Raises: DownloadError
    """
    part = target.with_name(target.name + ".part")
    notes = part.with_name(part.name + ".json")
    failed = spoilt = 0
    answered = False
    while True:
        before = _size(part)
        try:
            resumed = _attempt(url, part, notes, open_url, sha256, size, progress)
            if sha256 and sha256_of(part) != sha256:
                part.unlink()
                notes.unlink(missing_ok=True)
                spoilt += not resumed
                if spoilt >= 2:
                    raise DownloadError(
                        f"{_name(url)} arrived whole twice with another sha256 than its index states: "
                        "the server or something on the way alters it; try another network or index."
                    )
                continue
            break
        except _Again as error:
            failed = 0 if _size(part) > before else failed + 1
            answered = answered or error.answered
            if failed >= (RETRIES if answered else CALLS):
                raise DownloadError(
                    f"{_name(url)} could not be fetched ({error}); {_size(part) / 1e6:.1f} MB are kept: "
                    "check the connection and give the same command again."
                ) from error
            pause(max(error.wait, min(30.0, 0.5 * 2**failed) * random.uniform(0.5, 1.0)))
    replace(part, target)
    notes.unlink(missing_ok=True)
    return target


def _attempt(
    url: str,
    part: Path,
    notes: Path,
    open_url: Opener,
    sha256: str,
    size: int,
    progress: Callable[[int, int], None] | None,
) -> bool:
    """Receives what is missing of `part`; true when it continued an earlier file.

    Raises: _Again, DownloadError
    """
    have = _size(part)
    seen = _read_notes(notes)
    validator = seen.get("etag") or seen.get("last_modified") or ""
    if have and not (validator or sha256):
        have = 0  # nothing would tell a changed file from the same one
    if size and have > size:
        have = 0
    if size and have == size and sha256:
        return True
    response = _ask(url, part, have, validator, open_url, sha256)
    if response is None:
        return True
    with response:
        have, total = _extent(response, part, have, seen)
        total = total or size
        if size and total != size:
            part.unlink(missing_ok=True)
            raise _Again(f"the server offers {total} bytes where its index states {size}")
        if total:
            check_space(part.parent, total - have)
        if not have:
            etag = response.headers.get("ETag") or ""
            strong = etag if not etag.startswith("W/") else ""  # RFC 9110: If-Range takes strong ones only
            modified = response.headers.get("Last-Modified") or ""
            _write_notes(notes, {"etag": strong, "last_modified": modified, "total": total})
        _receive(response, part, have, total, progress)
    return have > 0


def _ask(url: str, part: Path, have: int, validator: str, open_url: Opener, sha256: str) -> Any:
    """The server's answer to a request for what comes after `have` bytes; None: there is nothing more.

    validator:  what the server said to know the same file by: if it is another one now, all of it comes

    Raises: _Again, DownloadError
    """
    import http.client
    import urllib.error

    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if validator:
            headers["If-Range"] = validator
    try:
        return open_url(url, headers)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and have:
                there = re.fullmatch(r"bytes \*/(\d+)", error.headers.get("Content-Range", ""))
                if there and int(there[1]) == have and sha256:
                    return None
                part.unlink(missing_ok=True)
                raise _Again("the server has less than was received before") from error
            if error.code in (408, 425, 429) or error.code >= 500:
                after = error.headers.get("Retry-After", "")
                wait = min(60.0, float(after)) if after.isdigit() else 0.0
                raise _Again(f"the server answered {error.code} {error.reason}", wait) from error
            raise DownloadError(
                f"{_name(url)} could not be fetched: the server answered {error.code} {error.reason}."
            ) from error
    except (OSError, http.client.HTTPException) as error:
        raise _Again(str(getattr(error, "reason", error)) or type(error).__name__, answered=False) from error


def _extent(response: Any, part: Path, have: int, seen: Mapping[str, Any]) -> tuple[int, int]:
    """(where an answer's bytes begin: at `have` or at 0, the file's length or 0).

    seen:  what the server said about the file before

    Raises: _Again when the answer does not continue that file.
    """
    if have and response.status == 206:
        etag = response.headers.get("ETag") or ""
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
        if (
            not span
            or int(span[1]) != have
            or (etag and seen.get("etag") and etag != seen["etag"])
            or (span[2] != "*" and seen.get("total") and int(span[2]) != seen["total"])
        ):
            part.unlink(missing_ok=True)
            raise _Again("the server's answer did not continue the file that was begun")
        return have, int(span[2]) if span[2] != "*" else 0
    if response.status in (200, None):  # None: a file: URL
        return 0, int(response.headers.get("Content-Length") or 0)
    raise _Again(f"the server answered {response.status} to a plain request")


def _receive(response: Any, part: Path, have: int, total: int, progress: Callable[[int, int], None] | None) -> None:
    """Writes what comes behind the first `have` bytes. Raises: _Again unless all of `total` (0: unknown) came."""
    import http.client

    with _open_part(part, have) as file:
        if progress:
            progress(have, total)
        while True:
            try:
                block = response.read1(CHUNK) if hasattr(response, "read1") else response.read(CHUNK)
            except (OSError, http.client.HTTPException) as error:
                raise _Again(f"the connection was cut after {have} bytes") from error
            if not block:
                break
            have += len(block)
            if total and have > total:
                file.truncate(0)
                raise _Again(f"more than the stated {total} bytes arrived")
            _write(file, block, part)
            if progress:
                progress(have, total)
    if total and have < total:
        raise _Again(f"the connection was cut after {have} of {total} bytes")


def _open_part(part: Path, have: int) -> IO[bytes]:
    try:
        file = open(part, "r+b" if have else "wb", buffering=0)  # noqa: SIM115, the caller closes it
        file.seek(have)
        return file
    except OSError as error:
        raise DownloadError(f"{part} cannot be written: {error.strerror}.") from error


def _write(file: IO[bytes], block: bytes, part: Path) -> None:
    """Writes the whole block; a raw file may take less at a time."""
    view = memoryview(block)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        raise DownloadError(
            f"{part} cannot be written: {error.strerror}; make room or set EDGERT_MODELS to another folder."
        ) from error


def _read_notes(path: Path) -> dict[str, Any]:
    try:
        notes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _write_notes(path: Path, notes: dict[str, Any]) -> None:
    new = path.with_name(path.name + ".new")
    try:
        new.write_text(json.dumps(notes), encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        raise DownloadError(f"{path} cannot be written: {error.strerror}.") from error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _name(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2] or url
