"""float16 as float32, all of its values, against NumPy."""

from __future__ import annotations

import numpy as np

from edgert.quantize import widening
from edgert.quantize.formats import FORMATS


def test_all_values():
    halves = np.arange(1 << 16, dtype="<u2")
    rows = np.concatenate([halves, halves[:5]]).reshape(3, -1)  # no multiple of 16
    assert rows.size >= widening.LITTLE and rows.size % 16
    found = widening.dequantize(FORMATS["F16"], rows.view(np.uint8))
    np.testing.assert_array_equal(found, rows.view("<f2").astype(np.float32))  # NaN where NaN, too
