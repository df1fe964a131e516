"""A GGUF model, of one file or of several shards: its metadata, and its tensors where they lie on disk."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError
from edgert.quantize import formats
from edgert.quantize.formats import Format
from edgert.quantize.gguf_shard import Shard, Strings

T = TypeVar("T")

_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5,})-of-(?P<count>\d{5,})(?P<suffix>\.[^.]*)?", re.DOTALL)
_REQUIRED: Any = object()


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file.

    shape:    NumPy's order, rows before columns (GGUF's dimensions reversed)
    offset:   bytes from the start of the file `path`
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    offset: int
    n_bytes: int
    _shard: Shard = field(repr=False, compare=False)

    @property
    def path(self) -> Path:
        return self._shard.path

    @property
    def n_cols(self) -> int:
        return self.shape[-1]

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.n_bytes // self.n_rows

    @property
    def data(self) -> NDArray[np.uint8]:
        """Read-only uint8 (n_rows, row_bytes) on the mapped file.

        Raises: ValueError after the file was closed.
        """
        return self._shard.view(self.offset, self.n_bytes).reshape(self.n_rows, self.row_bytes)

    def read_into(self, buffer: Any, start: int = 0) -> None:
        """Reads bytes [start, start + len(buffer)) of the tensor into a writable C-contiguous buffer.

        It reads the file and not the mapping, so that the pages do not count as this process' memory.

        Raises: ValueError for bytes outside the tensor; ModelFileError when the file has shrunk.
        """
        n = memoryview(buffer).nbytes
        if start < 0 or start + n > self.n_bytes:
            raise ValueError(f"{self.name} has {self.n_bytes} bytes: no {n} bytes at {start}")
        self._shard.read_into(buffer, self.offset + start)

    def lend(self, start: int, n: int) -> NDArray[np.uint8] | None:
        """Bytes [start, start + n) in the memory in which the system keeps a file that is held; None if it does not.

        They are to be taken back, lest they count as this process' memory.
        """
        return self._shard.lend(self.offset + start, n)

    def take_back(self, start: int, n: int) -> None:
        """Ends the use of n bytes that were lent."""
        self._shard.take_back(self.offset + start, n)

    def forget(self, start: int, n: int) -> None:
        """Lets the system give up the memory in which it keeps n bytes of the tensor; from the disk they come back."""
        self._shard.forget(self.offset + start, n)

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """The values of rows [start, stop), float32 (stop - start, n_cols); only these are read.

        Raises: ModelFileError when a value is NaN or infinite.
        """
        raw = np.empty((stop - start, self.row_bytes), np.uint8)
        self.read_into(raw, start * self.row_bytes)
        formats.check_finite(self, raw)
        return self.format.dequantize(raw)

    def dequantize(self) -> NDArray[np.float32]:
        """The values, float32 in the tensor's shape."""
        return self.format.dequantize(self.data).reshape(self.shape)

    def check_finite(self) -> None:
        """Refuses NaN and infinity, by formats.check_finite."""
        formats.check_finite(self)


class Metadata(Mapping[str, Any]):
    """Values by key: str, int, float, bool, list[str] (decoded on first use) or a NumPy array."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._decoded: dict[str, list[str]] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, Strings):
            if key not in self._decoded:
                self._decoded[key] = value.to_str()
            return self._decoded[key]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def strings(self, key: str) -> list[bytes]:
        """An array of strings as the bytes in the file. Raises: KeyError; TypeError for other values."""
        value = self._values[key]
        if not isinstance(value, Strings):
            raise TypeError(f"{key} is no array of strings")
        return value.to_bytes()

    def length(self, key: str) -> int | None:
        """How many elements the array has, without decoding it; None when there is no such array."""
        value = self._values.get(key)
        return len(value) if isinstance(value, Strings | np.ndarray) else None


class HasValues(Protocol):
    """What describe() asks of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def dequantize(self) -> NDArray[np.float32]: ...


AnyTensor = TypeVar("AnyTensor", bound=HasValues)


