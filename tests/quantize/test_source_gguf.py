"""GGUF files as a source: every key as it was, rows read alone, quantized weights refused by their names."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from test_gguf_writer import METADATA, TENSORS, fill
from tiny import FAMILIES

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize.checkpoint.rows import neighbours
from edgert.quantize.checkpoint.safetensors import Entry, SafetensorsFile
from edgert.quantize.checkpoint.tensors import CheckpointTensor
from edgert.quantize.gguf_value import Kind, Value
from edgert.quantize.gguf_writer import Writer
from edgert.quantize.source import open_source


def test_every_key_keeps_its_type_and_bytes(tmp_path: Path) -> None:
    extra = {
        "general.file_type": Value.u32(7),
        "general.quantization_version": Value.u32(2),
        "general.alignment": Value.u32(64),
    }
    for split in (None, 500):
        with Writer(tmp_path / f"{split}.gguf", METADATA | extra, TENSORS, split_max_size=split) as writer:
            fill(writer)
        with open_source(writer.paths[-1], allow_requantize=True) as source:
            assert source.metadata == METADATA | {"general.alignment": Value.u32(64)}
            assert list(source.tensors) == [name for name, _, _ in TENSORS]
            assert source.files == writer.paths


@pytest.mark.parametrize(
    "quant",
    [getattr(Type, name) for name in "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q6_K IQ4_NL".split()],  # noqa: SIM905
    ids=lambda quant: quant.name,
)
def test_rows_are_ggufs(tiny_model: Callable[..., Path], quant: Type) -> None:
    sizes = {"n_embd": 256, "n_head": 4, "head_dim": 64, "n_ff": 512} if quant.name.endswith("K") else {}
    path = tiny_model("llama", quant=quant, **sizes)
    rng = random.Random(0)
    with open_source(path, allow_requantize=True) as source:
        assert source.is_quantized == (quant not in (Type.F32, Type.F16, Type.BF16))
        for theirs in gguf.GGUFReader(path).tensors:
            tensor = source.tensors[theirs.name]
            expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type).reshape(tensor.n_rows, tensor.n_cols)
            assert np.array_equal(tensor.rows(), expected)
            start, stop = sorted(rng.choices(range(tensor.n_rows + 1), k=2))
            assert np.array_equal(tensor.rows(start, stop), expected[start:stop])
            slabs = np.concatenate([tensor.rows(*slab) for slab in tensor.slabs(3000)])
            assert np.array_equal(slabs, expected)
            with pytest.raises(ValueError, match="no rows"):
                tensor.rows(0, tensor.n_rows + 1)


def test_quantized_weights_are_refused_by_name(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama", quant={"*ffn_down*": Type.Q8_0, "*attn_q*": Type.Q4_1})
    with pytest.raises(UnsupportedFormatError, match=r"is quantized already \(Q4_1, Q8_0\): .* --allow-requantize"):
        open_source(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_describe(tiny_model: Callable[..., Path], family: str) -> None:
    """The same description as the file's own, rope factors included."""
    from edgert.quantize.architecture import describe
    from edgert.quantize.gguf_file import GGUFFile

    factors = np.geomspace(1, 8, 16).tolist() if family == "llama" else None
    path = tiny_model(family, quant=Type.F16, rope_factors=factors)
    with open_source(path) as source, GGUFFile.open(path) as file:
        ours, theirs = source.describe(), describe(file)
    for name in ("name", "n_layer", "n_embd", "n_head_kv", "head_dim", "n_vocab", "tied_head", "qkv_bias", "norm_eps"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.tensors() == theirs.tensors()
    assert np.array_equal(ours.layers[-1].rope.frequencies(), theirs.layers[-1].rope.frequencies())


def test_formats_without_a_decoder_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 292), np.uint8), raw_dtype=Type.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedFormatError, match=r"'token_embd\.weight', which is Q8_K"):
        open_source(tmp_path / "m.gguf", allow_requantize=True)


def test_nan_is_named(tiny_model: Callable[..., Path]) -> None:
    weight = np.ones((192, 128), np.float32)
    weight[100, 3] = np.nan
    path = tiny_model("llama", quant=Type.F32, weights={"blk.1.ffn_up.weight": weight})
    with open_source(path) as source:
        tensor = source.tensors["blk.1.ffn_up.weight"]
        tensor.rows(0, 100)
        with pytest.raises(ModelFileError, match=r"'blk\.1\.ffn_up\.weight': row 100, column 3 is nan"):
            tensor.rows(90, 120)


def test_the_fingerprint_follows_the_files(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_model("llama", quant=Type.F16).read_bytes())
    with open_source(path) as source:
        before = source.fingerprint
        assert source.fingerprint == before
        path.touch()
        assert source.fingerprint != before


@pytest.mark.parametrize(("n_head", "shape"), [(3, (48, 5)), (1, (6, 4)), (4, (64,)), (0, (7, 3))])
def test_permuted_rows_are_read_alone(tmp_path: Path, n_head: int, shape: tuple[int, ...]) -> None:
    """Any range of rows is that range of the whole; the whole is llama.cpp's rule of reshaping."""
    library = pytest.importorskip("safetensors.numpy")
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    library.save_file({"w": weight}, tmp_path / "m.safetensors")
    entry: Entry = SafetensorsFile(tmp_path / "m.safetensors").tensors["w"]
    order, expected = None, weight
    if n_head:
        order = neighbours(n_head, shape[0] // n_head)
        halves = weight.reshape(n_head, 2, shape[0] // n_head // 2, *shape[1:])
        expected = halves.swapaxes(1, 2).reshape(shape)
    tensor = CheckpointTensor("attn_q.weight", entry, order=order)
    assert np.array_equal(tensor.dequantize(), expected)
    rows = expected.reshape(tensor.n_rows, tensor.n_cols)
    for start in range(tensor.n_rows + 1):
        for stop in range(start, tensor.n_rows + 1):
            assert np.array_equal(tensor.rows(start, stop), rows[start:stop])


def test_values_decode_as_they_were(tmp_path: Path) -> None:
    assert {key: METADATA[key].decode() for key in ("a.u64", "a.i64", "a.true", "a.text")} == {
        "a.u64": 2**64 - 1,
        "a.i64": -(2**63),
        "a.true": True,
        "a.text": "grüße\0 {%",
    }
    assert METADATA["a.texts"].decode().to_bytes() == [b"a", b"", "ü".encode(), b"\xff\xfe"]
    assert METADATA["a.bools"].decode().tolist() == [True, False]
    with pytest.raises(OverflowError):
        Value.number(Kind.U8, 256)
