"""The kernel of `widening`."""

from __future__ import annotations

from typing import Any

from edgert.quantize.jit.lanes import array_at, bits_of, float_of, load, select, store, types, vf, vi


def build(_name: str) -> Any:
    """The kernel (halves uint16 (n,), values float32 (n,), n), n a multiple of 16, for `jit.objects`."""
    words, halves_at, floats_at = (array_at(kind) for kind in (types.int64, types.uint16, types.float32))

    def kernel(address):
        a = words(address, 3)
        n = a[2]
        halves, values = halves_at(a[0], n), floats_at(a[1], n)
        for i in range(0, n, 16):
            bits = load(halves, i)
            magnitude = bits & vi(0x7FFF)
            number = bits_of(float_of(magnitude << vi(13)) * vf(2.0**112))  # of small ones too, which have no exponent
            number = select(magnitude >= vi(0x7C00), number | vi(0x7F800000), number)  # infinite, or NaN
            store(values, i, float_of(number | (bits & vi(0x8000)) << vi(16)))
        return 0

    return kernel