class Model(Generic[AnyTensor]):
    """Metadata and tensors, wherever they come from; every access names what is missing or wrong.

    path:     what messages call it
    tensors:  by name
    """

    path: Path
    metadata: Metadata
    tensors: Mapping[str, AnyTensor]

    @property
    def architecture(self) -> str:
        """The family's name, general.architecture."""
        return self.get("general.architecture", str)

    def get(self, key: str, kind: type[T], default: T | Any = _REQUIRED) -> T:
        """The metadata's value, which must be a `kind`: str, int, float, bool, list (of str) or np.ndarray.

        An integer serves as a float. Without a default the key must be there.

        Raises: ModelFileError that names the key.
        """
        if key not in self.metadata:
            if default is _REQUIRED:
                raise ModelFileError(f"{self.path}: the metadata lacks the key {key!r}; convert the model anew.")
            return default
        value = self.metadata[key]
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and type(value) is bool):
            raise ModelFileError(
                f"{self.path}: the metadata key {key!r} should be {_KINDS.get(kind, kind.__name__)} "
                f"and is {_KINDS.get(type(value), type(value).__name__)}; convert the model anew."
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelFileError(f"{self.path}: the metadata key {key!r} is {value}; convert the model anew.")
        return value

    def tensor(self, name: str) -> AnyTensor:
        """The tensor of that name. Raises: ModelFileError that names it when it is missing."""
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelFileError(
                f"{self.path} lacks the tensor {name!r}, which {self.architecture} needs: "
                "the model was converted wrongly or is of a variant that edgert does not know."
            ) from None


class GGUFFile(Model[Tensor]):
    """An open model. Use it in a `with`, or call close().

    paths:    every shard, in order; one path for a model in one file
    tensors:  by name, in the files' order
    n_bytes:  size of all shards
    """

    tensors: dict[str, Tensor]

    def __init__(self, shards: list[Shard]) -> None:
        self._shards = shards
        self.path = shards[0].path
        self.paths = tuple(shard.path for shard in shards)
        self.version = shards[0].version
        self.n_bytes = sum(shard.n_bytes for shard in shards)
        self.metadata = Metadata(shards[0].metadata)
        self.tensors = {}
        for shard in shards:
            for info in shard.tensors:
                if info.name in self.tensors:
                    raise ModelFileError(
                        f"The tensor {info.name!r} is both in {self.tensors[info.name].path} and in "
                        f"{shard.path}: the parts do not belong together; download them again."
                    )
                self.tensors[info.name] = Tensor(info.name, info.shape, info.format, info.offset, info.n_bytes, shard)

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Opens a model by its file, or by any of its shards, and checks everything but the weights' values.

        Raises: ModelFileError for a file that is not sound GGUF (it says what it is); UnsupportedFormatError.
        """
        first = Shard(Path(path))
        shards = [first]
        try:
            shards = _open_siblings(first)
            return cls(shards)
        except BaseException:
            for shard in [first, *shards]:
                shard.close()
            raise

    def raw_value(self, key: str) -> tuple[int, bytes]:
        """GGUF's type id of the key's value, and its bytes as they stand in the file."""
        return self._shards[0].raw_value(key)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """For as long as it lasts, those who want to write to the files wait, where the system can see to it."""
        with contextlib.ExitStack() as stack:
            for shard in self._shards:
                stack.enter_context(shard.held())
            yield

    def close(self) -> None:
        """Closes the files; arrays that look into them stay valid."""
        for shard in self._shards:
            shard.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_KINDS: dict[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "an array of strings",
    np.ndarray: "an array of numbers",
}


def _open_siblings(given: Shard) -> list[Shard]:
    """All shards of the model that a shard belongs to, in order, checked against each other."""
    count = _split_value(given, "split.count", 1)
    if count <= 1:
        return [given]
    number = _split_value(given, "split.no")
    total = _split_value(given, "split.tensors.count")
    paths = _sibling_paths(given.path, number, count)
    shards: list[Shard] = []
    try:
        for index, path in enumerate(paths):
            shard = given if index == number else Shard(path)
            shards.append(shard)
            _check_sibling(shard, given, index, count, total)
        found = sum(len(shard.tensors) for shard in shards)
        if found != total:
            raise ModelFileError(
                f"The {count} parts of {paths[0]} hold {found:,} tensors and announce {total:,}: "
                "they do not belong together; download them again."
            )
    except BaseException:
        for shard in shards:
            shard.close()
        raise
    return shards


def _split_value(shard: Shard, key: str, default: int | None = None) -> int:
    value = shard.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise ModelFileError(f"{shard.path} is a part of a split model, and its key {key!r} is {value!r}.")
    return value


def _sibling_paths(path: Path, number: int, count: int) -> list[Path]:
    """The names of all parts, derived from one part's own name; none may be missing."""
    name = _SHARD_NAME.fullmatch(path.name)
    here = f"{path} is part {number + 1} of {count}"
    if number >= count:
        raise ModelFileError(f"{here}: the file is damaged; download it again.")
    if not name or (int(name["number"]), int(name["count"])) != (number + 1, count):
        raise ModelFileError(
            f"{here}, and the other parts are found by name: rename it to end in "
            f"-{number + 1:05d}-of-{count:05d}.gguf, as it was published."
        )
    suffix = name["suffix"] or ""
    paths = [path.with_name(f"{name['stem']}-{i + 1:05d}-of-{count:05d}{suffix}") for i in range(count)]
    paths[number] = path
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ModelFileError(f"{here}, and {names} is missing in {path.parent}: download it to the same folder.")
    return paths


def _check_sibling(shard: Shard, given: Shard, index: int, count: int, total: int) -> None:
    expected = {"split.no": index, "split.count": count, "split.tensors.count": total}
    for key, value in expected.items():
        found = _split_value(shard, key)
        if found != value:
            raise ModelFileError(
                f"{shard.path} says {key} = {found}, and as part {index + 1} of {count} beside "
                f"{given.path.name} it should be {value}: the parts do not belong together; "
                "download them again."
            )
    architectures = {s.metadata.get("general.architecture") for s in (shard, given)} - {None}
    if len(architectures) > 1:
        raise ModelFileError(
            f"{shard.path} and {given.path.name} are parts of different models: "
            f"{' and '.join(sorted(map(str, architectures)))}."
        )
