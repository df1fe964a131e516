"""Reading GGUF: what gguf's writer wrote comes back, in the types that were promised."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import raw_file, raw_key, string, write
from hypothesis import given, settings
from hypothesis import strategies as st

from edgert.errors import ModelFileError
from edgert.quantize.formats import FORMATS
from edgert.quantize.gguf_file import GGUFFile


@pytest.fixture
def made(tmp_path: Path):
    """made(bytes) writes them as x.gguf and returns the path."""

    def make(data: bytes) -> Path:
        path = tmp_path / "x.gguf"
        path.write_bytes(data)
        return path

    return make


scalars = st.one_of(
    st.text(min_size=1, max_size=40),  # the writer leaves out empty ones
    st.booleans(),
    st.integers(-(2**31), 2**31 - 1),
    st.floats(width=32, allow_nan=False),
    st.lists(st.text(max_size=20), min_size=1, max_size=8),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8),
    st.lists(st.booleans(), min_size=1, max_size=8),
)


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_int32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


names = st.text(st.characters(codec="ascii", categories=["Ll", "Nd"]), min_size=1, max_size=30)


@settings(max_examples=60)
@given(
    values=st.dictionaries(names, scalars, max_size=6),
    shapes=st.dictionaries(names, st.lists(st.integers(1, 5), min_size=1, max_size=4), max_size=5),
    alignment=st.sampled_from([None, 8, 32, 64, 4096]),
    seed=st.integers(0, 2**32),
)
def test_round_trip(
    tmp_path: Path, values: dict[str, object], shapes: dict[str, list[int]], alignment: int | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    def fill(writer: gguf.GGUFWriter) -> None:
        if alignment is not None:
            writer.add_custom_alignment(alignment)
        for key, value in values.items():
            add(writer, "my." + key, value)
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor)

    with GGUFFile.open(write(tmp_path / "trip.gguf", fill)) as file:
        assert file.architecture == "llama"
        for key, value in values.items():
            found = file.metadata["my." + key]
            if isinstance(found, np.ndarray):
                found = found.tolist()
            assert found == value
            assert type(found) is type(value)
        assert list(file.tensors) == list(tensors)
        for name, tensor in tensors.items():
            found = file.tensors[name]
            assert found.shape == tensor.shape
            assert found.format is FORMATS["F32"]
            assert np.array_equal(found.dequantize(), tensor)
            assert (found.n_rows, found.row_bytes) == found.data.shape
            assert found.n_cols == tensor.shape[-1]


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value(made, version: int) -> None:
    packed = {
        0: ("<B", 200), 1: ("<b", -5), 2: ("<H", 60000), 3: ("<h", -300), 4: ("<I", 2**32 - 1), 5: ("<i", -(2**31)),
        6: ("<f", 0.5), 7: ("<?", True), 10: ("<Q", 2**64 - 1), 11: ("<q", -(2**63)), 12: ("<d", 0.1),
    }  # fmt: skip
    keys = [raw_key(b"k%d" % kind, kind, struct.pack(code, value)) for kind, (code, value) in packed.items()]
    for kind, (code, value) in packed.items():
        array = struct.pack("<IQ", kind, 2) + struct.pack(code, value) * 2
        keys.append(raw_key(b"a%d" % kind, 9, array))
    keys.append(raw_key(b"empty", 9, struct.pack("<IQ", 8, 0)))
    with GGUFFile.open(made(raw_file(keys, version=version))) as file:
        assert file.version == version
        for kind, (_, value) in packed.items():
            assert file.metadata[f"k{kind}"] == value
            assert type(file.metadata[f"k{kind}"]) is type(value)
            assert file.metadata[f"a{kind}"].tolist() == [value, value]
        assert file.metadata["empty"] == []
        assert file.tensors == {}


def test_strings_that_are_no_utf8(made) -> None:
    texts = [b"good", b"\xe4\xbd", b"", b"\xff", "好".encode()]
    value = struct.pack("<IQ", 8, len(texts)) + b"".join(map(string, texts))
    keys = [raw_key(b"tokens", 9, value), raw_key(b"one", 8, string(b"a\xffb"))]
    with GGUFFile.open(made(raw_file(keys))) as file:
        assert file.metadata.length("tokens") == 5
        assert file.metadata["tokens"] == ["good", "�", "", "�", "好"]
        assert file.metadata.strings("tokens") == texts
        assert file.metadata["one"] == "a�b"
        assert file.metadata["tokens"] is file.metadata["tokens"]
        assert file.metadata.length("one") is None
        with pytest.raises(TypeError, match="one"):
            file.metadata.strings("one")


def test_quantized_rows_and_reading_without_the_mapping(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_0
    packed = gguf.quants.quantize(values, kind)
    path = write(tmp_path / "q.gguf", lambda w: w.add_tensor("w", packed, raw_dtype=kind))
    file = GGUFFile.open(path)
    tensor = file.tensor("w")
    assert (tensor.shape, tensor.format.name, tensor.n_bytes, tensor.row_bytes) == ((6, 64), "Q4_0", 216, 36)
    assert np.array_equal(tensor.data, packed)
    assert np.array_equal(tensor.dequantize(), gguf.quants.dequantize(packed, kind))
    assert path.read_bytes()[tensor.offset : tensor.offset + 216] == packed.tobytes()
    assert tensor.path == path
    whole = np.empty((6, 36), np.uint8)
    tensor.read_into(whole)
    assert np.array_equal(whole, packed)
    part = bytearray(36)
    tensor.read_into(part, start=2 * 36)
    assert part == packed[2].tobytes()
    for buffer, start in ((part, 181), (part, -1), (bytearray(217), 0)):
        with pytest.raises(ValueError, match="216 bytes"):
            tensor.read_into(buffer, start)
    with pytest.raises(ValueError, match="read-only"):
        tensor.data[0, 0] = 1
    held = tensor.data
    file.close()
    file.close()
    assert np.array_equal(held, packed)  # an array that someone holds outlives the file
    with pytest.raises(ValueError, match="closed"):
        _ = tensor.data
    with pytest.raises(ValueError, match="closed"):
        tensor.read_into(part)


def test_a_file_that_shrinks_while_open(tmp_path: Path) -> None:
    path = write(tmp_path / "s.gguf", lambda w: w.add_tensor("w", np.ones(4096, np.float32)))
    with GGUFFile.open(path) as file:
        os.truncate(path, path.stat().st_size - 4096)
        with pytest.raises(ModelFileError, match="shorter"):
            file.tensor("w").read_into(bytearray(16384))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="leases are Linux's")
def test_bytes_of_a_file_that_is_held_are_lent(tmp_path: Path) -> None:
    """While it is held nobody writes to it, and where somebody wants to, nothing more is lent."""
    values = np.arange(1 << 20, dtype=np.float32)
    path = write(tmp_path / "held.gguf", lambda w: w.add_tensor("w", values))
    with GGUFFile.open(path) as file:
        tensor = file.tensor("w")
        assert tensor.lend(0, 100) is None
        with file.held():
            lent = tensor.lend(12, 4_000_000)
            if lent is None:
                pytest.skip("this file system has no leases")
            assert np.array_equal(lent, values.view(np.uint8)[12:4_000_012])
            tensor.take_back(12, 4_000_000)
            assert np.array_equal(lent, values.view(np.uint8)[12:4_000_012])  # it comes again when it is looked at
            with subprocess.Popen([sys.executable, "-c", TRUNCATE, path], stdout=subprocess.PIPE) as other:
                assert other.stdout and other.stdout.read(1) == b"b"  # it is about to
                deadline = time.monotonic() + 60
                while tensor.lend(0, 100) is not None and time.monotonic() < deadline:
                    time.sleep(0.001)
                assert tensor.lend(0, 100) is None and path.stat().st_size > 4_000_000
                with pytest.raises(BlockingIOError):
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                buffer = bytearray(100)
                tensor.read_into(buffer)
                assert bytes(buffer) == values[:25].tobytes()
                file.close()  # which ends it, too, at once, though the array keeps the mapping
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                assert other.wait(60) == 0
        assert path.stat().st_size == 0


TRUNCATE = "import os, sys; print('b', flush=True); os.truncate(sys.argv[1], 0)"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers(tmp_path: Path, bad: float) -> None:
    weights = np.ones((4, 8), np.float32)
    weights[2, 3] = bad

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("good.weight", np.ones(8, np.float32))
        writer.add_tensor("blk.0.bad.weight", weights)

    with GGUFFile.open(write(tmp_path / "n.gguf", fill)) as file:
        file.tensor("good.weight").check_finite()
        with pytest.raises(ModelFileError, match=r"blk\.0\.bad\.weight"):
            file.tensor("blk.0.bad.weight").check_finite()


# Typed access


@pytest.fixture
def typed(tmp_path: Path):
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32("n", 7)
        writer.add_float32("eps", 0.5)
        writer.add_float32("nan", float("nan"))
        writer.add_float32("inf", float("inf"))
        writer.add_bool("flag", True)
        writer.add_array("names", ["a", "b"])
        writer.add_array("sizes", [1, 2])

    with GGUFFile.open(write(tmp_path / "t.gguf", fill)) as file:
        yield file


def test_get(typed: GGUFFile) -> None:
    assert typed.get("n", int) == 7
    assert typed.get("n", float) == 7.0
    assert type(typed.get("n", float)) is float
    assert typed.get("eps", float) == 0.5
    assert typed.get("flag", bool) is True
    assert typed.get("names", list) == ["a", "b"]
    assert typed.get("sizes", np.ndarray).tolist() == [1, 2]
    assert typed.get("absent", int, 3) == 3
    assert typed.get("absent", int, None) is None


@pytest.mark.parametrize(
    ("key", "kind", "says"),
    [
        ("absent", int, "lacks the key 'absent'"),
        ("n", str, "'n' should be a string and is an integer"),
        ("n", bool, "'n' should be true or false and is an integer"),
        ("flag", int, "'flag' should be an integer and is true or false"),
        ("eps", int, "'eps' should be an integer and is a number"),
        ("names", np.ndarray, "'names' should be an array of numbers and is an array of strings"),
        ("sizes", int, "'sizes' should be an integer and is an array of numbers"),
        ("nan", float, "'nan' is nan"),
        ("inf", float, "'inf' is inf"),
    ],
)
def test_get_names_the_key(typed: GGUFFile, key: str, kind: type, says: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        typed.get(key, kind)
    assert says in str(caught.value)
    if key != "absent":
        with pytest.raises(ModelFileError):  # a default is for a missing key, not for a wrong one
            typed.get(key, kind, None)


def test_missing_tensor_is_named(typed: GGUFFile) -> None:
    with pytest.raises(ModelFileError, match=r"'blk\.3\.attn_q\.weight', which llama needs"):
        typed.tensor("blk.3.attn_q.weight")


def test_a_vocabulary_without_tensors_needs_no_data_section(made) -> None:
    data = raw_file([raw_key(b"general.architecture", 8, string(b"llama"))])
    with GGUFFile.open(made(data.rstrip(b"\0"))) as file:
        assert file.architecture == "llama"
        assert not file.tensors


def test_architecture_is_required_by_name(made) -> None:
    with GGUFFile.open(made(raw_file())) as file, pytest.raises(ModelFileError, match=r"general\.architecture"):
        _ = file.architecture


def test_gemmas_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    """262,144 tokens with scores and types: under 0.3 s of the processor, the best of three."""
    n = 262_144

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list([f"▁token{i}" for i in range(n)])
        writer.add_token_scores([-float(i) for i in range(n)])
        writer.add_token_types([1] * n)

    path = write(tmp_path / "v.gguf", fill, "gemma3")
    best = float("inf")
    for _ in range(3):
        begin = time.process_time()
        with GGUFFile.open(path) as file:
            tokens = file.metadata["tokenizer.ggml.tokens"]
            scores = file.metadata["tokenizer.ggml.scores"]
            types = file.metadata["tokenizer.ggml.token_type"]
        best = min(best, time.process_time() - begin)
    assert (len(tokens), tokens[-1], scores[-1], types[-1]) == (n, f"▁token{n - 1}", -float(n - 1), 1)
    assert (scores.dtype, types.dtype) == (np.float32, np.int32)
    assert best < 0.3


def test_real_model_equals_gguf_reader(smollm2_path: Path) -> None:
    reader = gguf.GGUFReader(smollm2_path)
    with GGUFFile.open(smollm2_path) as file:
        assert set(file.metadata) == {key for key in reader.fields if not key.startswith("GGUF.")}
        for key, entry in reader.fields.items():
            if not key.startswith("GGUF."):
                found = file.metadata[key]
                assert (found.tolist() if isinstance(found, np.ndarray) else found) == entry.contents()
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for theirs in reader.tensors:
            ours = file.tensor(theirs.name)
            assert ours.offset == theirs.data_offset
            assert ours.shape == tuple(int(n) for n in reversed(theirs.shape))
            assert ours.format.name == theirs.tensor_type.name
            assert ours.n_bytes == theirs.n_bytes
            ours.check_finite()
