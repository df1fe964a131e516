"""A tape: the kernels of one forward step, in order, with the addresses that each works on."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import numpy as np

from edgert.backends.cpu.memory import Arena


def float_bits(value: float) -> int:
    """A float32 as the int64 argument that kernels read it from."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


class Op:
    """A kernel by name, its int64 arguments, and whether all threads meet after it."""

    def __init__(self, kernel: str, arguments: Iterable[int], meet: bool = True) -> None:
        self.kernel = kernel
        self.arguments = np.array(list(arguments), np.int64)
        self.meet = meet


class Tape:
    """Ops made ready to be walked: int64 (n_ops, 3), and all arguments in one piece."""

    def __init__(self, ops: list[Op], addresses: Mapping[str, int], arena: Arena) -> None:
        self.ops = ops
        for op in ops:
            place = arena.integers(len(op.arguments))
            place[:] = op.arguments
            op.arguments = place
        self.words = arena.integers(len(ops), 3)
        self.words[:] = [[addresses[op.kernel], op.arguments.ctypes.data, op.meet] for op in ops]
