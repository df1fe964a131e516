"""Writes a GGUF model tensor by tensor; under its final name there is never anything but a whole model.

The bytes go to `NAME.part` beside the target, and a journal `NAME.journal` notes every complete tensor with its
checksum. Only when all is written, synced and read back do the files get their names. Whatever ends the process
before that, a writer with resume=True and the same plan goes on after the last complete tensor.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import DoesNotFitError, EdgertError, ModelFileError
from edgert.quantize.gguf_layout import Part, Slot, TensorPlan, plan
from edgert.quantize.gguf_shard import Shard
from edgert.quantize.gguf_value import Value
from edgert.quantize.target import check_room, check_target

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be deleted or replaced anyway
    fcntl = None  # type: ignore[assignment]

_CHUNK = 1 << 22


class Writer:
    """A model on its way to disk; use it in a `with`, whose clean end gives the file its name.

    path:            the final name; shards are named after it, model-00001-of-00003.gguf
    metadata:        in the order of the file
    tensors:         (name, shape with rows first, format), in the order in which they will be written
    split_max_size:  most bytes of tensors in a file; None: one file
    resume:          go on with what an earlier, interrupted writer of the same plan left behind
    fingerprint:     what the weights are made from and how; a resumed plan must have the same

    Attributes:
        pending:  names of the tensors that are still to be written, in order
        paths:    the final names

    Raises: ModelFileError, DoesNotFitError when the disk is too small.
    """

    def __init__(
        self,
        path: str | Path,
        metadata: Mapping[str, Value],
        tensors: Sequence[TensorPlan],
        *,
        split_max_size: int | None = None,
        resume: bool = False,
        fingerprint: str = "",
    ) -> None:
        self.path = Path(os.path.realpath(path))  # beside the file that a link points to
        self._tensors, self._split_max_size = tensors, split_max_size
        self._metadata = dict(metadata)
        self._parts = plan(self.path, metadata, tensors, split_max_size)
        self.paths = tuple(part.path for part in self._parts)
        self._queue = [(part, slot) for part in self._parts for slot in part.slots]
        self._done = 0  # complete tensors
        self._filled = 0  # bytes of the current tensor
        self._crc = 0
        self._file: IO[bytes] | None = None
        self._file_part: Part | None = None
        check_target(self.path, paths=self.paths)
        digest = hashlib.sha256(fingerprint.encode())
        for part in self._parts:
            digest.update(b"\0" + part.path.name.encode() + b"\0" + part.header)
        with _complaints(self.path):
            self._journal = _Journal(self.path.with_name(self.path.name + ".journal"), digest.hexdigest())
        try:
            whole = resume and self._was_complete()
            if whole:
                self._done = len(self._queue)
            else:
                self._done = self._survivors() if resume else 0
                self._prepare()
        except BaseException:
            if not self._done:
                self._journal.remove()  # there is nothing to go on with
            self.close()
            raise

    @property
    def n_bytes(self) -> int:
        """Bytes of all files when they are whole."""
        return sum(part.n_bytes for part in self._parts)

    @property
    def n_written(self) -> int:
        """Bytes of headers and tensors that are written."""
        headers = sum(len(part.header) for part in self._parts)
        whole = sum(slot.n_bytes + slot.n_padding for _, slot in self._queue[: self._done])
        return headers + whole + self._filled

    @property
    def pending(self) -> list[str]:
        return [slot.name for _, slot in self._queue[self._done :]]

    def write(self, name: str, data: NDArray[np.uint8]) -> None:
        """Appends bytes to a tensor; tensors come in the declared order, each complete before the next.

        Raises: DoesNotFitError when the disk is full (what is complete stays for resume=True); ModelFileError when it
            cannot be written; ValueError for another order or too many bytes.
        """
        if self._done == len(self._queue) or name != self._queue[self._done][1].name:
            raise ValueError(f"{name} is not the next tensor to be written")
        part, slot = self._queue[self._done]
        bytes_ = np.ascontiguousarray(data).reshape(-1).data
        if self._filled + len(bytes_) > slot.n_bytes:
            raise ValueError(f"{name} has {slot.n_bytes} bytes: no room for {len(bytes_)} at {self._filled}")
        self._put(part, slot.offset + self._filled, bytes_)
        self._crc = zlib.crc32(bytes_, self._crc)
        self._filled += len(bytes_)
        if self._filled == slot.n_bytes:
            self._put(part, slot.offset + slot.n_bytes, memoryview(bytes(slot.n_padding)))
            with _complaints(self.path):
                self._journal.add({"tensor": name, "crc32": self._crc})
            self._done, self._filled, self._crc = self._done + 1, 0, 0

    def update(self, metadata: Mapping[str, Value]) -> None:
        """Gives keys of the plan other values of the same length, such as figures measured on what is written.

        Raises: ValueError for a key that the plan lacks, or a value of another length.
        """
        for key, value in metadata.items():
            old = self._metadata.get(key)
            if old is None or (old.kind, len(old.data)) != (value.kind, len(value.data)):
                raise ValueError(f"{key} has no place in the header for this value")
        self._metadata |= metadata
        self._parts = plan(self.path, self._metadata, self._tensors, self._split_max_size)
        for part in self._parts:
            self._put(part, 0, memoryview(part.header))

    def written(self) -> tuple[Path, ...]:
        """Where the files lie until finish() gives them their names."""
        return tuple(_temporary(part) for part in self._parts)

    def finish(self) -> tuple[Path, ...]:
        """Syncs and reads back what was written, and gives the files their names; returns them.

        Of several files the first gets its name last, and an older first shard is removed before any of them.
        """
        if self._done < len(self._queue):
            raise ValueError(f"{self._queue[self._done][1].name} is not complete")
        self._leave_file()
        with _complaints(self.path):
            for part in self._parts:
                if _temporary(part).exists():  # else an interrupted finish has renamed it
                    _sync(_temporary(part))
                    _verify(_temporary(part), part)
            self._journal.add({"complete": True})
            first, *others = self._parts
            if others and _temporary(others[-1]).exists():
                first.path.unlink(missing_ok=True)  # no mixture of old and new shards
            for part in (*others, first):
                if _temporary(part).exists():
                    os.replace(_temporary(part), part.path)
            _sync_folder(self.path.parent)
            self._journal.remove()
        return self.paths

    def discard(self) -> None:
        """Ends without a result and leaves nothing."""
        self.close()
        with _complaints(self.path):
            for part in self._parts:
                _temporary(part).unlink(missing_ok=True)
            self._journal.remove()

    def close(self) -> None:
        """Ends without a result; the temporary files stay for a writer with resume=True."""
        self._leave_file()
        self._journal.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    def _put(self, part: Part, offset: int, data: memoryview) -> None:
        with _complaints(self.path):
            if self._file_part is not part:
                self._leave_file()
                self._file = open(_temporary(part), "r+b", buffering=0)  # noqa: SIM115
                self._file_part = part
            assert self._file is not None
            self._file.seek(offset)
            while data:
                data = data[self._file.write(data[: 1 << 30]) :]

    def _leave_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = self._file_part = None

    def _prepare(self) -> None:
        """Temporary files with their headers, once it is clear that the disk has room for the rest."""
        here = [_temporary(part) for part in self._parts]
        with _complaints(self.path):
            self._journal.begin(self._done)
            if self._done == 0:
                for path in here:
                    path.unlink(missing_ok=True)
            present = sum(path.stat().st_size for path in here if path.exists())
            check_room(self.path, sum(part.n_bytes for part in self._parts) - present)
            for part in self._parts:
                with open(_temporary(part), "r+b" if _temporary(part).exists() else "w+b", buffering=0) as file:
                    file.write(part.header)

    def _survivors(self) -> int:
        """How many tensors at the beginning are complete and unharmed on disk."""
        survivors = 0
        for record, (part, slot) in zip(self._journal.records, self._queue, strict=False):
            if record.get("tensor") != slot.name or record.get("crc32") != _checksum(_temporary(part), part, slot):
                break
            survivors += 1
        return survivors

    def _was_complete(self) -> bool:
        """Whether an interrupted finish left every file under its temporary or its final name."""
        complete = any("complete" in record for record in self._journal.records)
        return complete and all(
            _has_header(_temporary(part), part) or _has_header(part.path, part) for part in self._parts
        )


class _Journal:
    """Lines of JSON: the plan's digest, then a record for each complete tensor; locked while it is open."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path = path
        self._digest = digest
        self._file: IO[bytes] | None = open(path, "a+b", buffering=0)  # noqa: SIM115
        try:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ModelFileError(
                f"{path.with_suffix('')} is being written by another process: wait for it, or choose another name."
            ) from None
        self.records: list[dict[str, Any]] = []  # what an earlier writer of the same plan noted
        self._ends: list[int] = []  # where in the file the first line and each record end
        self._read()

    def _read(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        end = 0
        for line in self._file.read().splitlines(keepends=True):
            end += len(line)
            try:
                record = json.loads(line) if line.endswith(b"\n") else None  # a killed process may leave half a line
            except ValueError:
                return
            if not isinstance(record, dict) or (not self._ends and record.get("plan") != self._digest):
                return
            if self._ends:
                self.records.append(record)
            self._ends.append(end)

    def begin(self, n: int) -> None:
        """Keeps the first n records only."""
        assert self._file is not None
        self._file.truncate(self._ends[n] if self._ends else 0)
        if not self._ends:
            self.add({"plan": self._digest})

    def add(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(record).encode() + b"\n")

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _temporary(part: Part) -> Path:
    return part.path.with_name(part.path.name + ".part")


@contextlib.contextmanager
def _complaints(path: Path) -> Iterator[None]:
    """Turns the system's errors into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFitError(
                f"The disk became full while {path} was written: what is complete lies beside it as *.part; make room "
                "and resume, or delete those files."
            ) from error
        if error.errno == errno.EFBIG:
            raise DoesNotFitError(
                f"{path} is larger than its file system allows for a file: split it (split_max_size)."
            ) from error
        raise ModelFileError(f"{path} cannot be written: {error.strerror or error}.") from error


def _checksum(path: Path, part: Part, slot: Slot) -> int | None:
    """CRC-32 of a tensor in a temporary file; None where the file does not reach so far."""
    crc, left = 0, slot.n_bytes
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(slot.offset)
            while left:
                piece = file.read(min(left, _CHUNK))
                if not piece:
                    return None
                crc = zlib.crc32(piece, crc)
                left -= len(piece)
    except OSError:
        return None
    return crc


def _has_header(path: Path, part: Part) -> bool:
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size == part.n_bytes and file.read(len(part.header)) == part.header
    except OSError:
        return False


def _verify(path: Path, part: Part) -> None:
    """Reads the header back and compares every tensor's place."""
    try:
        shard = Shard(path)
    except EdgertError as error:
        raise ModelFileError(f"{part.path} was not written as planned, so it gets no name: {error}") from error
    with contextlib.closing(shard):
        found = [(info.name, info.shape, info.format, info.offset, info.n_bytes) for info in shard.tensors]
        planned = [(slot.name, slot.shape, slot.format, slot.offset, slot.n_bytes) for slot in part.slots]
        if found != planned or shard.n_bytes != part.n_bytes:
            raise ModelFileError(f"{part.path} was not written as planned, so it gets no name: is the disk failing?")


def _sync(path: Path) -> None:
    with open(path, "r+b") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Makes the new names durable, where the system can."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
