"""The writer: files that every reader takes, nothing under the final name before it is whole, resuming."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgert.errors import DoesNotFitError, ModelFileError
from edgert.quantize.formats import FORMATS
from edgert.quantize.gguf_file import GGUFFile
from edgert.quantize.gguf_layout import TensorPlan
from edgert.quantize.gguf_value import Kind, Value
from edgert.quantize.gguf_writer import Writer

METADATA = {
    "general.architecture": Value.string("llama"),
    "a.u8": Value.number(Kind.U8, 255),
    "a.i8": Value.number(Kind.I8, -128),
    "a.u16": Value.u16(65535),
    "a.i16": Value.number(Kind.I16, -32768),
    "a.u32": Value.u32(2**32 - 1),
    "a.i32": Value.i32(-(2**31)),
    "a.u64": Value.number(Kind.U64, 2**64 - 1),
    "a.i64": Value.number(Kind.I64, -(2**63)),
    "a.f32": Value.f32(0.1),
    "a.f64": Value.number(Kind.F64, 0.1),
    "a.true": Value.boolean(True),
    "a.false": Value.boolean(False),
    "a.text": Value.string("grüße\0 {%"),
    "a.texts": Value.strings(["a", "", "ü", b"\xff\xfe"]),
    "a.none": Value.strings([]),
    "a.floats": Value.array(np.array([1.5, -2.5], np.float32)),
    "a.ints": Value.array(np.array([1, -2, 3], np.int32)),
    "a.bools": Value.bools([True, False]),
}
TENSORS: list[TensorPlan] = [
    ("token_embd.weight", (7, 64), FORMATS["Q4_0"]),
    ("blk.0.norm", (5,), FORMATS["F32"]),
    ("blk.0.experts", (3, 4, 32), FORMATS["Q8_0"]),
    ("blk.0.half", (2, 3), FORMATS["F16"]),
    ("output.weight", (2, 256), FORMATS["Q6_K"]),
]


def content(tensor: TensorPlan) -> np.ndarray:
    """uint8 (n_rows, row_bytes), finite in every format, different for each tensor."""
    name, shape, format = tensor
    n_rows = int(np.prod(shape[:-1]))
    rng = np.random.default_rng(list(name.encode()))
    return rng.integers(0, 60, (n_rows, format.row_bytes(shape[-1])), np.uint8)


def fill(writer: Writer, tensors: list[TensorPlan] = TENSORS) -> None:
    by_name = {tensor[0]: tensor for tensor in tensors}
    for name in writer.pending:
        for row in content(by_name[name]):
            writer.write(name, row)


def check(path: Path, tensors: list[TensorPlan] = TENSORS, metadata: dict[str, Value] = METADATA) -> None:
    """edgert's own reader finds the metadata and every byte."""
    with GGUFFile.open(path) as file:
        found = {key: Value(Kind(kind), data) for key in file.metadata for kind, data in [file.raw_value(key)]}
        assert {key: value for key, value in found.items() if not key.startswith("split.")} == metadata
        assert [(t.name, t.shape, t.format) for t in file.tensors.values()] == tensors
        for tensor in tensors:
            assert np.array_equal(file.tensors[tensor[0]].data, content(tensor))


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".gguf")


def test_ggufs_reader_finds_what_was_written(tmp_path: Path):
    with Writer(tmp_path / "m.gguf", METADATA, TENSORS) as writer:
        fill(writer)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    for key, value in METADATA.items():
        field = reader.fields[key]
        assert field.types[0] == value.kind
        decoded = value.decode()
        if value.kind == Kind.ARRAY and key not in ("a.texts", "a.none"):
            assert list(field.contents()) == decoded.tolist()
        elif value.kind != Kind.ARRAY:
            assert field.contents() == decoded
    assert bytes(reader.fields["a.texts"].parts[reader.fields["a.texts"].data[3]]) == b"\xff\xfe"
    for tensor, (name, shape, format) in zip(reader.tensors, TENSORS, strict=True):
        assert (tensor.name, tensor.tensor_type) == (name, format.ggml_id)
        assert tensor.shape.tolist() == list(reversed(shape))
        assert tensor.data.tobytes() == content((name, shape, format)).tobytes()
    check(tmp_path / "m.gguf")
    assert leftovers(tmp_path) == []


