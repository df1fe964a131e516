"""Packed weights kept on disk: a second load maps them, and whatever is wrong with a copy, the model runs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Type

from edgert import backends
from edgert.backends.base import Batch
from edgert.backends.cpu import copies, weights
from edgert.backends.cpu.backend import CpuBackend
from edgert.backends.cpu.memory import FreshMemory
from edgert.backends.cpu.weights import Packer
from edgert.cli.verbs import rm
from edgert.errors import RequestError
from edgert.quantize.gguf_file import GGUFFile, Tensor

TOKENS = list(range(2, 40))


@pytest.fixture
def model(tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tiny model of which copies are kept, in a folder of the test's own."""
    monkeypatch.setattr(copies, "WORTHWHILE", 0)
    monkeypatch.setattr(copies, "RESERVE", 0)
    monkeypatch.setattr(copies, "folder", lambda: tmp_path / "packed")
    monkeypatch.delenv(copies.SETTING, raising=False)
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model("llama", quant=Type.Q4_0).read_bytes())
    return path


def logits(path: Path, packed: list[str] | None = None) -> np.ndarray:
    """Of one load; waits for its copy. `packed` gets the tensors that were packed, not mapped."""
    with pytest.MonkeyPatch.context() as patch:
        if packed is not None:
            original = Packer._pack_part
            patch.setattr(
                Packer, "_pack_part", lambda self, m, part: (packed.append(part.rows.name), original(self, m, part))
            )
        with closing(backends.load(path, backend="cpu", n_ctx=64, n_threads=1)) as backend:
            found = backend.forward(Batch.of(TOKENS, 0, wanted="all")).copy()
            if backend._keeper:
                backend._keeper.wait()
            return found


