"""One GGUF file on disk, mapped and checked: every length is compared with the file before it is used.

Source: ggml's docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import array
import contextlib
import itertools
import math
import mmap
import os
import signal
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize import file_kind
from edgert.quantize.formats import BY_ID, FORMATS, REMOVED, Format

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_HEADER_BYTES = 24  # magic, version, two counts
_DEFAULT_ALIGNMENT = 32

# Far above any real model; a damaged count ends here instead of in minutes of work.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_STRINGS = 1 << 22  # of all arrays together
_MAX_HEADER = 1 << 27  # bytes before the weights
_MAX_NAME = 65535  # bytes of a key or of a tensor's name
_MAX_ALIGNMENT = 1 << 21  # a huge page
_MAX_DIMS = 4

_STEP = 1 << 20  # bytes, of which the system has all in memory if it has the first
_POPULATE_READ = 22  # MADV_POPULATE_READ, of Linux 5.14 and later

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}


class Strings:
    """An array of strings as it lies in the file; decoded when asked for."""

    def __init__(self, raw: bytes, starts: array.array[int]) -> None:
        self._raw = raw
        self._starts = starts  # where each string's text begins in raw; each stands behind its 8-byte length

    def __len__(self) -> int:
        return len(self._starts)

    def to_bytes(self) -> list[bytes]:
        if not self._starts:
            return []
        raw = self._raw
        ends = [start - 8 for start in self._starts[1:]]
        ends.append(len(raw))
        return [raw[start:end] for start, end in zip(self._starts, ends, strict=True)]

    def to_str(self) -> list[str]:
        """The strings, with U+FFFD for what is not UTF-8."""
        return [text.decode("utf-8", "replace") for text in self.to_bytes()]


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `shape` in NumPy's order, `offset` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    format: Format
    offset: int
    n_bytes: int


class Shard:
    """An open, mapped and validated file.

    metadata:  values by key; arrays of strings are Strings, other arrays are NumPy arrays
    tensors:   in the file's order
    Raises:    ModelFileError, UnsupportedFormatError
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: list[TensorInfo] = []
        self._spans: dict[str, tuple[int, int, int]] = {}  # type id, begin and end of each value
        self._leased = False
        self._fd, self.n_bytes = _open(path)
        try:
            self._map = _map(path, self._fd, self.n_bytes)
            self._position = 0
            self._end = min(self.n_bytes, _MAX_HEADER)  # of what the methods below may claim
            self._n_strings = 0
            self._parse()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file; the mapping stays until the last array that looks into it is gone."""
        if self._fd >= 0:
            self._let_go()  # the mapping would keep a lease
            os.close(self._fd)
            self._fd = -1
            self.__dict__.pop("_map", None)

    def view(self, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        """Read-only uint8 (n_bytes,) on the mapped file."""
        if self._fd < 0:
            raise ValueError(f"{self.path} was closed")
        return np.frombuffer(self._map, np.uint8, n_bytes, offset)

    def read_into(self, buffer: Any, offset: int) -> None:
        """Fills a writable buffer from a byte offset, without touching the mapping where the system can.

        Raises: ModelFileError when the file has become shorter since it was opened.
        """
        target = memoryview(buffer).cast("B")
        if self._fd < 0:
            raise ValueError(f"{self.path} was closed")
        if not hasattr(os, "preadv"):
            target[:] = self.view(offset, len(target)).data
            return
        done = 0
        while done < len(target):
            n = os.preadv(self._fd, [target[done : done + (1 << 30)]], offset + done)
            if n == 0:
                raise ModelFileError(f"{self.path} became shorter while it was read: load it again.")
            done += n

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """For as long as it lasts, those who want to write to the file wait, where the system can see to it."""
        self._leased = self._fd >= 0 and _lease(self._fd, True)
        try:
            yield
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._leased:
            _lease(self._fd, False)
        self._leased = False

    def lend(self, offset: int, n_bytes: int) -> NDArray[np.uint8] | None:
        """Bytes of a file that is held, uint8, where the system keeps them; None if it does not, or somebody waits.

        Of a file that could become shorter, bytes that are mapped are not safe to read.
        """
        if not self._leased or fcntl.fcntl(self._fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
            return None
        one = bytearray(1)
        try:
            for at in range(offset, offset + n_bytes, _STEP):
                os.preadv(self._fd, [one], at, os.RWF_NOWAIT)
            self._advise(_POPULATE_READ, offset, n_bytes)
        except OSError:
            return None
        return self.view(offset, n_bytes)

    def take_back(self, offset: int, n_bytes: int) -> None:
        """Has bytes that were lent no longer count as memory of this process."""
        self._advise(mmap.MADV_DONTNEED, offset, n_bytes)

    def _advise(self, advice: int, offset: int, n_bytes: int) -> None:
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(advice, start, offset + n_bytes - start)

    def forget(self, offset: int, n_bytes: int) -> None:
        """Lets the system give up the memory in which it keeps bytes that were read, where it takes such advice."""
        if self._fd >= 0 and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, offset, n_bytes, os.POSIX_FADV_DONTNEED)

    def raw_value(self, key: str) -> tuple[int, bytes]:
        """GGUF's type id of the key's value, and its bytes."""
        kind, begin, end = self._spans[key]
        return kind, self._map[begin:end]

    # Reading: every method below moves self._position, and all go through _take.

    def _take(self, n: int, what: str) -> int:
        """Claims the next n bytes and returns where they begin."""
        start = self._position
        if n > self._end - start:
            raise self._too_long(what, start + n)
        self._position = start + n
        return start

    def _too_long(self, what: str, needed: int) -> ModelFileError:
        if needed > self.n_bytes:
            return self._cut_short(what, needed)
        return self._damaged(f"{what} reaches to byte {needed:,}, and no model's header to {_MAX_HEADER:,}")

    def _cut_short(self, what: str, needed: int) -> ModelFileError:
        return ModelFileError(
            f"{self.path} is incomplete or damaged: it has {self.n_bytes:,} bytes, and {what} "
            f"reaches to byte {needed:,}; download it again."
        )

    def _damaged(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is damaged: {what}; download it again.")

    def _u32(self, what: str) -> int:
        return int(_U32.unpack_from(self._map, self._take(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(_U64.unpack_from(self._map, self._take(8, what))[0])

    def _count(self, what: str, most: int, least_bytes: int) -> int:
        """A number of things of at least `least_bytes` each, for which the file must have room."""
        n = self._u64(what)
        if n > most:
            raise self._damaged(f"{what} is {n:,}, and no model has more than {most:,}")
        if n * least_bytes > self.n_bytes:
            raise self._cut_short(f"what {what} ({n:,}) announces", n * least_bytes)
        return n

    def _string(self, what: str) -> str:
        n = self._u64(f"the length of {what}")
        start = self._take(n, what)
        return self._map[start : start + n].decode("utf-8", "replace")

    def _name(self, what: str) -> str:
        n = self._u64(f"the length of {what}")
        if not 0 < n <= _MAX_NAME:
            raise self._damaged(f"{what} has a length of {n:,} bytes")
        start = self._take(n, what)
        try:
            return self._map[start : start + n].decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged(f"{what} is not text") from None

    def _parse(self) -> None:
        self._take(4, "the magic number")
        version = self._u32("the version")
        if version and not version & 0xFFFF:
            raise UnsupportedFormatError(
                f"{self.path} is a big-endian GGUF file; edgert reads little-endian ones: "
                "convert it with gguf-convert-endian."
            )
        if version not in (2, 3):
            raise UnsupportedFormatError(
                f"{self.path} has GGUF version {version}; edgert reads versions 2 and 3: "
                f"{'convert the model anew' if version == 1 else 'update edgert or download the file again'}."
            )
        self.version = version
        # A tensor's entry has at least 33 bytes (name, dimensions, type, offset), a key 14.
        n_tensors = self._count("the number of tensors", _MAX_TENSORS, 33)
        n_keys = self._count("the number of metadata keys", _MAX_KEYS, 14)
        for index in range(n_keys):
            key = self._name(f"metadata key {index + 1} of {n_keys}")
            if key in self.metadata:
                raise self._damaged(f"the metadata key {key!r} occurs twice")
            kind = self._u32(f"the type of {key!r}")
            begin = self._position
            self.metadata[key] = self._value(key, kind)
            self._spans[key] = (kind, begin, self._position)
        alignment = self._alignment()
        entries = [self._tensor(index, n_tensors) for index in range(n_tensors)]
        names = {entry.name for entry in entries}
        if len(names) != len(entries):
            seen: set[str] = set()
            twice = next(e.name for e in entries if e.name in seen or seen.add(e.name))  # type: ignore[func-returns-value]
            raise self._damaged(f"the tensor {twice!r} occurs twice")
        base = -(-self._position // alignment) * alignment
        self.tensors = [self._place(entry, base, alignment) for entry in entries]
        self._check_overlap()

    def _value(self, key: str, kind: int) -> Any:
        scalar = _SCALARS.get(kind)
        if scalar:
            return scalar.unpack_from(self._map, self._take(scalar.size, f"the value of {key!r}"))[0]
        if kind == _STRING:
            return self._string(f"the value of {key!r}")
        if kind == _BOOL:
            byte = self._map[self._take(1, f"the value of {key!r}")]
            if byte > 1:
                raise self._damaged(f"the truth value of {key!r} is {byte}")
            return bool(byte)
        if kind == _ARRAY:
            return self._array(key)
        raise UnsupportedFormatError(
            f"{self.path}: the metadata key {key!r} has value type {kind}, and GGUF knows the types 0 to 12: "
            "the file is damaged, or newer than this edgert."
        )

    def _array(self, key: str) -> Any:
        kind = self._u32(f"the element type of {key!r}")
        n = self._u64(f"the length of {key!r}")
        if kind == _STRING:
            return self._strings(key, n)
        if kind == _ARRAY:
            raise UnsupportedFormatError(f"{self.path}: the metadata key {key!r} is an array of arrays.")
        if kind != _BOOL and kind not in _SCALARS:
            raise UnsupportedFormatError(f"{self.path}: the array {key!r} has the unknown element type {kind}.")
        dtype = np.dtype(np.uint8) if kind == _BOOL else np.dtype(_SCALARS[kind].format)
        start = self._take(n * dtype.itemsize, f"the array {key!r}")
        values = np.frombuffer(self._map, dtype, n, start).copy()
        if kind == _BOOL:
            if (values > 1).any():
                raise self._damaged(f"the truth values of {key!r} are neither 0 nor 1")
            return values.view(np.bool_)
        return values

    def _strings(self, key: str, n: int) -> Strings:
        self._n_strings += n
        if self._n_strings > _MAX_STRINGS:
            raise self._damaged(f"the array {key!r} announces {n:,} strings")
        begin = self._position
        if n * 8 > self._end - begin:
            raise self._too_long(f"the array {key!r} of {n:,} strings", begin + n * 8)
        unpack, position = _U64.unpack_from, 0
        starts = array.array("Q")
        with memoryview(self._map) as whole, whole[begin : self._end] as data:
            try:
                for _ in range(n):
                    length = unpack(data, position)[0]
                    position += 8
                    starts.append(position)
                    position += length
            except (struct.error, OverflowError):
                raise self._too_long(f"the array {key!r}", begin + position + 8) from None
        self._take(position, f"the array {key!r}")
        return Strings(self._map[begin : begin + position], starts)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}, which is no power of two")
        if alignment > _MAX_ALIGNMENT:
            raise self._damaged(f"general.alignment is {alignment:,}, and {_MAX_ALIGNMENT:,} is the most")
        return alignment

    def _tensor(self, index: int, n_tensors: int) -> TensorInfo:
        """An entry of the table of tensors, with its offset still relative to the data section."""
        name = self._name(f"the name of tensor {index + 1} of {n_tensors}")
        n_dims = self._u32(f"the number of dimensions of tensor {name!r}")
        if not 1 <= n_dims <= _MAX_DIMS:
            raise self._damaged(f"the tensor {name!r} has {n_dims:,} dimensions, and 1 to {_MAX_DIMS} are possible")
        dims = [self._u64(f"the shape of tensor {name!r}") for _ in range(n_dims)]
        kind = self._u32(f"the type of tensor {name!r}")
        offset = self._u64(f"the offset of tensor {name!r}")
        format = BY_ID.get(kind)
        if format is None:
            raise self._unknown_type(name, kind)
        if 0 in dims:
            raise self._damaged(f"the tensor {name!r} has the empty shape {dims}")
        if dims[0] % format.block_size:
            raise self._damaged(
                f"the rows of tensor {name!r} have {dims[0]:,} elements, "
                f"and {format} stores blocks of {format.block_size}"
            )
        n_bytes = math.prod(dims[1:]) * format.row_bytes(dims[0])
        return TensorInfo(name, tuple(reversed(dims)), format, offset, n_bytes)

    def _unknown_type(self, name: str, kind: int) -> UnsupportedFormatError:
        old = REMOVED.get(kind)
        known = ", ".join(f"{format} ({format.ggml_id})" for format in FORMATS.values())
        return UnsupportedFormatError(
            f"{self.path}: the tensor {name!r} has type {kind}"
            f"{f' ({old}), which ggml has given up' if old else ''}; edgert knows {known}."
        )

    def _place(self, entry: TensorInfo, base: int, alignment: int) -> TensorInfo:
        """The one check of an extent: aligned, and inside the file, in exact integers."""
        if entry.offset % alignment:
            raise self._damaged(
                f"the tensor {entry.name!r} lies at offset {entry.offset:,}, not a multiple of {alignment}"
            )
        offset = base + entry.offset
        if offset + entry.n_bytes > self.n_bytes:
            raise self._cut_short(f"the tensor {entry.name!r}", offset + entry.n_bytes)
        return TensorInfo(entry.name, entry.shape, entry.format, offset, entry.n_bytes)

    def _check_overlap(self) -> None:
        ordered = sorted(self.tensors, key=lambda tensor: tensor.offset)
        for first, second in itertools.pairwise(ordered):
            if first.offset + first.n_bytes > second.offset:
                raise self._damaged(f"the tensors {first.name!r} and {second.name!r} overlap")


def _lease(fd: int, begin: bool) -> bool:
    """Takes or ends a lease of a file that is read; whether that was done.

    Source: fcntl(2), of Linux.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # nobody minds it; another would end the process
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK if begin else fcntl.F_UNLCK)
        return True
    return False


def _open(path: Path) -> tuple[int, int]:
    """A descriptor of a regular file, and its size in bytes."""
    try:
        mode = path.stat().st_mode  # before opening, which would wait on a pipe
        if stat.S_ISDIR(mode):
            raise ModelFileError(f"{path} is a folder: name the .gguf file inside it.")
        if not stat.S_ISREG(mode):
            raise ModelFileError(f"{path} is a device, pipe or socket, not a file on disk.")
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelFileError(f"{path} cannot be opened: {reason}.") from None
    return fd, os.fstat(fd).st_size


def _map(path: Path, fd: int, size: int) -> mmap.mmap:
    """The mapped file, once its head has shown that it is GGUF at all."""
    with open(fd, "rb", closefd=False) as file:
        head = file.read(file_kind.HEAD_BYTES)
    if head[:4] != b"GGUF":
        raise ModelFileError(f"{path} is not a GGUF file; it is {file_kind.describe(head, size)}.")
    if size < _HEADER_BYTES:
        raise ModelFileError(
            f"{path} is incomplete: it has {size} bytes, and the header alone has {_HEADER_BYTES}; download it again."
        )
    return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