def test_equal_to_what_ggufs_writer_makes(tmp_path: Path):
    """Byte for byte, padding included."""
    other = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    other.add_uint32("a.u32", 7)
    other.add_array("a.texts", ["x", "yz"])
    other.add_bool("a.true", True)
    for name, shape, format in TENSORS:
        data = content((name, shape, format)).reshape(*shape[:-1], -1)
        other.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(format.ggml_id))
    other.write_header_to_file()
    other.write_kv_data_to_file()
    other.write_tensors_to_file()
    other.close()
    metadata = {
        "general.architecture": Value.string("llama"),
        "a.u32": Value.u32(7),
        "a.texts": Value.strings(["x", "yz"]),
        "a.true": Value.boolean(True),
    }

    with Writer(tmp_path / "ours.gguf", metadata, TENSORS) as writer:
        fill(writer)
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment_of_the_metadata_is_kept(tmp_path: Path, alignment: int):
    metadata = {**METADATA, "general.alignment": Value.u32(alignment)}
    with Writer(tmp_path / "m.gguf", metadata, TENSORS) as writer:
        fill(writer)
    check(tmp_path / "m.gguf", metadata=metadata)
    assert gguf.GGUFReader(tmp_path / "m.gguf").alignment == alignment


def test_shards_are_named_and_filled_as_gguf_split_does(tmp_path: Path):
    with Writer(tmp_path / "m.gguf", METADATA, TENSORS, split_max_size=500) as writer:
        fill(writer)
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == [f"m-{i + 1:05d}-of-00003.gguf" for i in range(3)]
    assert writer.paths == tuple(paths)
    readers = [gguf.GGUFReader(path) for path in paths]
    for i, reader in enumerate(readers):
        keys = {key: field for key, field in reader.fields.items() if key.startswith("split.")}
        assert {key: field.contents() for key, field in keys.items()} == {
            "split.no": i,
            "split.count": 3,
            "split.tensors.count": len(TENSORS),
        }
        assert [field.types[0].name for field in keys.values()] == ["UINT16", "UINT16", "INT32"]
        assert ("a.text" in reader.fields) == (i == 0)
        assert len(reader.tensors) == 1 or sum(-(-t.n_bytes // 32) * 32 for t in reader.tensors) <= 500
    assert [t.name for reader in readers for t in reader.tensors] == [t[0] for t in TENSORS]
    check(paths[1])


def test_one_shard_is_a_plain_file(tmp_path: Path):
    with Writer(tmp_path / "m.gguf", METADATA, TENSORS, split_max_size=10**9) as writer:
        fill(writer)
    assert writer.paths == (tmp_path / "m.gguf",)
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        assert "split.count" not in file.metadata


def test_nothing_has_the_name_before_the_end(tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    with Writer(path, METADATA, TENSORS) as writer:
        fill(writer)
        assert path.read_bytes() == b"old"
    check(path)


@pytest.mark.parametrize("split", [None, 500])
@pytest.mark.parametrize("n_done", [0, 1, 4, 5])
def test_resumes_after_the_last_complete_tensor(tmp_path: Path, n_done: int, split: int | None):
    path = tmp_path / "m.gguf"

    class Stop(Exception):
        pass

    with pytest.raises(Stop), Writer(path, METADATA, TENSORS, split_max_size=split) as writer:
        for tensor in TENSORS[:n_done]:
            writer.write(tensor[0], content(tensor))
        if n_done < len(TENSORS):
            writer.write(TENSORS[n_done][0], content(TENSORS[n_done])[:1])  # a part of the next
        raise Stop
    assert not list(tmp_path.glob("*.gguf"))
    with Writer(path, METADATA, TENSORS, split_max_size=split, resume=True) as writer:
        done = n_done + (TENSORS[n_done][1] == (5,) if n_done < len(TENSORS) else 0)
        assert writer.pending == [tensor[0] for tensor in TENSORS[done:]]
        fill(writer)
    check(writer.paths[0])
    assert leftovers(tmp_path) == []


CHANGES: dict[str, dict[str, Any]] = {
    "metadata": {"metadata": {**METADATA, "a.u8": Value.number(Kind.U8, 254)}},
    "tensors": {"tensors": [(TENSORS[0][0], TENSORS[0][1], FORMATS["Q4_1"]), *TENSORS[1:]]},
    "fingerprint": {"fingerprint": "another"},
    "no resume": {"resume": False},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_plan_begins_anew(tmp_path: Path, change: str):
    plan: dict[str, Any] = {"metadata": METADATA, "tensors": TENSORS, "fingerprint": "one", "resume": True}
    writer = Writer(tmp_path / "m.gguf", **plan)
    writer.write(TENSORS[0][0], content(TENSORS[0]))
    writer.close()
    plan |= CHANGES[change]
    with Writer(tmp_path / "m.gguf", **plan) as writer:
        assert len(writer.pending) == len(TENSORS)
        fill(writer, plan["tensors"])
    check(tmp_path / "m.gguf", plan["tensors"], plan["metadata"])


def test_a_harmed_tensor_is_written_again(tmp_path: Path):
    writer = Writer(tmp_path / "m.gguf", METADATA, TENSORS)
    for tensor in TENSORS[:3]:
        writer.write(tensor[0], content(tensor))
    writer.close()
    part = tmp_path / "m.gguf.part"
    data = bytearray(part.read_bytes())
    start = data.find(content(TENSORS[1]).tobytes())
    data[start] ^= 1
    part.write_bytes(data)
    with Writer(tmp_path / "m.gguf", METADATA, TENSORS, resume=True) as writer:
        assert writer.pending == [tensor[0] for tensor in TENSORS[1:]]
        fill(writer)
    check(tmp_path / "m.gguf")


def test_an_end_between_two_renames_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Old shards are never mixed with new ones: the old first one goes before the new ones come."""
    for name in ("m-00001-of-00003.gguf", "m-00002-of-00003.gguf"):
        (tmp_path / name).write_bytes(b"old")
    replace, n_renamed = os.replace, 0

    def failing(source: Path, target: Path) -> None:
        nonlocal n_renamed
        if n_renamed == 1:
            raise KeyboardInterrupt
        replace(source, target)
        n_renamed += 1

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(KeyboardInterrupt), Writer(tmp_path / "m.gguf", METADATA, TENSORS, split_max_size=500) as writer:
        fill(writer)
    assert not (tmp_path / "m-00001-of-00003.gguf").exists()
    monkeypatch.setattr(os, "replace", replace)
    with Writer(tmp_path / "m.gguf", METADATA, TENSORS, split_max_size=500, resume=True) as writer:
        assert writer.pending == []
    check(writer.paths[0])
    assert leftovers(tmp_path) == []


def test_full_disk_known_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "m.gguf").write_bytes(b"old")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(DoesNotFitError, match=r"m\.gguf needs 0\.0 MB more and its disk has 0\.0 MB free"):
        Writer(tmp_path / "m.gguf", METADATA, TENSORS)
    assert (tmp_path / "m.gguf").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


FULL_DISK = """
import resource, signal, sys
sys.path[:0] = sys.argv[2:]
from test_gguf_writer import METADATA, TENSORS, Writer, fill
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1200, 1200))
with Writer(sys.argv[1], METADATA, TENSORS) as writer:
    fill(writer)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs the POSIX limit of file sizes")
def test_a_file_system_that_refuses_more_bytes(tmp_path: Path):
    """The system's own refusal in the middle of a write: one sentence, and a resume that succeeds."""
    args = [sys.executable, "-c", FULL_DISK, str(tmp_path / "m.gguf"), str(Path(__file__).parent), *sys.path]
    result = subprocess.run(args, capture_output=True, text=True)
    assert result.returncode == 1
    assert "DoesNotFitError: " in result.stderr.splitlines()[-1]
    assert not (tmp_path / "m.gguf").exists()
    with Writer(tmp_path / "m.gguf", METADATA, TENSORS, resume=True) as writer:
        fill(writer)
    check(tmp_path / "m.gguf")


def test_no_space_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer = Writer(tmp_path / "m.gguf", METADATA, TENSORS)
    writer.write(TENSORS[0][0], content(TENSORS[0]))

    class Full:
        def seek(self, offset: int) -> None: ...
        def close(self) -> None: ...
        def write(self, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "_file", Full())
    with pytest.raises(DoesNotFitError, match=r"The disk became full while .*m\.gguf was written: .* resume"):
        writer.write(TENSORS[1][0], content(TENSORS[1]))
    writer.close()
    with Writer(tmp_path / "m.gguf", METADATA, TENSORS, resume=True) as writer:
        assert len(writer.pending) == len(TENSORS) - 1
        fill(writer)
    check(tmp_path / "m.gguf")


def test_two_writers_of_one_file(tmp_path: Path):
    pytest.importorskip("fcntl")
    first = Writer(tmp_path / "m.gguf", METADATA, TENSORS)
    with pytest.raises(ModelFileError, match=r"m\.gguf is being written by another process"):
        Writer(tmp_path / "m.gguf", METADATA, TENSORS, resume=True)
    fill(first)
    first.finish()
    first.close()
    check(tmp_path / "m.gguf")


def test_wrong_use_is_a_value_error(tmp_path: Path):
    writer = Writer(tmp_path / "m.gguf", METADATA, TENSORS)
    with pytest.raises(ValueError, match=r"blk\.0\.norm is not the next"):
        writer.write("blk.0.norm", np.zeros(20, np.uint8))
    with pytest.raises(ValueError, match="no room for"):
        writer.write(TENSORS[0][0], np.zeros(10_000, np.uint8))
    with pytest.raises(ValueError, match=r"token_embd\.weight is not complete"):
        writer.finish()
    writer.close()
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (("x" * 64, (1,), FORMATS["F32"]), "more than the 63 bytes"),
        (("x", (3, 0), FORMATS["F32"]), r"the shape \(3, 0\)"),
        (("x", (1, 1, 1, 1, 1), FORMATS["F32"]), "1 to 4 dimensions"),
        (("x", (4, 33), FORMATS["Q4_0"]), "rows of 33 elements, and Q4_0 stores blocks of 32"),
        (TENSORS[0], "would be written twice"),
    ],
)
def test_what_gguf_cannot_hold(tmp_path: Path, tensor: TensorPlan, message: str):
    with pytest.raises(ModelFileError, match=message):
        Writer(tmp_path / "m.gguf", METADATA, [*TENSORS, tensor])
    assert list(tmp_path.iterdir()) == []