@pytest.mark.parametrize("lent", [True, False], ids=["lent", "read"])
def test_all_that_is_packed_is_brought_into_memory_before(
    model: Path, monkeypatch: pytest.MonkeyPatch, lent: bool
) -> None:
    """A little at a time, each time before anything is written there; whoever reads the rows of the file."""
    held: dict[int, bytes] = {}  # by address, what it held when it was brought first

    def bring(address: int, n_bytes: int, advice: int) -> int:
        held.setdefault(address, ctypes.string_at(address, n_bytes))
        return -(advice != 23)

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)(bring)
    monkeypatch.setattr(weights, "system_call", lambda: ctypes.cast(callback, ctypes.c_void_p).value)
    monkeypatch.setattr(FreshMemory, "unit", 4096)
    if not lent:
        monkeypatch.setattr(Tensor, "lend", lambda self, start, n: None)
    with closing(backends.load(model, backend="cpu", n_ctx=64, n_threads=1)) as backend:
        assert isinstance(backend, CpuBackend)
        for matrix in backend._graph.weights.matrices():
            begin, n_bytes = matrix.data.ctypes.data, matrix.data.nbytes
            end = begin + n_bytes - n_bytes // matrix.n_panels  # the last panel may fill up an even number
            units = range(begin // 4096 * 4096, end, 4096)
            assert set(units) <= set(held)
            assert not any(any(held[unit]) for unit in units if begin <= unit and unit + 4096 <= end)


@pytest.mark.parametrize("setting", ["1G", "off"])
def test_where_memory_is_scarce_that_of_the_file_serves(
    model: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """But only if a copy is kept, which later loads read in its place."""
    monkeypatch.setenv(copies.SETTING, setting)
    expected = logits(model)
    for copy in copies.held():
        copy.remove()
    forgotten: dict[str, int] = {}
    original = Tensor.forget

    def forget(tensor: Tensor, start: int, n: int) -> None:
        forgotten[tensor.name] = forgotten.get(tensor.name, 0) + n
        original(tensor, start, n)

    scarce = type("Scarce", (FreshMemory,), {"scarce": property(lambda self: True, lambda self, value: None)})
    monkeypatch.setattr(weights, "FreshMemory", scarce)
    monkeypatch.setattr(Tensor, "forget", forget)
    packed: list[str] = []
    np.testing.assert_array_equal(logits(model, packed), expected)
    with GGUFFile.open(model) as file:
        assert packed and forgotten == {name: file.tensor(name).n_bytes for name in packed if setting != "off"}


def test_the_second_load_maps_what_the_first_packed(model: Path):
    first: list[str] = []
    expected = logits(model, first)
    assert "blk.0.ffn_down.weight" in first
    (copy,) = copies.held()
    assert copy.sources[0][0] == os.path.realpath(model) and not copy.is_stale
    second: list[str] = []
    np.testing.assert_array_equal(logits(model, second), expected)
    assert second == []
    assert not list(copies.folder().glob("*.part"))


@pytest.mark.parametrize("place", [0, 20, 60, 5000, -1, -5000])
def test_a_damaged_copy_is_made_again(model: Path, place: int):
    expected = logits(model)
    (copy,) = copies.held()
    content = bytearray(copy.path.read_bytes())
    content[place] ^= 16
    copy.path.write_bytes(content)
    packed: list[str] = []
    np.testing.assert_array_equal(logits(model, packed), expected)
    assert packed
    packed.clear()
    np.testing.assert_array_equal(logits(model, packed), expected)
    assert packed == []


@pytest.mark.parametrize("n", [0, 30, 5000])
def test_a_short_copy_is_made_again(model: Path, n: int):
    expected = logits(model)
    (copy,) = copies.held()
    os.truncate(copy.path, n)
    np.testing.assert_array_equal(logits(model), expected)
    assert copies.held()[0].n_bytes == copy.n_bytes


def test_a_changed_file_does_not_meet_its_old_copy(model: Path, tiny_model):
    logits(model)
    model.write_bytes(tiny_model("llama", quant=Type.Q8_0).read_bytes())
    packed: list[str] = []
    logits(model, packed)
    assert packed
    (copy,) = copies.held()  # the stale one has gone
    assert not copy.is_stale


def test_another_file_of_the_same_size_and_time_does_not_meet_its_copy(model: Path, tiny_model):
    logits(model)
    before = model.stat()
    model.write_bytes(tiny_model("llama", quant=Type.Q4_0, seed=1).read_bytes())
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (model.stat().st_size, model.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    found = logits(model)
    for copy in copies.held():
        copy.remove()
    np.testing.assert_array_equal(found, logits(model))


@pytest.mark.parametrize("place", [Path.symlink_to, Path.hardlink_to])
def test_the_copy_of_another_model_is_not_taken(model: Path, tmp_path: Path, tiny_model, place):
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny_model("llama", quant=Type.Q4_0, seed=1).read_bytes())
    expected = logits(model)
    (own,) = copies.held()
    logits(other)
    (others,) = [copy for copy in copies.held() if copy.path != own.path]
    content = others.path.read_bytes()
    own.path.unlink()
    place(own.path, others.path)
    np.testing.assert_array_equal(logits(model), expected)
    assert others.path.read_bytes() == content
    assert not own.path.is_symlink() and len(copies.held()) == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_a_pipe_in_its_place_is_not_waited_for(model: Path):
    expected = logits(model)
    (copy,) = copies.held()
    copy.path.unlink()
    os.mkfifo(copy.path)
    np.testing.assert_array_equal(logits(model), expected)
    assert len(copies.held()) == 1


def test_a_copy_that_cannot_be_touched_serves(model: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    def refuse(*_arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    expected = logits(model)
    monkeypatch.setattr(os, "utime", refuse)
    packed: list[str] = []
    np.testing.assert_array_equal(logits(model, packed), expected)
    assert packed == [] and "damaged" not in caplog.text


def test_turned_off(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(copies.SETTING, "off")
    logits(model)
    assert not copies.folder().exists()


def test_small_models_have_none(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copies, "WORTHWHILE", model.stat().st_size + 1)
    logits(model)
    assert not copies.folder().exists()


def test_a_full_disk_keeps_nothing_and_the_model_runs(model: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    expected = logits(model)
    for copy in copies.held():
        copy.remove()
    monkeypatch.setattr(os, "posix_fallocate", full)
    np.testing.assert_array_equal(logits(model), expected)
    assert not list(copies.folder().iterdir())


def test_what_was_unused_for_longest_makes_room(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    others = []
    for i in range(3):
        other = tmp_path / f"{i}.gguf"
        other.write_bytes(model.read_bytes())
        logits(other)
        (copy,) = [one for one in copies.held() if one.sources[0][0] == os.path.realpath(other)]
        os.utime(copy.path, (1000 + i, 1000 + i))
        others.append(copy)
    monkeypatch.setenv(copies.SETTING, str(int(2.5 * others[0].n_bytes)))
    logits(model)
    left = {one.path for one in copies.held()}
    assert len(left) == 2 and others[2].path in left and others[0].path not in left


def test_forgetting_a_model_removes_its_copy_alone(model: Path, tmp_path: Path):
    other = tmp_path / "other.gguf"
    other.write_bytes(model.read_bytes())
    logits(model)
    logits(other)
    assert copies.forget([other]) > 0
    assert [one.sources[0][0] for one in copies.held()] == [os.path.realpath(model)]


def test_rm_removes_the_copy_with_the_model(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EDGERT_MODELS", str(model.parent))
    logits(model)
    done = CliRunner().invoke(rm.command, ["model"])
    assert done.exit_code == 0, done.output
    assert "MB of packed weights" in done.output
    assert not model.exists() and copies.held() == []


@pytest.mark.parametrize(("text", "size"), [("40G", 40 << 30), ("off", 0), ("0", 0), ("1.5k", 1536), ("700", 700)])
def test_the_setting(monkeypatch: pytest.MonkeyPatch, text: str, size: int):
    monkeypatch.setenv(copies.SETTING, text)
    assert copies.limit() == size


@pytest.mark.parametrize("text", ["much", "-3G", "nan", "G", "1 2"])
def test_a_setting_that_is_no_size(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv(copies.SETTING, text)
    with pytest.raises(RequestError, match=r"EDGERT_PACKED_CACHE.*40G, or off"):
        copies.limit()
