"""Packed weights kept on disk, so that a large model starts without reading and packing its file again.

A copy is keyed by the file (path, size, time of the last change), by what decides the layout, and by the sources of
the kernels that packed it; it says its key, is written beside and renamed, and its content is checked whenever it is
mapped. EDGERT_PACKED_CACHE says how much all copies may take ("40G"), or "off".
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert import ending
from edgert.backends.cpu import compiler
from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.memory import ALIGNMENT
from edgert.backends.cpu.team import Team
from edgert.ending import Stop, Stopped
from edgert.errors import RequestError
from edgert.files import PART, whole, write_all
from edgert.folders import cache_root

logger = logging.getLogger(__name__)

SETTING = "EDGERT_PACKED_CACHE"
LIMIT = 64 << 30  # bytes of all copies, where the setting does not say
RESERVE = 2 << 30  # bytes of the disk that copies leave free
WORTHWHILE = 512 << 20  # bytes of a file from which on a copy saves 0.2 s, which one begins to notice
PIECE = 1 << 20  # bytes that have a digest of their own
LOOK = 64 * PIECE  # bytes read or written between two looks at whether that shall end
KERNELS = ("digest",)
_MAGIC = b"edgert packed 1\n"
_SUFFIX = ".packed"


def folder() -> Path:
    """Where the copies lie."""
    return cache_root() / "packed"


def limit() -> int:
    """Bytes that all copies may take; 0: none are made or read.

    Raises: RequestError for a setting that is no size.
    """
    text = os.environ.get(SETTING, "").strip()
    if not text:
        return LIMIT
    if text.lower() in ("off", "no", "false"):
        return 0
    number, unit = (text[:-1], text[-1].upper()) if text[-1].upper() in "KMGT" else (text, "")
    try:
        size = float(number) * 1024 ** " KMGT".index(unit or " ")
    except ValueError:
        size = -1.0
    if not (math.isfinite(size) and size >= 0):
        raise RequestError(SETTING, f"is {text!r}, which is no size: say how much, such as 40G, or off")
    return int(size)


@dataclass(frozen=True)
class Held:
    """A copy on disk.

    sources:  the model's files, each with its size and time of change (ns)
    n_bytes:  of the copy
    used:     when it was last mapped or written (seconds)
    """

    path: Path
    sources: tuple[tuple[str, int, int], ...]
    n_bytes: int
    used: float

    @property
    def is_stale(self) -> bool:
        """Whether a file of the model is gone or has changed."""
        return any(_identity(Path(path)) != (path, size, changed) for path, size, changed in self.sources)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


def held() -> list[Held]:
    """All copies, those first that were used last; files that are none are left out."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder().glob("*" + _SUFFIX):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                facts, _ = _read_header(path)
                status = path.stat()
                found.append(Held(path, _key(facts).sources, status.st_size, status.st_mtime))
    return sorted(found, key=lambda one: -one.used)


def forget(paths: Iterable[Path]) -> int:
    """Removes the copies of a model's files: bytes."""
    gone = {os.path.realpath(path) for path in paths}
    copies = [one for one in held() if gone & {path for path, _, _ in one.sources}]
    for one in copies:
        one.remove()
    return sum(one.n_bytes for one in copies)


