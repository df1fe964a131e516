"""Files of importance matrices, as llama.cpp's tools exchange them: GGUF, and the binary form before it (.dat).

Source: llama.cpp's tools/imatrix and its README. In GGUF, tensor `NAME.in_sum2` holds the sums of squared inputs,
float32 (n_mat, n_cols), and `NAME.counts` the tokens that were summed over, float32 (n_mat, 1). The older form holds
for each tensor the mean squares times the number of chunks, and neither the chunks' size nor the number of experts.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError
from edgert.quantize import file_kind
from edgert.quantize.calibration import Statistics
from edgert.quantize.formats import FORMATS
from edgert.quantize.gguf_file import GGUFFile
from edgert.quantize.gguf_value import Value
from edgert.quantize.gguf_writer import Writer

SUMS, COUNTS = ".in_sum2", ".counts"
CHUNK_SIZE = 512  # tokens, where a file does not say
_DATASETS, _N_CHUNKS, _CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
_MAX_NAME = 1 << 12
_INT = struct.Struct("<i")


def read_imatrix(path: str | Path) -> Statistics:
    """The statistics in a file of either form.

    Of the older form, counts are whole chunks of 512 tokens, and experts stand in one row, (1, n_mat * n_cols).

    Raises: ModelFileError for a file that is damaged, or no importance matrix; it says what it is.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            head = file.read(file_kind.HEAD_BYTES)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}.") from None
    return _read_gguf(path) if head[:4] == b"GGUF" else _Dat(path, head).read()


def write_imatrix(path: str | Path, statistics: Statistics) -> None:
    """Writes a file that appears whole or not at all; in the older form if its name ends in .dat.

    Raises: ModelFileError when there is nothing to write, or it cannot be written; DoesNotFitError.
    """
    path = Path(path)
    if not statistics.sums:
        raise ModelFileError(f"{path} is not written: no tensor has statistics.")
    if path.suffix == ".dat":
        _write_dat(path, statistics)
        return
    names = sorted(statistics.sums)
    tensors: dict[str, NDArray[np.float32]] = {}
    for name in names:
        tensors[name + SUMS] = statistics.sums[name].astype("<f4")
        tensors[name + COUNTS] = statistics.counts[name].astype("<f4")[:, None]
    metadata = {
        "general.type": Value.string("imatrix"),
        _DATASETS: Value.strings(statistics.datasets),
        _N_CHUNKS: Value.u32(statistics.n_chunks),
        _CHUNK_SIZE: Value.u32(statistics.chunk_size),
    }
    plans = [(name, values.shape, FORMATS["F32"]) for name, values in tensors.items()]
    with Writer(path, metadata, plans) as writer:
        for name, values in tensors.items():
            writer.write(name, values.view(np.uint8))


