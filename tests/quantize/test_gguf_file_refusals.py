"""What is no sound GGUF file is refused at once, in a sentence that says what it is or what is wrong."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import raw_file, raw_key, raw_tensor, refusal, string, write
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgert.errors import EdgertError, ModelFileError, UnsupportedFormatError
from edgert.quantize.gguf_file import GGUFFile


@pytest.fixture
def made(tmp_path: Path):
    """made(bytes) writes them as x.gguf and returns the path."""

    def make(data: bytes) -> Path:
        path = tmp_path / "x.gguf"
        path.write_bytes(data)
        return path

    return make


def label(value: bytes | str) -> str:
    """A case is called by what is said about it."""
    return value if isinstance(value, str) else ""


# What the file really is


def a_zip(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    return buffer.getvalue()


LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 4081004224\n"
)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (LFS, "Git LFS pointer to a file of 4,081,004,224 bytes"),
        (b"\n<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
        (b"<html><title>Sign in</title>", "HTML page"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "XML"),
        (b'{"error": "Repository not found"}', "JSON"),
        (b'{"metadata": {}, "weight_map": {"a": "b"}}', "index of a sharded safetensors"),
        (struct.pack("<Q", 40) + b'{"a":{"dtype":"F32","shape":[1]}}'.ljust(40) + bytes(4), "safetensors"),
        (a_zip("model/data.pkl", "model/version"), "PyTorch"),
        (a_zip("readme.txt"), "zip archive"),
        (b"\x80\x02}q\x00.", "pickle"),
        (b"\x80\x04\x95\x05\x00\x00\x00", "pickle"),
        (struct.pack("<I", 0x67676D6C) + bytes(40), "old format GGML,"),
        (struct.pack("<I", 0x67676D66) + bytes(40), "old format GGMF"),
        (struct.pack("<I", 0x67676A74) + bytes(40), "old format GGJT"),
        (struct.pack("<I", 0x67676C61) + bytes(40), "old format GGLA"),
        (b"\x1f\x8b\x08" + bytes(40), "gzip"),
        (b"\x28\xb5\x2f\xfd" + bytes(40), "zstd"),
        (b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5"),
        (b"\x93NUMPY" + bytes(40), "NumPy"),
        (b"\x20\0\0\0TFL3" + bytes(40), "TensorFlow Lite"),
        (b"name".ljust(257, b"\0") + b"ustar\0" + bytes(300), "tar archive"),
        (bytes(5000), "zeros"),
        (b"Entry not found", "text file (15 bytes) that begins 'Entry not found'"),
        (("é" * 3000).encode(), "text file"),
        (b"\x01\x02\x03\x04\xff\xfe\xfd", "01 02 03 04 ff fe fd"),
        (b"FUGG" + bytes(40), "big-endian"),
        (b"GGU", "unknown kind"),
        (b"GGUF", "4 bytes, and the header alone has 24"),
        (b"GGUF\x03\0\0\0" + bytes(15), "23 bytes, and the header alone has 24"),
    ],
    ids=label,
)
def test_says_what_it_is(made, data: bytes, says: str) -> None:
    assert says in refusal(made(data))


def test_versions_and_byte_order(made) -> None:
    assert "version 1" in refusal(made(raw_file(version=1)), UnsupportedFormatError)
    assert "update edgert" in refusal(made(raw_file(version=4)), UnsupportedFormatError)
    assert "version 0" in refusal(made(raw_file(version=0)), UnsupportedFormatError)
    assert "big-endian" in refusal(made(raw_file(version=3 << 24)), UnsupportedFormatError)


def test_big_endian_file_of_the_writer(tmp_path: Path) -> None:
    path = write(tmp_path / "b.gguf", lambda w: w.add_uint32("n", 1), endianess=gguf.GGUFEndian.BIG)
    assert "gguf-convert-endian" in refusal(path, UnsupportedFormatError)


@pytest.mark.skipif(sys.platform == "win32", reason="needs pipes with names")
def test_what_is_no_file(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "absent.gguf")
    assert "folder" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "pipe" in refusal(tmp_path / "pipe.gguf")
    assert "device" in refusal(Path("/dev/zero"))
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    assert "cannot be opened" in refusal(loop)
    with pytest.raises(ModelFileError):
        GGUFFile.open("a\0b.gguf")


# Sound at first sight only

F32_ROW = bytes(32)  # eight values


@pytest.mark.parametrize(
    ("data", "says"),
    [
        # lengths and counts
        (raw_file([struct.pack("<Q", 2**30) + b"k"]), "length of 1,073,741,824"),
        (raw_file([struct.pack("<Q", 0)]), "length of 0"),
        (raw_file([raw_key(b"k", 8, struct.pack("<Q", 2**30))]), "the value of 'k'"),
        (raw_file([raw_key(b"k", 9, struct.pack("<IQ", 4, 2**62))]), "the array 'k'"),
        (raw_file([raw_key(b"k", 9, struct.pack("<IQ", 8, 2**63))]), "9,223,372,036,854,775,808 strings"),
        (raw_file([raw_key(b"k", 9, struct.pack("<IQ", 8, 1000))]), "the array 'k'"),
        (raw_file([raw_key(b"k", 9, struct.pack("<IQQ", 8, 1, 2**64 - 1))]), "the array 'k'"),
        (raw_file(n_keys=2**32), "number of metadata keys"),
        (raw_file(n_keys=100), "number of metadata keys"),
        (raw_file(n_tensors=2**63), "number of tensors"),
        (raw_file([b"\xff".join([string(b"a")[:-1], b""]) + bytes(8)]), "not text"),
        (raw_file([raw_key(b"k", 7, b"\x02")]), "truth value of 'k' is 2"),
        (raw_file([raw_key(b"k", 9, struct.pack("<IQ", 7, 2) + b"\1\2")]), "truth values of 'k'"),
        (raw_file([raw_key(b"k", 0, b"\1")] * 2), "'k' occurs twice"),
        # alignment
        (raw_file([raw_key(b"general.alignment", 4, struct.pack("<I", 2**30))]), "1,073,741,824, and"),
        (raw_file([raw_key(b"general.alignment", 4, struct.pack("<I", 0))]), "no power of two"),
        (raw_file([raw_key(b"general.alignment", 4, struct.pack("<I", 33))]), "no power of two"),
        (raw_file([raw_key(b"general.alignment", 8, string(b"32"))]), "no power of two"),
        (raw_file([raw_key(b"general.alignment", 7, b"\1")]), "no power of two"),
        # dimensions
        *(
            (raw_file(tensors=[raw_tensor(b"w", [1] * 4, n_dims=n)], data=F32_ROW), "dimensions")
            for n in (0, 5, 9, 1_000_000, 2**32 - 1)
        ),
        (raw_file(tensors=[raw_tensor(b"w", [0, 4])], data=F32_ROW), "empty shape"),
        # 2^16 in each of four dimensions is 0 mod 2^64; (2^32 + 1)(2^32 - 1)(2^64 - 1) is 1 mod 2^64
        (raw_file(tensors=[raw_tensor(b"w", [2**16] * 4)], data=F32_ROW), "the tensor 'w' reaches to byte"),
        (
            raw_file(tensors=[raw_tensor(b"w", [2**32 + 1, 2**32 - 1, 2**64 - 1, 1])], data=F32_ROW),
            "the tensor 'w' reaches to byte",
        ),
        (raw_file(tensors=[raw_tensor(b"w", [2**64 - 1])], data=F32_ROW), "the tensor 'w' reaches to byte"),
        (raw_file(tensors=[raw_tensor(b"w", [33], 2)], data=bytes(36)), "33 elements, and Q4_0 stores blocks of 32"),
        # places
        (raw_file(tensors=[raw_tensor(b"w", [8], offset=8)], data=bytes(64)), "offset 8, not a multiple of 32"),
        (raw_file(tensors=[raw_tensor(b"w", [8], offset=32)], data=F32_ROW), "the tensor 'w' reaches to byte"),
        (raw_file(tensors=[raw_tensor(b"w", [8], offset=2**64 - 32)], data=F32_ROW), "the tensor 'w' reaches"),
        (raw_file(tensors=[raw_tensor(b"w", [9])], data=F32_ROW), "the tensor 'w' reaches to byte"),
        (
            raw_file(tensors=[raw_tensor(b"w", [9]), raw_tensor(b"v", [8], offset=32)], data=bytes(64)),
            "'w' and 'v' overlap",
        ),
        (raw_file(tensors=[raw_tensor(b"w", [8]), raw_tensor(b"v", [8])], data=F32_ROW), "overlap"),
        (
            raw_file(tensors=[raw_tensor(b"w", [8]), raw_tensor(b"w", [8], offset=32)], data=bytes(64)),
            "'w' occurs twice",
        ),
        (raw_file(tensors=[raw_tensor(b"", [8])], data=F32_ROW), "length of 0"),
    ],
    ids=label,
)
def test_damage_is_named_at_once(made, data: bytes, says: str) -> None:
    path = made(data)
    begin = time.process_time()
    assert says in refusal(path)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (raw_file([raw_key(b"k", 13, b"")]), "'k' has value type 13"),
        (raw_file([raw_key(b"k", 9, struct.pack("<IQ", 9, 1))]), "'k' is an array of arrays"),
        (raw_file([raw_key(b"k", 9, struct.pack("<IQ", 77, 1))]), "'k' has the unknown element type 77"),
        (raw_file(tensors=[raw_tensor(b"w", [32], 99)], data=bytes(64)), "'w' has type 99; edgert knows F32 (0), F16"),
        (raw_file(tensors=[raw_tensor(b"w", [32], 31)], data=bytes(64)), "type 31 (Q4_0_4_4), which ggml has given up"),
    ],
    ids=label,
)
def test_unknown_types_are_listed(made, data: bytes, says: str) -> None:
    assert says in refusal(made(data), UnsupportedFormatError)


@pytest.mark.skipif(sys.platform == "win32", reason="needs sparse files")
@pytest.mark.parametrize(
    ("value", "says"),
    [
        (struct.pack("<Q", 2**30), "the value of 'k' reaches to byte 1,073,741,"),
        (struct.pack("<IQ", 10, 2**27), "the array 'k' reaches to byte 1,073,741,"),
        (struct.pack("<IQ", 8, 2**22), "metadata key 2 of 2 has a length of 0"),  # 4,194,304 empty strings
        (struct.pack("<IQ", 8, 2**22 + 1), "4,194,305 strings"),
        (struct.pack("<IQQ", 8, 2, 2**30), "the array 'k' reaches to byte 1,073,741,"),
    ],
    ids=label,
)
def test_large_files_that_are_all_header(made, value: bytes, says: str) -> None:
    """A 2 GiB file of zeros behind one key: refused within 2 s, and without holding its bytes."""
    kind = 8 if len(value) == 8 else 9
    path = made(raw_file([raw_key(b"k", kind, value)], n_keys=2).rstrip(b"\0"))
    os.truncate(path, 2**31)
    done = subprocess.run([sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True)
    seconds, grown, message = done.stdout.split(" ", 2)
    assert says in message
    assert float(seconds) < 2
    assert int(grown) < 200 << 20


@pytest.mark.skipif(sys.platform == "win32", reason="Windows tells no peak of memory this way")
@pytest.mark.parametrize(
    "data",
    [
        raw_file([struct.pack("<Q", 2**30) + b"k"]).ljust(160, b"\0"),
        raw_file([raw_key(b"general.alignment", 4, struct.pack("<I", 2**30))]).ljust(160, b"\0"),
    ],
    ids=["string", "alignment"],
)
def test_a_small_file_reserves_no_gigabytes(made, data: bytes) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE, made(data)], capture_output=True, text=True, check=True)
    seconds, grown, message = done.stdout.split(" ", 2)
    assert "1,073,741,824" in message
    assert float(seconds) < 1
    assert int(grown) < 100 << 20


MEASURE = """
import resource, sys, time
from edgert.quantize.gguf_file import GGUFFile, ModelFileError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin = time.process_time()
try:
    GGUFFile.open(sys.argv[1])
except ModelFileError as error:
    seconds = time.process_time() - begin
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(seconds, grown * (1 if sys.platform == "darwin" else 1024), error)
"""


def test_a_cut_download_tells_both_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "cut.gguf", lambda w: w.add_tensor("w", np.ones(100_000, np.float32)))
    size = path.stat().st_size
    with GGUFFile.open(path) as file:
        end = file.tensor("w").offset + file.tensor("w").n_bytes
    os.truncate(path, size // 2)
    assert f"it has {size // 2:,} bytes, and the tensor 'w' reaches to byte {end:,}" in refusal(path)


@settings(max_examples=300)
@given(data=st.binary(max_size=400), magic=st.booleans())
@example(data=b"", magic=True)
def test_any_bytes_end_cleanly(tmp_path: Path, data: bytes, magic: bool) -> None:
    path = tmp_path / "any.gguf"
    path.write_bytes((b"GGUF\x03\0\0\0" if magic else b"") + data)
    try:
        GGUFFile.open(path).close()
    except EdgertError as error:
        assert str(path) in str(error)