def _identity(path: Path) -> tuple[str, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    # A file that took another's place can have its size and its time (cp -p), but was itself made later.
    return os.path.realpath(path), status.st_size, max(status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True)
class Key:
    """What a copy is of: the model's files, and what decides how it is packed."""

    sources: tuple[tuple[str, int, int], ...]
    layout: str

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(repr((self.sources, self.layout)).encode()).hexdigest()[:32]
        return folder() / (digest + _SUFFIX)


def _key(facts: dict[str, Any]) -> Key:
    """The key that a header states. Raises: ValueError, KeyError, TypeError."""
    sources = tuple((str(path), int(size), int(changed)) for path, size, changed in facts["sources"])
    return Key(sources, str(facts["layout"]))


def is_worthwhile(paths: Sequence[Path]) -> bool:
    """Whether a copy is to be kept of a model: it takes long to pack, and copies are not turned off."""
    sources = [_identity(path) for path in paths]
    return limit() > 0 and all(sources) and sum(source[1] for source in sources if source) >= WORTHWHILE


def key(paths: Sequence[Path], isa: Isa) -> Key | None:
    """The key of a model's copy; None where there is to be none."""
    if not is_worthwhile(paths):
        return None
    known = tuple(source for source in map(_identity, paths) if source)
    layout = f"{isa.lanes} {isa.dot == 'vnni'} {compiler.sources('repack')} {compiler.sources('digest')}"
    return Key(known, layout)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The facts in a copy's header, and where its data begins. Raises: ValueError, OSError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("no file")
    with path.open("rb") as file:
        start = file.read(len(_MAGIC) + 8 + 32)
        magic, size, digest = start[: len(_MAGIC)], start[len(_MAGIC) : len(_MAGIC) + 8], start[len(_MAGIC) + 8 :]
        n = int.from_bytes(size, "little")
        if magic != _MAGIC or len(digest) < 32 or n > os.fstat(file.fileno()).st_size:
            raise ValueError("no copy")
        text = file.read(n)
    if hashlib.sha256(text).digest() != digest:
        raise ValueError("damaged header")
    return json.loads(text), _aligned(len(start) + n)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _digests(data: NDArray[np.uint8], isa: Isa, team: Team | None = None) -> NDArray[np.int64]:
    """The digest of each PIECE of bytes, whose number is a multiple of 64."""
    out = np.empty(-(-len(data) // PIECE), np.int64)
    address = compiler.addresses(KERNELS, isa)["digest"]
    for start in range(0, len(data), LOOK):
        ending.check()
        part, digests = data[start : start + LOOK], out[start // PIECE :]
        arguments = np.array([part.ctypes.data, len(part), PIECE, digests.ctypes.data], np.int64)
        if team:
            team.run(np.array([[address, arguments.ctypes.data, 1]], np.int64))
        else:
            compiler.Kernel(address)(0, 1, arguments.ctypes.data)
    return out


class Copy:
    """A mapped copy: pieces of packed weights by label. What is written to them stays in this process."""

    def __init__(self, data: NDArray[np.uint8], places: dict[str, tuple[int, int]]) -> None:
        self._data, self._places = data, places

    def take(self, label: str, n_bytes: int) -> NDArray[np.uint8] | None:
        """The piece of that label and size; None where the copy lacks it."""
        start, size = self._places.get(label, (0, -1))
        return self._data[start : start + size] if size == n_bytes else None


def find(key: Key, isa: Isa, team: Team) -> Copy | None:
    """Maps a model's copy; one that is damaged is removed."""
    try:
        facts, start = _read_header(key.path)
        if _key(facts) != key:
            raise ValueError("of another model")
        data = np.memmap(key.path, np.uint8, "c", start, (facts["n_bytes"],))
        places = {label: (int(at), int(size)) for label, (at, size) in facts["places"].items()}
        sound = all(at >= 0 and at % 64 == 0 and at + size <= len(data) for at, size in places.values())
        if not sound or _digests(data, isa, team).tolist() != facts["digests"]:
            raise ValueError("damaged")
        with contextlib.suppress(OSError):  # another user's, or on a disk that cannot be written
            os.utime(key.path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("The packed copy %s is damaged (%s) and is made again.", key.path, error)
        with contextlib.suppress(OSError):
            key.path.unlink()
        return None
    return Copy(np.asarray(data), places)


class Keeper:
    """Writes a copy of what was packed, in a thread of its own that gives way to all others."""

    def __init__(self, key: Key, isa: Isa, made: Sequence[tuple[str, NDArray[np.uint8]]]) -> None:
        self._key, self._isa, self._made = key, isa, made
        self._stop = Stop()
        self._thread = threading.Thread(target=self._run, name="edgert-packed-copy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Gives up what is not written, and waits until the thread has ended."""
        self._stop.tell()
        self._thread.join()

    def wait(self) -> None:
        """Waits until the copy is there, or could not be made."""
        self._thread.join()

    def _run(self) -> None:
        if hasattr(os, "setpriority"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            self._write()
        except Stopped:
            pass
        except OSError as error:
            logger.info("No packed copy is kept of %s: %s.", self._key.sources[0][0], error.strerror or error)
        finally:
            self._made = ()

    def _write(self) -> None:
        places, at = {}, 0
        for label, data in self._made:
            places[label] = (at, len(data))
            at += len(data) + 63 & ~63
        n_bytes = at
        path = self._key.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not make_room(n_bytes):
            logger.info("No packed copy is kept of %s: %s bytes are too many.", self._key.sources[0][0], n_bytes)
            return
        with whole(path) as file:
            n_digests = -(-n_bytes // PIECE)
            # The header is written last; its digests take at most 21 characters each.
            start = _aligned(4096 + 22 * n_digests + len(json.dumps([places, self._key.sources])))
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, start + n_bytes)
            digests: list[int] = []
            piece = np.zeros(PIECE, np.uint8)
            filled = 0
            file.seek(start)
            for data in self._padded():
                taken = 0
                while taken < len(data):
                    self._stop.check()
                    n = min(PIECE - filled, len(data) - taken)
                    piece[filled : filled + n] = data[taken : taken + n]
                    filled, taken = filled + n, taken + n
                    if filled == PIECE:
                        digests += _digests(piece, self._isa).tolist()
                        write_all(file, piece.data)
                        filled = 0
                        if not len(digests) * PIECE % LOOK:
                            os.fsync(file.fileno())  # of all at the end it would take long, and cannot be stopped
            if filled:
                digests += _digests(piece[:filled], self._isa).tolist()
                write_all(file, piece[:filled].data)
            facts = {**asdict(self._key), "n_bytes": n_bytes, "places": places, "digests": digests}
            text = json.dumps(facts).encode()
            head = len(_MAGIC) + 8 + 32
            text += b" " * (start - head - len(text))
            file.seek(0)
            digest = hashlib.sha256(text).digest()
            write_all(file, _MAGIC + len(text).to_bytes(8, "little") + digest + text)
            os.fsync(file.fileno())

    def _padded(self) -> Iterable[NDArray[np.uint8]]:
        for _, data in self._made:
            yield data
            if len(data) % 64:
                yield np.zeros(-len(data) % 64, np.uint8)


def make_room(n_bytes: int) -> bool:
    """Removes stale copies, and those unused for longest, until another has room: whether it has."""
    copies = held()
    for one in [one for one in copies if one.is_stale]:
        one.remove()
        copies.remove(one)
    with contextlib.suppress(OSError):
        for part in folder().glob("*" + PART):  # of a process that ended while it wrote
            if part.stat().st_mtime < time.time() - 3600:
                part.unlink()

    def room() -> int:
        free = shutil.disk_usage(folder()).free - RESERVE
        return min(limit() - sum(one.n_bytes for one in copies), free)

    while copies and room() < n_bytes and n_bytes <= limit():
        copies.pop().remove()
    return room() >= n_bytes
