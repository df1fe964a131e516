"""Decoders against gguf's and ggml's own, bit for bit, on random bytes; the check for NaN and infinity."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize import formats
from edgert.quantize.formats import BY_ID, DECODABLE, FORMATS
from edgert.quantize.rounding import GRIDS

PROMISED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
PROMISED += ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "Q1_0", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4")
PROMISED += ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


def random_rows(name: str, rows: int = 128, n_blocks: int = 8, seed: int = 0) -> np.ndarray:
    """uint8 (rows, row_bytes), every bit pattern as likely as any other."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, n_blocks * FORMATS[name].type_size), np.uint8)


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal bit for bit; a NaN equals any NaN, as its payload depends on the compiler."""
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert not nan.all()
    assert np.array_equal(ours[~nan].view(np.uint32), theirs[~nan].view(np.uint32))


@pytest.fixture(scope="session")
def ggml() -> ctypes.CDLL:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs llama-cpp-python, which brings ggml")
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    for library in sorted(folder.glob("*ggml-base*")):
        return ctypes.CDLL(str(library))
    pytest.skip(f"no ggml-base library beside {spec.name}")


def test_the_promised_formats_are_decoded() -> None:
    assert set(DECODABLE) == set(PROMISED)


def test_the_writable_formats_are_those_with_a_grid() -> None:
    assert set(formats.WRITABLE) == {*GRIDS, "F32", "F16", "BF16"}


@pytest.mark.parametrize("kind", list(GGML_QUANT_SIZES), ids=lambda kind: kind.name)
def test_table_agrees_with_gguf(kind: GGMLQuantizationType) -> None:
    format = BY_ID[kind.value]
    block_size, type_size = GGML_QUANT_SIZES[kind]
    if kind.name == "Q8_1":
        type_size = 36  # ggml's block_q8_1; the package still counts two float32
    assert (format.name, format.block_size, format.type_size) == (kind.name, block_size, type_size)


def test_table_agrees_with_ggml(ggml: ctypes.CDLL) -> None:
    ggml.ggml_type_size.restype = ctypes.c_size_t
    ggml.ggml_blck_size.restype = ctypes.c_int64
    ggml.ggml_type_name.restype = ctypes.c_char_p
    compared = 0
    for format in FORMATS.values():
        name = ggml.ggml_type_name(format.ggml_id)
        if name and name.decode().lower() == format.name.lower():
            assert ggml.ggml_type_size(format.ggml_id) == format.type_size, format
            assert ggml.ggml_blck_size(format.ggml_id) == format.block_size, format
            compared += 1
    assert compared >= 30


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "number"), formats.FILE_TYPES.items())
def test_file_types_agree_with_gguf(name: str, number: int) -> None:
    """gguf prints a mix by its usual size: Q4_K is Q4_K_M there."""
    theirs = gguf.LlamaFileType(number).name.removeprefix("ALL_").removeprefix("MOSTLY_").removesuffix("_MOE")
    assert theirs in (name, f"{name}_M")


@pytest.mark.parametrize("name", DECODABLE)
def test_decoder_equals_gguf(name: str) -> None:
    data = random_rows(name)
    if name == "Q1_0":
        pytest.skip("gguf knows only its size")
    assert_same_bits(FORMATS[name].dequantize(data), gguf.quants.dequantize(data, GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", [name for name in DECODABLE if name not in ("F32", "F16", "BF16")])
def test_decoder_equals_ggml(ggml: ctypes.CDLL, name: str) -> None:
    function = getattr(ggml, f"dequantize_row_{name.lower()}".replace("_k", "_K"))
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None
    data = random_rows(name, seed=1)
    ours = FORMATS[name].dequantize(data)
    theirs = np.empty_like(ours)
    function(data.ctypes.data, theirs.ctypes.data, theirs.size)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("name", [name for name in DECODABLE if name not in ("F32", "F16", "BF16", "Q1_0")])
@settings(max_examples=25)
@given(data=st.data())
def test_any_block_decodes_as_gguf_has_it(name: str, data: st.DataObject) -> None:
    """Blocks of extremes too: all bits set, none, single fields."""
    size = FORMATS[name].type_size
    block = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)[None]
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(block, GGMLQuantizationType[name])
    ours = FORMATS[name].dequantize(block)
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours[~nan].view(np.uint32), theirs[~nan].view(np.uint32))


@pytest.mark.parametrize("name", DECODABLE)
def test_rows_are_decoded_in_pieces_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_rows(name, rows=7, n_blocks=2)
    whole = FORMATS[name].dequantize(data)
    assert whole.shape == (7, 2 * FORMATS[name].block_size)
    monkeypatch.setattr(formats, "_CHUNK_BYTES", data.shape[1] * 2)
    assert_same_bits(FORMATS[name].dequantize(data), whole)
    assert_same_bits(FORMATS[name].dequantize(data[::2]), whole[::2])


def test_formats_known_by_size_refuse_to_decode() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"Q8_K.*Q4_K"):
        FORMATS["Q8_K"].dequantize(random_rows("Q8_K", 1, 1))


def test_row_bytes() -> None:
    assert FORMATS["Q4_K"].row_bytes(512) == 288
    assert FORMATS["F32"].row_bytes(3) == 12
    with pytest.raises(ValueError, match="blocks of 32"):
        FORMATS["Q4_0"].row_bytes(33)


LARGEST = {
    "f2": (0xFF, 0x7B),  # 65504
    "e8m0": (252,),
    "iq1_m": (0, 0xF0, 0, 0xF0, 0, 0xB0, 0, 0x70),
}


@pytest.mark.parametrize("name", [*DECODABLE, "F64"])
def test_every_float_field_is_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is finite unless one of its fields is not, wherever the block lies."""
    format = FORMATS[name]
    rows, n_blocks = 5, 4
    finite = np.zeros((rows, n_blocks * format.type_size), np.uint8)
    if name not in ("F32", "F16", "BF16", "F64"):
        finite = random_rows(name, rows, n_blocks)
        for offset, dtype in format.floats:
            largest = LARGEST[dtype]
            finite.reshape(-1, format.type_size)[:, offset : offset + len(largest)] = largest
    monkeypatch.setattr(formats, "_CHUNK_BYTES", 3 * format.type_size)
    assert format.is_finite(finite)
    special = {
        "f2": [0x7C00, 0xFC00, 0x7C01, 0xFE00],
        "bf2": [0x7F80, 0xFF80, 0x7F81, 0xFFC0],
        "f4": [0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000],
        "f8": [0x7FF0 << 48, 0xFFF0 << 48, (0x7FF0 << 48) + 1, 0xFFF8 << 48],
        "e8m0": [253, 254, 255],
        "iq1_m": [0x7FFF << 48 | 0xCFFF << 32, 0xF000 << 48 | 0xC000 << 32, 0xFFFF_FFFF_FFFF_FFFF],
    }
    widths = {"e8m0": 1, "iq1_m": 8}
    for offset, dtype in format.floats:
        width = widths.get(dtype) or int(dtype[-1])
        for bits in special[dtype]:
            for block in range(rows * n_blocks):
                bad = finite.copy()
                field = np.frombuffer(bits.to_bytes(width, "little"), np.uint8)
                bad.reshape(-1, format.type_size)[block, offset : offset + width] = field
                assert not format.is_finite(bad)


@pytest.mark.parametrize("name", DECODABLE)
def test_check_agrees_with_the_decoded_values(name: str) -> None:
    """On random blocks: refused exactly when a value or a scale is not finite."""
    format = FORMATS[name]
    seen = set()
    blocks = random_rows(name, rows=3000, n_blocks=1, seed=2)
    for block, values in zip(blocks, format.dequantize(blocks), strict=True):
        finite = format.is_finite(block[None])
        if not np.isfinite(values).all():
            assert not finite
        elif format.block_size == 1:
            assert finite
        seen.add(finite)
    assert seen == ({True, False} if format.floats else {True})  # NVFP4 has no pattern that is not finite


def test_check_finite_names_the_tensor() -> None:
    tensor = SimpleNamespace(name="blk.0.ffn_up.weight", format=FORMATS["F32"])
    tensor.data = np.array([[1, np.nan]], np.float32).view(np.uint8)
    with pytest.raises(ModelFileError, match=r"'blk\.0\.ffn_up\.weight' \(F32\).*NaN"):
        formats.check_finite(tensor)
    formats.check_finite(tensor, np.array([[1, 2]], np.float32).view(np.uint8))
