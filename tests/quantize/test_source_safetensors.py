"""The reader of safetensors: equal to the library on sound files, one sentence on any other."""

from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgert.errors import EdgertError, ModelFileError, UnsupportedFormatError
from edgert.quantize.checkpoint.safetensors import SafetensorsFile

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def file_of(path: Path, header: Any, data: bytes = bytes(32), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def refusal(path: Path, kind: type[EdgertError] = ModelFileError) -> str:
    with pytest.raises(kind) as caught:
        SafetensorsFile(path)
    message = str(caught.value)
    assert str(path) in message and message.endswith(".")
    return message


def changed(**changes: Any) -> dict[str, Any]:
    return {**HEADER, "a": {**HEADER["a"], **changes}}


def test_equals_the_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    arrays = {
        "f32": rng.standard_normal((3, 5)).astype(np.float32),
        "f16": rng.standard_normal((2, 2, 2)).astype(np.float16),
        "i64": rng.integers(0, 9, 4),
        "scalar": np.array(1.5),
        "empty": np.empty((0, 7), np.float32),
        "mask": np.array([True, False]),
    }
    library.save_file(arrays, tmp_path / "m.safetensors", metadata={"format": "np"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert set(file.tensors) == set(arrays)
    for name, array in arrays.items():
        entry = file.tensors[name]
        assert entry.shape == array.shape
        data = bytearray(entry.n_bytes)
        entry.read_into(data)
        assert bytes(data) == array.tobytes()
    part = bytearray(8)
    file.tensors["f32"].read_into(part, 4)
    assert bytes(part) == arrays["f32"].tobytes()[4:12]
    with pytest.raises(ValueError, match="no 8 bytes at 56"):
        file.tensors["f32"].read_into(part, 56)


def test_threads_read_at_once(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    array = np.random.default_rng(0).integers(0, 255, (64, 4096), np.uint8)
    library.save_file({"a": array}, tmp_path / "m.safetensors")
    entry = SafetensorsFile(tmp_path / "m.safetensors").tensors["a"]

    def row(i: int) -> bytes:
        data = bytearray(4096)
        entry.read_into(data, i * 4096)
        return bytes(data)

    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(row, list(range(64)) * 10))
    assert rows == [row.tobytes() for row in array] * 10


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (changed(dtype="F33"), "has the dtype 'F33'"),
        (changed(dtype=None), "has the dtype None"),
        (changed(shape=[2, -3]), r"the shape \[2, -3\]"),
        (changed(shape=[2, 3.0]), r"the shape \[2, 3.0\]"),
        (changed(shape=[True, 6]), r"the shape \[True, 6\]"),
        (changed(shape=6), "the shape 6"),
        (changed(shape=[1] * 17), "the shape"),
        (changed(shape=[2**62, 2**62]), "has 24 bytes"),
        (changed(shape=[2**63]), "the shape"),
        (changed(shape=[2, 4]), r"\(F32, \[2, 4\]\) has 24 bytes"),
        (changed(data_offsets=[24, 0]), r"data_offsets \[24, 0\]"),
        (changed(data_offsets=[0]), r"data_offsets \[0\]"),
        (changed(data_offsets=[0, 2**70]), "data_offsets"),
        (changed(data_offsets=[8, 32]), "the tensors 'a' and 'b' overlap"),
        (changed(data_offsets=[9, 33]), "the tensor 'a' reaches to byte"),
        ({**HEADER, "c": 5}, "the tensor 'c' is not described"),
        (b'{"a": 1', "is no JSON"),
        (b'{"a": "\xff\xfe"}', "is no JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is no JSON"),
        (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', "is no JSON"),
        (b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":{}}', "'x' occurs twice"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: Any, message: str) -> None:
    path = file_of(tmp_path / "m.safetensors", header)
    with pytest.raises((ModelFileError, UnsupportedFormatError), match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"abc", "not a safetensors file"),
        (b"GGUF\3\0\0\0", "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 123\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "HTML page"),
        (struct.pack("<Q", 2) + b"[]", "not a safetensors file"),
        (struct.pack("<Q", 10**6) + b"{}", "reaches to byte 1,000,008"),
        (struct.pack("<Q", 2**63) + b'{"a"', "its header has 9,223,372,036,854,775,808 bytes"),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    assert message in refusal(path)


def test_cut_at_every_byte(tmp_path: Path) -> None:
    whole = file_of(tmp_path / "m.safetensors", HEADER).read_bytes()
    path = tmp_path / "cut.safetensors"
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        refusal(path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.safetensors", HEADER)
    file = SafetensorsFile(path)
    with open(path, "r+b") as other:
        other.truncate(path.stat().st_size - 4)
    with pytest.raises(ModelFileError, match="became shorter"):
        file.tensors["b"].read_into(bytearray(8))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**66) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "F99"]) | json_values,
        "shape": st.lists(st.integers(-1, 9), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(-1, 64), min_size=2, max_size=2) | json_values,
    },
)


@settings(max_examples=600)
@given(
    st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), entries | json_values, max_size=4),
    st.integers(0, 64),
)
def test_any_header_is_read_or_refused(tmp_path: Path, header: dict[str, Any], n_bytes: int) -> None:
    """What is accepted lies in the file, has the bytes of its shape, and overlaps nothing."""
    path = file_of(tmp_path / "m.safetensors", header, bytes(n_bytes))
    try:
        file = SafetensorsFile(path)
    except EdgertError as error:
        assert str(path) in str(error)
        return
    covered: set[int] = set()
    for entry in file.tensors.values():
        data = bytearray(entry.n_bytes)
        entry.read_into(data)
        places = set(range(entry.offset, entry.offset + entry.n_bytes))
        assert not places & covered
        covered |= places
    file.close()


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, 250), st.integers(0, 255)), min_size=1, max_size=6))
def test_flipped_bytes_are_read_or_refused(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    path = file_of(tmp_path / "m.safetensors", HEADER)
    data = bytearray(path.read_bytes())
    for position, byte in flips:
        data[position % len(data)] = byte
    path.write_bytes(data)
    try:
        SafetensorsFile(path).close()
    except EdgertError as error:
        assert str(path) in str(error)
