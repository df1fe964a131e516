"""The grid of quantization-aware training is found, and kept to the last bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from edgert.quantize import grid
from edgert.quantize.formats import FORMATS


def q4_0(values: np.ndarray) -> np.ndarray:
    return gguf.quants.quantize(values.astype(np.float32), Type.Q4_0)


def bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.fixture
def random() -> np.ndarray:
    return np.random.default_rng(1).normal(0, 0.03, (96, 256)).astype(np.float32)


@pytest.mark.parametrize("stored", ["f32", "f16", "bf16"])
def test_a_grid_is_found_and_its_integers_are_kept(random: np.ndarray, stored: str):
    blocks = q4_0(random)
    values = FORMATS["Q4_0"].dequantize(blocks)
    values = {"f32": values, "f16": values.astype(np.float16).astype(np.float32), "bf16": bf16(values)}[stored]
    assert grid.lies_on_q4_0([values[:40], values[40:]])
    again = grid.encode(values, q4_0(values + 0.01))
    error = np.abs(FORMATS["Q4_0"].dequantize(again) - values).max() / np.abs(values).max()
    assert error <= (2**-8 if stored == "bf16" else 2**-11)
    # A block may be stored with the other sign of d: what counts is the value.
    if stored == "f32":
        np.testing.assert_array_equal(FORMATS["Q4_0"].dequantize(again), values)


def test_blocks_that_never_reach_the_lowest_level(random: np.ndarray):
    """A plain quantizer takes the largest for level -8 and leaves the grid of such a block; this does not."""
    q = np.random.default_rng(2).integers(-5, 6, (8, 64))
    values = (q * np.float32(0.0625)).astype(np.float32)
    plain = FORMATS["Q4_0"].dequantize(q4_0(values))
    assert np.abs(plain - values).max() > 0.01
    np.testing.assert_array_equal(FORMATS["Q4_0"].dequantize(grid.encode(values, q4_0(values))), values)


@pytest.mark.parametrize("kind", ["normal", "q4_1", "q8_0", "zeros", "constant", "three levels"])
def test_other_weights_are_on_no_grid(random: np.ndarray, kind: str):
    values = {
        "normal": random,
        "q4_1": FORMATS["Q4_1"].dequantize(gguf.quants.quantize(random, Type.Q4_1)),
        "q8_0": FORMATS["Q8_0"].dequantize(gguf.quants.quantize(random, Type.Q8_0)),
        "zeros": np.zeros_like(random),
        "constant": np.full_like(random, 0.5),
        "three levels": np.sign(random),
    }[kind]
    assert not grid.lies_on_q4_0([values[:40], values[40:]])


def test_rows_that_are_no_blocks_are_on_no_grid():
    assert not grid.lies_on_q4_0([np.ones((4, 33), np.float32)])


def test_a_stray_block_keeps_what_the_quantizer_made(random: np.ndarray):
    values = FORMATS["Q4_0"].dequantize(q4_0(random))
    values[3, :32] = random[3, :32]
    assert grid.lies_on_q4_0([values[:40], values[40:]])
    otherwise = q4_0(values)
    encoded = grid.encode(values, otherwise)
    np.testing.assert_array_equal(encoded[3, :18], otherwise[3, :18])
