"""Importance matrices: both file forms against gguf-py and the form's description, and against llama.cpp's tools."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from mixtures import N_USED, write_mixture

from edgert.errors import EdgertError, ModelFileError
from edgert.quantize.calibration import Statistics, calibrate
from edgert.quantize.engine import open_engine
from edgert.quantize.imatrix import check_of, read_imatrix, write_imatrix


def made_up() -> Statistics:
    rng = np.random.default_rng(0)
    return Statistics(
        {"blk.0.ffn_down.weight": rng.uniform(0, 9, (1, 64)), "blk.0.ffn_up_exps.weight": rng.uniform(0, 9, (4, 32))},
        {"blk.0.ffn_down.weight": np.array([1024]), "blk.0.ffn_up_exps.weight": np.array([1000, 0, 512, 536])},
        ["prose.txt", "ünïcode"],
        2,
        512,
    )


def dat(*entries: tuple[bytes, int, list[float]], end: bytes = b"") -> bytes:
    """The older form, built from its description."""
    parts = [struct.pack("<i", len(entries))]
    for name, n_calls, values in entries:
        parts.append(struct.pack("<i", len(name)) + name + struct.pack("<ii", n_calls, len(values)))
        parts.append(struct.pack(f"<{len(values)}f", *values))
    return b"".join([*parts, end])


def write_gguf(path: Path, tensors: dict[str, np.ndarray], **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, arch="")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", metadata.get("datasets", ["a.txt"]))
    writer.add_uint32("imatrix.chunk_count", metadata.get("chunk_count", 3))
    writer.add_uint32("imatrix.chunk_size", metadata.get("chunk_size", 256))
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_form_is_read_by_gguf_py_and_comes_back_whole(tmp_path: Path) -> None:
    written = made_up()
    path = tmp_path / "imatrix.gguf"
    write_imatrix(path, written)
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["prose.txt", "ünïcode"]
    assert reader.fields["imatrix.chunk_count"].contents() == 2
    assert reader.fields["imatrix.chunk_size"].contents() == 512
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert all(tensor.tensor_type == Type.F32 for tensor in tensors.values())
    assert tensors["blk.0.ffn_up_exps.weight.in_sum2"].shape.tolist() == [32, 4]
    assert tensors["blk.0.ffn_up_exps.weight.counts"].shape.tolist() == [1, 4]
    read = read_imatrix(path)
    assert (read.datasets, read.n_chunks, read.chunk_size) == (written.datasets, 2, 512)
    assert read.sums.keys() == written.sums.keys()
    for name in written.sums:
        np.testing.assert_array_equal(read.sums[name], written.sums[name].astype(np.float32))
        np.testing.assert_array_equal(read.counts[name], written.counts[name])
    assert read.unreached("blk.0.ffn_up_exps.weight") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["imatrix.gguf"]


def test_what_gguf_py_writes_is_read(tmp_path: Path) -> None:
    sums = np.arange(1, 65, dtype=np.float32)
    path = write_gguf(tmp_path / "a.gguf", {"x.in_sum2": sums, "x.counts": np.array([4], np.float32)})
    read = read_imatrix(path)
    np.testing.assert_array_equal(read.importance("x"), sums / 4)
    assert (read.datasets, read.n_chunks, read.chunk_size) == (["a.txt"], 3, 256)


def test_older_form(tmp_path: Path) -> None:
    path = tmp_path / "a.dat"
    end = struct.pack("<ii", 7, 5) + b"a.txt"
    path.write_bytes(dat((b"x", 2, [2.0, 4.0]), (b"y", 7, [7.0] * 3), end=end))
    read = read_imatrix(path)
    np.testing.assert_array_equal(read.importance("x"), [1, 2])
    np.testing.assert_array_equal(read.importance("y"), [1, 1, 1])
    assert (read.datasets, read.n_chunks) == (["a.txt"], 7)
    path.write_bytes(dat((b"x", 2, [2.0, 4.0])))  # as written in early 2024
    assert read_imatrix(path).n_chunks == 2
    written = made_up()
    write_imatrix(path, written)
    read = read_imatrix(path)
    for name in written.sums:
        expected = np.asarray(written.importance(name)).reshape(-1)
        np.testing.assert_allclose(read.importance(name), expected, rtol=1e-6)
    assert (read.datasets, read.n_chunks) == (["ünïcode"], 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.dat"]


@pytest.mark.parametrize(
    "tensors, complaint",
    {
        "no counts": ({"x.in_sum2": np.ones(4)}, "no counts of x"),
        "no sums": ({"x.counts": np.ones(1)}, "no sums of x"),
        "uneven": ({"x.in_sum2": np.ones(4), "x.counts": np.ones(3)}, "4 sums for 3"),
        "negative": ({"x.in_sum2": -np.ones(4), "x.counts": np.ones(1)}, "negative"),
        "no number": ({"x.in_sum2": np.full(4, np.nan), "x.counts": np.ones(1)}, "no number"),
        "infinite count": ({"x.in_sum2": np.ones(4), "x.counts": np.full(1, np.inf)}, "count of x"),
        "empty": ({}, "no entries"),
    }.values(),
)
def test_damaged_gguf(tensors: dict[str, np.ndarray], complaint: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {name: values.astype(np.float32) for name, values in tensors.items()})
    with pytest.raises(ModelFileError, match=rf"no sound importance matrix: .*{complaint}"):
        read_imatrix(path)


@pytest.mark.parametrize(
    "data, complaint",
    {
        "empty": (b"", "empty|reaches"),
        "text": (b"Once upon a time there was a matrix of importance.", "text file"),
        "zip": (b"PK\x03\x04" + bytes(100), "zip archive"),
        "cut": (dat((b"x", 2, [1.0] * 8))[:-4], "reaches to byte"),
        "no values": (dat((b"x", 2, []), (b"y", 2, [1.0] * 9)), "0 values"),
        "twice": (dat((b"x", 2, [1.0] * 4), (b"x", 2, [1.0] * 4)), "'x'"),
        "no number": (dat((b"x", 2, [float("nan")] * 4)), "no number"),
        "negative end": (dat((b"x", 2, [1.0] * 4), end=struct.pack("<i", -5)), "reaches|-5"),
    }.values(),
)
def test_damaged_dat(data: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "a.dat"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=complaint):
        read_imatrix(path)


def test_other_files_are_named(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ModelFileError, match="kind 'model', not an importance matrix"):
        read_imatrix(tiny_model("llama"))
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_imatrix(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="no tensor has statistics"):
        write_imatrix(tmp_path / "a.gguf", Statistics())
    for name in ("absent/a.gguf", "absent/a.dat"):
        with pytest.raises(ModelFileError, match="cannot be written"):
            write_imatrix(tmp_path / name, made_up())


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("imatrix")
    for name in ("a.gguf", "a.dat"):
        write_imatrix(folder / name, made_up())
    return {name: (folder / name).read_bytes() for name in ("a.gguf", "a.dat")}


@settings(max_examples=300)
@given(data=st.data(), name=st.sampled_from(["a.gguf", "a.dat"]))
def test_damage_never_surprises(data: st.DataObject, name: str, sound: dict[str, bytes], tmp_path: Path) -> None:
    """Whatever happens to a file, reading it gives statistics that can be used, or one of edgert's errors."""
    raw = bytearray(sound[name])
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))]
    path = tmp_path / name
    path.write_bytes(bytes(raw))
    try:
        statistics = read_imatrix(path)
    except EdgertError as error:
        assert str(path) in str(error)
        return
    for tensor, sums in statistics.sums.items():
        assert sums.shape[0] == len(statistics.counts[tensor])
        importance = statistics.importance(tensor)
        assert importance is None or (importance >= 0).all()


