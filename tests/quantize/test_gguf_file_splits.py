"""Models in several shards: opened by any of them, and refused unless all belong together."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import raw_file, raw_key, raw_tensor, refusal, string, write

from edgert.errors import ModelFileError
from edgert.quantize.gguf_file import GGUFFile


def shard_name(number: int, count: int, stem: str = "model") -> str:
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    """A model of five tensors in three shards, written by gguf's writer."""

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(1)
        for index in range(5):
            writer.add_tensor(f"blk.{index}.weight", np.full((2, 8), index, np.float32))

    write(tmp_path / "model.gguf", fill, split_max_tensors=2)
    paths = [tmp_path / shard_name(number, 3) for number in (1, 2, 3)]
    assert all(path.is_file() for path in paths)
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_opens_the_whole_model(split: list[Path], given: int) -> None:
    with GGUFFile.open(split[given]) as file:
        assert file.paths == tuple(split)
        assert file.path == split[0]
        assert file.architecture == "llama"
        assert file.get("llama.block_count", int) == 1
        assert file.n_bytes == sum(path.stat().st_size for path in split)
        assert list(file.tensors) == [f"blk.{index}.weight" for index in range(5)]
        for index in range(5):
            tensor = file.tensor(f"blk.{index}.weight")
            assert tensor.path == split[index // 2]
            assert (tensor.dequantize() == index).all()
            whole = np.empty(tensor.data.shape, np.uint8)
            tensor.read_into(whole)
            assert np.array_equal(whole, tensor.data)


def test_shards_behind_links_are_found_by_the_links_names(split: list[Path], tmp_path: Path) -> None:
    """Caches keep files under their hashes, with links that have the published names."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for index, path in enumerate(split):
        shutil.move(path, blobs / f"{index:064x}")
        (snapshot / path.name).symlink_to(blobs / f"{index:064x}")
    with GGUFFile.open(snapshot / split[0].name) as file:
        assert len(file.tensors) == 5


@pytest.mark.parametrize(("given", "absent"), [(0, 1), (0, 2), (2, 0)])
def test_a_missing_shard_is_named(split: list[Path], given: int, absent: int) -> None:
    split[absent].unlink()
    message = refusal(split[given])
    assert f"part {given + 1} of 3" in message
    assert f"{split[absent].name} is missing" in message


def test_missing_shards_are_found_before_a_weight_is_read(tmp_path: Path) -> None:
    """Of 65,535 shards one is there: the first names are listed, the rest is counted."""
    path = tmp_path / shard_name(1, 65535)
    path.write_bytes(handmade(0, 65535, 7))
    assert "and 65529 more" in refusal(path)


def handmade(no: int, count: int, total: int, names: tuple[bytes, ...] = (), **other: bytes) -> bytes:
    keys = [
        raw_key(b"split.no", 2, struct.pack("<H", no)),
        raw_key(b"split.count", 2, struct.pack("<H", count)),
        raw_key(b"split.tensors.count", 5, struct.pack("<i", total)),
    ]
    keys += [raw_key(key.encode(), 8, string(value)) for key, value in other.items()]
    tensors = [raw_tensor(name, [8], offset=32 * index) for index, name in enumerate(names)]
    return raw_file(keys, tensors, bytes(32 * len(names)))


FIRST = (0, 2, 2, (b"a",))


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (FIRST, (1, 3, 2, (b"b",)), "split.count = 3"),
        (FIRST, (0, 2, 2, (b"b",)), "split.no = 0"),
        (FIRST, (7, 2, 2, (b"b",)), "split.no = 7"),
        (FIRST, (1, 2, 3, (b"b",)), "split.tensors.count = 3"),
        ((0, 2, 3, (b"a",)), (1, 2, 3, (b"b",)), "hold 2 tensors and announce 3"),
        ((0, 2, 1, (b"a",)), (1, 2, 1, (b"b",)), "hold 2 tensors and announce 1"),
        (FIRST, (1, 2, 2, (b"a",)), "'a' is both in"),
        ((0, 2, -1, (b"a",)), (1, 2, -1, (b"b",)), "'split.tensors.count' is -1"),
    ],
)
def test_shards_that_disagree(tmp_path: Path, first: tuple, second: tuple, says: str) -> None:
    paths = [tmp_path / shard_name(number, 2) for number in (1, 2)]
    paths[0].write_bytes(handmade(*first))
    paths[1].write_bytes(handmade(*second))
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(paths[0])
    assert says in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_shards_of_different_models(tmp_path: Path) -> None:
    paths = [tmp_path / shard_name(number, 2) for number in (1, 2)]
    paths[0].write_bytes(handmade(*FIRST, **{"general.architecture": b"llama"}))
    paths[1].write_bytes(handmade(1, 2, 2, (b"b",), **{"general.architecture": b"qwen2"}))
    with pytest.raises(ModelFileError, match="different models: llama and qwen2"):
        GGUFFile.open(paths[0])


def test_a_whole_model_among_the_shards(tmp_path: Path) -> None:
    paths = [tmp_path / shard_name(number, 2) for number in (1, 2)]
    paths[0].write_bytes(handmade(*FIRST))
    paths[1].write_bytes(raw_file())
    with pytest.raises(ModelFileError, match=r"split\.no"):
        GGUFFile.open(paths[0])


def test_a_damaged_shard_is_named(split: list[Path]) -> None:
    split[1].write_bytes(split[1].read_bytes()[:-40])
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(split[0])
    assert str(split[1]) in str(caught.value)
    assert "incomplete" in str(caught.value)


@pytest.mark.parametrize("name", ["renamed.gguf", shard_name(2, 3), shard_name(1, 2), shard_name(1, 3) + ".bak"])
def test_a_renamed_shard_says_its_name(split: list[Path], tmp_path: Path, name: str) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(split[0], alone / name)
    message = refusal(alone / name)
    assert "part 1 of 3" in message
    assert "-00001-of-00003.gguf" in message or "missing" in message


def test_a_shard_with_an_impossible_number(tmp_path: Path) -> None:
    path = tmp_path / shard_name(3, 2)
    path.write_bytes(handmade(2, 2, 1))
    assert "part 3 of 2" in refusal(path)


@pytest.mark.parametrize("count", [0, 1])
def test_a_model_that_was_merged_again_needs_no_name(tmp_path: Path, count: int) -> None:
    path = tmp_path / "merged.gguf"
    path.write_bytes(handmade(0, count, 1, (b"a",)))
    with GGUFFile.open(path) as file:
        assert file.paths == (path,)
        assert list(file.tensors) == ["a"]


def test_split_keys_of_a_wrong_type(tmp_path: Path) -> None:
    path = tmp_path / shard_name(1, 2)
    path.write_bytes(raw_file([raw_key(b"split.count", 8, string(b"2"))]))
    assert "'split.count' is '2'" in refusal(path)
