"""float16 as float32, all of its values, against NumPy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edgert.quantize import widening
from edgert.quantize.formats import FORMATS


def test_all_values():
    halves = np.arange(1 << 16, dtype="<u2")
    rows = np.concatenate([halves, halves[:5]]).reshape(3, -1)  # no multiple of 16
    assert rows.size >= widening.LITTLE and rows.size % 16
    found = widening.dequantize(FORMATS["F16"], rows.view(np.uint8))
    np.testing.assert_array_equal(found, rows.view("<f2").astype(np.float32))  # NaN where NaN, too


def test_threads_do_not_mistake_each_other_s_arguments():
    rows = np.random.default_rng(0).integers(0, 0x7C00, (4, 2 * widening.LITTLE), "<u2")

    def widen(row: int) -> None:
        one = rows[row : row + 1]
        expected = one.view("<f2").astype(np.float32)
        for _ in range(300):
            assert np.array_equal(widening.dequantize(FORMATS["F16"], one.view(np.uint8)), expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(widen, range(4)))
