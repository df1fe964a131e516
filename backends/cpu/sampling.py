"""The sampling kernel, called from Python: what lies between two forward steps."""

from __future__ import annotations

import ctypes
import struct
import threading

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu import compiler
from edgert.backends.cpu.isa import Isa, select

NAMES = (compiler.name_of("sample"),)
_Function = ctypes.PYFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)  # too short to let go of the GIL

# Places of the kernel's arguments (8 bytes each).
ARGUMENTS = (
    "logits",  # float32 (n,), changed while the kernel runs and put back
    "n",
    "history",  # int32 (n_window,), the tokens that the penalties see
    "n_window",
    "draw",  # float64 in [0, 1)
    "n_bias",
    "bias_ids",  # int64 (n_bias,)
    "bias",  # float64 (n_bias,)
    "top_k",  # 0: off
    "temperature",  # float64, as the next six; 0: greedy
    "top_p",
    "log_min_p",  # -inf: off
    "log_rest",  # log(n / (1 - top_p))
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "peaks",  # scratch, int64 (n_blocks,)
    "masses",  # scratch, float64 (n_blocks,)
    "ranks",  # scratch, int64 (n,)
    "counts",  # scratch, int64 (n,), zeros before and after
    "undo",  # scratch, int64 (2 * (n_bias + distinct tokens),)
    "token",  # result: an id, or NOT_FINITE, or ALL_FORBIDDEN
)
PLACE = {name: place for place, name in enumerate(ARGUMENTS)}
_PREPARED = slice(PLACE["n_bias"], PLACE["peaks"])
NOT_FINITE, ALL_FORBIDDEN = -1, -2
BLOCK = 64  # logits that are skipped together


class SampleKernel:
    """Compiled or loaded once; calls from several threads do not disturb each other."""

    def __init__(self, isa: Isa | None = None, progress: compiler.Progress | None = None) -> None:
        chosen = isa or select()
        self._function = _Function(compiler.addresses(NAMES, chosen, progress)[NAMES[0]])
        self._scratch = threading.local()

    def prepare(self, **arguments: float) -> NDArray[np.int64]:
        """int64 (n,): the arguments that stay the same from token to token, by the kernel's names."""
        block = np.zeros(len(ARGUMENTS), np.int64)
        for name, value in arguments.items():
            block[PLACE[name]] = value if isinstance(value, int) else _bits(value)
        return block

    def __call__(
        self, arguments: NDArray[np.int64], logits: NDArray[np.float32], window: NDArray[np.int32], draw: float
    ) -> int:
        """A token id, or NOT_FINITE, or ALL_FORBIDDEN.

        arguments:  of `prepare`
        logits:     float32 (n_vocab,), contiguous and writable; the same afterwards
        window:     int32, contiguous, ids within the vocabulary: the tokens that the penalties see
        draw:       in [0, 1)
        """
        n = len(logits)
        words, doubles, address, token = self._buffers(n, int(arguments[PLACE["n_bias"]]))
        words[_PREPARED] = arguments[_PREPARED]
        words[:4] = logits.__array_interface__["data"][0], n, window.__array_interface__["data"][0], len(window)
        doubles[4] = draw
        self._function(0, 1, address)
        return int(token[0])

    def _buffers(self, n: int, n_bias: int) -> tuple[NDArray[np.int64], NDArray[np.float64], int, NDArray[np.int64]]:
        """This thread's argument block with its scratch memory filled in: as integers, as floats, its address;
        and the place of the result.
        """
        scratch = self._scratch.__dict__
        if scratch.get("n") != n or scratch["n_bias"] < n_bias:
            n_blocks = -(-n // BLOCK)
            sizes = {"peaks": n_blocks, "masses": n_blocks, "ranks": n, "counts": n}
            sizes |= {"undo": 2 * (n_bias + n), "token": 1}
            block = np.zeros(len(ARGUMENTS), np.int64)
            arrays = {name: np.zeros(size, np.int64) for name, size in sizes.items()}
            for name, array in arrays.items():
                block[PLACE[name]] = array.ctypes.data
            views = (block, block.view(np.float64), block.ctypes.data, arrays["token"])
            scratch.update(n=n, n_bias=n_bias, arrays=arrays, views=views)
        result: tuple[NDArray[np.int64], NDArray[np.float64], int, NDArray[np.int64]] = scratch["views"]
        return result


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