# llama.cpp's own tools


def tool(name: str) -> list[str]:
    folder = os.environ.get("LLAMA_CPP_TOOLS")
    found = shutil.which(name, path=folder) if folder else shutil.which(name)
    if not found:
        pytest.skip(f"needs llama.cpp's {name}, in PATH or in the folder LLAMA_CPP_TOOLS")
    return [found]


def run(*command: str) -> str:
    folder = str(Path(command[0]).parent)
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "LD_LIBRARY_PATH": folder}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


TEXT = "The world is a ship, and you are the hand that rows it. Hello and good morning to the world of islands!\n" * 60


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_llama_imatrix_finds_the_same(family: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """On the same file and text; llama.cpp leaves out a tied head."""
    program = tool("llama-imatrix")
    model = tiny_model(family, quant=Type.F16)
    (tmp_path / "text.txt").write_text(TEXT)
    theirs_path = tmp_path / "theirs.gguf"
    flags = (
        f"-m {model} -f {tmp_path}/text.txt -c 128 -b 128 --chunks 8 -t 1 --process-output --no-ppl -o {theirs_path}"
    )
    run(*program, *flags.split())
    theirs = read_imatrix(theirs_path)
    with open_engine(model, n_ctx=128, n_threads=2) as engine:
        ids = engine.tokenize(TEXT.removesuffix("\n"))
        chunks = ids[: 8 * 128].reshape(8, 128).copy()
        if engine.bos is not None:
            chunks[:, 0] = engine.bos
        ours = calibrate(engine, chunks, datasets=["text.txt"])
    assert ours.sums.keys() - theirs.sums.keys() <= {"token_embd.weight"}
    for name in theirs.sums:
        a, b = theirs.importance(name), ours.importance(name)
        assert a is not None and b is not None
        assert theirs.counts[name] == ours.counts[name] == [1024]
        assert np.abs(a - b).sum() < 0.02 * a.sum(), name


@pytest.mark.parametrize("family", ["llama", "qwen2moe"])
def test_llama_imatrix_finds_the_same_of_experts(family: str, tmp_path: Path) -> None:
    """Each expert by itself, and the shared one; a token near the border between two experts may take the other."""
    program = tool("llama-imatrix")
    model = write_mixture(tmp_path / "m.gguf", family, quant=Type.F32)
    (tmp_path / "text.txt").write_text(TEXT)
    flags = f"-m {model} -f {tmp_path}/text.txt -c 128 -b 128 --chunks 8 -t 1 --process-output --no-ppl"
    run(*program, *flags.split(), "-o", str(tmp_path / "theirs.gguf"))
    theirs = read_imatrix(tmp_path / "theirs.gguf")
    with open_engine(model, n_ctx=128, n_threads=1) as engine:
        ids = engine.tokenize(TEXT.removesuffix("\n"))
        ours = calibrate(engine, ids[: 8 * 128].reshape(8, 128), datasets=["text.txt"])
    assert any("_exps" in name for name in theirs.sums)
    assert ours.sums.keys() - theirs.sums.keys() <= {"token_embd.weight"}
    for name in theirs.sums:
        assert theirs.sums[name].shape == ours.sums[name].shape, name
        assert theirs.counts[name].sum() == ours.counts[name].sum() == 1024 * (N_USED if "_exps" in name else 1)
        assert np.abs(theirs.counts[name] - ours.counts[name]).sum() <= 0.01 * theirs.counts[name].sum(), name
        assert np.abs(theirs.sums[name] - ours.sums[name]).sum() < 0.02 * theirs.sums[name].sum(), name


def test_llama_cpp_takes_ours(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """llama-quantize makes of either form what ggml makes of the same importance."""
    program = tool("llama-quantize")
    model = tiny_model("llama", quant=Type.F16, n_embd=256, n_head=4, head_dim=64, n_ff=512)
    with open_engine(model, n_threads=2) as engine:
        ours = calibrate(engine, [engine.tokenize(TEXT)[:512]], datasets=["text"])
    results = []
    for name in ("ours.gguf", "ours.dat"):
        write_imatrix(tmp_path / name, ours)
        out = tmp_path / f"{name}.q4.gguf"
        said = run(*program, "--imatrix", str(tmp_path / name), str(model), str(out), "Q4_0", "1")
        assert f"have {len(ours.sums)} importance matrix entries" in said
        results.append({tensor.name: tensor.data for tensor in gguf.GGUFReader(out).tensors})
    plain = tmp_path / "plain.gguf"
    run(*program, str(model), str(plain), "Q4_0", "1")
    without = {tensor.name: tensor.data for tensor in gguf.GGUFReader(plain).tensors}
    assert any(not np.array_equal(without[name], results[0][name]) for name in without)
    for name in without:
        np.testing.assert_array_equal(results[0][name], results[1][name])


def test_an_imatrix_of_another_model_is_refused() -> None:
    shapes = {"token_embd.weight": (384, 32), "output.weight": (384, 32), "a": (8, 32), "e": (3, 8, 32)}
    ones, ten = np.ones((1, 32)), np.array([10])
    whole = Statistics(
        {"output.weight": ones, "a": ones, "e": np.ones((1, 96))}, dict.fromkeys(("output.weight", "a", "e"), ten)
    )
    assert check_of(whole, Path("i.dat"), shapes) == []
    assert whole.importance("e").shape == (3, 32)  # the older form has experts in one row
    whole.sums.pop("a")
    assert check_of(whole, Path("i.dat"), shapes) == ["i.dat does not have a"]
    with pytest.raises(ModelFileError, match=r"another model: its output\.weight has 32 columns, and here it has 64"):
        check_of(whole, Path("i.dat"), {"output.weight": (384, 64)})
    with pytest.raises(ModelFileError, match="of this one's matrices, such as b"):
        check_of(whole, Path("i.dat"), {"b": (8, 32)})