def check_of(statistics: Statistics, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What a user should know before these statistics weigh the matrices of a model, given by their shapes.

    Gives experts of the older form a row each. Raises: ModelFileError when they are of another model.
    """
    for name, shape in shapes.items():
        found = statistics.sums.get(name)
        if found is not None and len(shape) == 3 and found.shape == (1, shape[0] * shape[2]):
            found = statistics.sums[name] = found.reshape(shape[0], shape[2])
            statistics.counts[name] = np.repeat(statistics.counts[name], shape[0])
        if found is not None and found.shape[1] != shape[-1]:
            raise ModelFileError(
                f"{path} is of another model: its {name} has {found.shape[1]} columns, and here it has {shape[-1]}."
            )
    lacking = [name for name in shapes if statistics.importance(name) is None]
    if len(lacking) == len(shapes) > 0:
        raise ModelFileError(f"{path} is of another model: it has none of this one's matrices, such as {lacking[0]}.")
    if "output.weight" in shapes and "token_embd.weight" in lacking:
        lacking.remove("token_embd.weight")  # rows are looked up in it: nothing is multiplied
    if not lacking:
        return []
    return [f"{path} does not have {lacking[0]}" + (f" and {len(lacking) - 1} others" if len(lacking) > 1 else "")]


def _read_gguf(path: Path) -> Statistics:
    with GGUFFile.open(path) as file:
        kind = file.get("general.type", str, "model")
        if kind != "imatrix" and not any(name.endswith(SUMS) for name in file.tensors):
            raise ModelFileError(f"{path} is a GGUF file of the kind {kind!r}, not an importance matrix.")
        statistics = Statistics(
            datasets=list(file.get(_DATASETS, list, [])),
            n_chunks=file.get(_N_CHUNKS, int, 0),
            chunk_size=file.get(_CHUNK_SIZE, int, CHUNK_SIZE),
        )
        names = {
            name.removesuffix(suffix) for name in file.tensors for suffix in (SUMS, COUNTS) if name.endswith(suffix)
        }
        for name in sorted(names):
            pair = []
            for suffix, what in ((SUMS, "sums"), (COUNTS, "counts")):
                tensor = file.tensors.get(name + suffix)
                if tensor is None or tensor.format.name != "F32":
                    raise _damaged(path, f"it has no {what} of {name} in F32")
                pair.append(tensor.dequantize().astype(np.float64))
            sums, counts = pair
            if sums.size % counts.size:
                raise _damaged(path, f"{name} has {sums.size:,} sums for {counts.size:,} matrices")
            _add(path, statistics, name, sums.reshape(counts.size, -1), counts.reshape(-1))
    if not statistics.sums:
        raise _damaged(path, "it has no entries")
    return statistics


class _Dat:
    """Reads the older form; every length is compared with the file before it is used."""

    def __init__(self, path: Path, head: bytes) -> None:
        self.path = path
        self.data = path.read_bytes()
        self.at = 0
        self.head = head

    def read(self) -> Statistics:
        n_entries = self._int("the number of entries")
        # An entry has at least a length, a letter, two numbers and a value.
        if not 0 < n_entries <= len(self.data) // 17:
            kind = file_kind.describe(self.head, len(self.data))
            raise ModelFileError(f"{self.path} is not an importance matrix; it is {kind}.")
        statistics = Statistics(chunk_size=CHUNK_SIZE)
        for i in range(n_entries):
            what = f"entry {i + 1} of {n_entries:,}"
            name = self._text(f"the name of {what}", least=1)
            n_calls, n_values = self._int(f"the chunks of {name}"), self._int(f"the size of {name}")
            if n_calls < 1 or n_values < 1 or name in statistics.sums:
                raise _damaged(self.path, f"{what}, {name!r}, has {n_values:,} values of {n_calls:,} chunks")
            values = np.frombuffer(self._take(4 * n_values, f"the values of {name}"), "<f4").astype(np.float64)
            _add(self.path, statistics, name, values[None] * CHUNK_SIZE, np.array([float(n_calls * CHUNK_SIZE)]))
            statistics.n_chunks = max(statistics.n_chunks, n_calls)
        if self.at < len(self.data):  # the end is optional
            statistics.n_chunks = self._int("the number of chunks")
            if name := self._text("the name of the text"):
                statistics.datasets.append(name)
        if statistics.n_chunks < 0:
            raise _damaged(self.path, f"its number of chunks is {statistics.n_chunks:,}")
        return statistics

    def _take(self, n: int, what: str) -> bytes:
        if n > len(self.data) - self.at:
            raise _damaged(self.path, f"{what} reaches to byte {self.at + n:,} of {len(self.data):,}")
        self.at += n
        return self.data[self.at - n : self.at]

    def _int(self, what: str) -> int:
        return int(_INT.unpack(self._take(4, what))[0])

    def _text(self, what: str, least: int = 0) -> str:
        n = self._int(f"the length of {what}")
        if not least <= n <= _MAX_NAME:
            raise _damaged(self.path, f"{what} has a length of {n:,} bytes")
        return self._take(n, what).decode("utf-8", "replace")


def _add(path: Path, statistics: Statistics, name: str, sums: NDArray[np.float64], counts: NDArray[np.float64]) -> None:
    for what, values in (("sum", sums), ("count", counts)):
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise _damaged(path, f"a {what} of {name} is negative, infinite or no number")
    if counts.max() > 2**53:
        raise _damaged(path, f"{name} counts {counts.max():,.0f} tokens")
    statistics.sums[name], statistics.counts[name] = sums, np.rint(counts).astype(np.int64)


def _damaged(path: Path, what: str) -> ModelFileError:
    return ModelFileError(f"{path} is no sound importance matrix: {what}; make or download it again.")


def _write_dat(path: Path, statistics: Statistics) -> None:
    parts = []
    chunk_size = max(statistics.chunk_size, 1)
    names = [name for name in sorted(statistics.sums) if statistics.counts[name].any()]
    for name in names:
        means = np.asarray(statistics.importance(name)).reshape(-1)
        n_calls = -(-int(statistics.counts[name].max()) // chunk_size)
        text = name.encode()
        parts.append(_INT.pack(len(text)) + text + _INT.pack(n_calls) + _INT.pack(len(means)))
        parts.append((means * np.float32(n_calls)).astype("<f4").tobytes())
    dataset = (statistics.datasets[-1] if statistics.datasets else "").encode()[:_MAX_NAME]
    end = _INT.pack(statistics.n_chunks) + _INT.pack(len(dataset)) + dataset
    data = b"".join([_INT.pack(len(names)), *parts, end])
    temporary = path.with_name(path.name + ".part")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ModelFileError(f"{path} cannot be written: {error.strerror or error}.") from None