def test_targets_that_are_no_files(tmp_path: Path):
    with pytest.raises(ModelFileError, match="does not exist"):
        Writer(tmp_path / "none" / "m.gguf", METADATA, TENSORS)
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ModelFileError, match="a folder or device"):
        Writer(tmp_path / "folder.gguf", METADATA, TENSORS)


def test_a_link_is_followed(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "m.gguf").symlink_to(tmp_path / "disk" / "real.gguf")
    with Writer(tmp_path / "m.gguf", METADATA, TENSORS) as writer:
        fill(writer)
    assert (tmp_path / "m.gguf").is_symlink()
    check(tmp_path / "disk" / "real.gguf")


KILLED = """
import sys
at_last = int(sys.argv[2])  # the tensor before which it waits to be killed
sys.path[:0] = sys.argv[3:]
import numpy as np
from test_gguf_writer import BIG, METADATA, Writer, content
with Writer(sys.argv[1], METADATA, BIG, split_max_size=3 << 20, resume=True) as writer:
    print("ready", flush=True)
    for i, tensor in enumerate(BIG):
        if tensor[0] in writer.pending:
            if i >= at_last:
                sys.stdin.read()
            for row in content(tensor):
                writer.write(tensor[0], row)
    if at_last < len(BIG):
        sys.stdin.read()
print("end", flush=True)
"""
BIG: list[TensorPlan] = [(f"blk.{i}.weight", (400, 4096), FORMATS["Q4_0"]) for i in range(12)]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("moments", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_many_moments(tmp_path: Path, moments: int, split: bool):
    """SIGKILL at random: under the final name there is nothing or the old file, and a resume ends well."""
    script = KILLED if split else KILLED.replace("split_max_size=3 << 20, ", "")
    path = tmp_path / "m.gguf"
    first = tmp_path / "m-00001-of-00004.gguf" if split else path
    if not split:
        path.write_bytes(b"old")
    rng = random.Random(1)
    n_killed = n_done = 0

    def arguments(at_last: int) -> list[str]:
        return [sys.executable, "-c", script, str(path), str(at_last), str(Path(__file__).parent), *sys.path]

    for i in range(moments):
        at_last = len(BIG) if i % 2 else rng.randrange(len(BIG))  # every other one may come to its end
        with subprocess.Popen(arguments(at_last), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, 0.03))
            process.kill()
            ended = process.stdout.read() == "end\n"
        if ended:
            check(first, BIG)
            n_done += 1
            first.unlink()
            continue
        n_killed += 1
        if first.exists() and first.read_bytes() != b"old":
            check(first, BIG)  # killed after the rename
            first.unlink()
    assert n_killed >= moments // 2
    subprocess.run(arguments(len(BIG)), check=True, capture_output=True)
    check(first, BIG)
    assert leftovers(tmp_path) == []


def test_figures_may_be_set_when_all_tensors_are_written(tmp_path: Path):
    writer = Writer(tmp_path / "m.gguf", METADATA, TENSORS)
    with writer:
        for tensor in TENSORS:
            writer.write(tensor[0], content(tensor))
        writer.update({"a.f32": Value.f32(0.75), "a.u64": Value.number(Kind.U64, 7)})
        assert GGUFFile.open(*writer.written()).metadata["a.f32"] == 0.75
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        assert file.metadata["a.f32"] == 0.75 and file.metadata["a.u64"] == 7 and file.metadata["a.i64"] == -(2**63)
        for tensor in TENSORS:
            np.testing.assert_array_equal(file.tensors[tensor[0]].data, content(tensor))


@pytest.mark.parametrize(
    ("key", "value"), [("a.new", Value.f32(1)), ("a.f32", Value.u32(1)), ("a.text", Value.string("x"))]
)
def test_values_without_a_place_in_the_header_are_refused(tmp_path: Path, key: str, value: Value):
    writer = Writer(tmp_path / "m.gguf", METADATA, TENSORS)
    with pytest.raises(ValueError, match=key):
        writer.update({key: value})
    writer.close()
