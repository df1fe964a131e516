"""The number formats of GGUF tensors: one row for each, looked up by name or by ggml's type id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize import blocks

_CHUNK_BYTES = 1 << 22  # checks and conversions walk a tensor in pieces that stay in the cache


@dataclass(frozen=True)
class Format:
    """How a run of `block_size` elements is stored in `type_size` bytes.

    ggml_id:  the type id in a GGUF file
    decode:   uint8 (n, type_size) -> float32 (n, block_size); None where only the size is known
    floats:   (byte offset, dtype) of each floating-point field of a block
    """

    name: str
    ggml_id: int
    block_size: int
    type_size: int
    decode: Callable[[blocks.Bytes], blocks.Floats] | None = field(default=None, repr=False)
    floats: tuple[tuple[int, str], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return self.name

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.type_size / self.block_size

    def row_bytes(self, n_cols: int) -> int:
        """Bytes of a row of `n_cols` elements, a multiple of block_size.

        Raises: ValueError for a length that is no multiple.
        """
        if n_cols % self.block_size:
            raise ValueError(f"{self.name} stores blocks of {self.block_size}: no row of {n_cols}")
        return n_cols // self.block_size * self.type_size

    def dequantize(self, data: NDArray[np.uint8]) -> NDArray[np.float32]:
        """uint8 (rows, row_bytes) -> float32 (rows, n_cols).

        Raises: UnsupportedFormatError when edgert knows only the size of this format.
        """
        if self.decode is None:
            raise UnsupportedFormatError(
                f"edgert cannot read the values of {self.name}; it reads {', '.join(DECODABLE)}."
            )
        rows, row_bytes = data.shape
        values = np.empty((rows, row_bytes // self.type_size * self.block_size), np.float32)
        step = max(1, _CHUNK_BYTES // max(row_bytes, 1))
        for row in range(0, rows, step):
            piece = np.ascontiguousarray(data[row : row + step])
            with np.errstate(invalid="ignore", over="ignore"):  # check_finite is what complains
                floats = self.decode(piece.reshape(-1, self.type_size))
            values[row : row + step] = floats.reshape(len(piece), -1)
        return values

    def is_finite(self, data: NDArray[np.uint8]) -> bool:
        """Whether no floating-point field of uint8 (rows, row_bytes) is NaN or infinite."""
        flat = data.reshape(-1)
        step = max(1, _CHUNK_BYTES // self.type_size) * self.type_size
        for start in range(0, flat.size, step):
            piece = flat[start : start + step].reshape(-1, self.type_size)
            for offset, dtype in self.floats:
                width, exponent, least = _NOT_FINITE[dtype]
                field = piece[:, offset : offset + np.dtype(width).itemsize].view(width)
                if ((field & exponent) >= least).any():
                    return False
        return True


def _not_finite(width: str, exponent: int, least: int | None = None) -> tuple[str, np.generic, np.generic]:
    kind = np.dtype(width).type
    return width, kind(exponent), kind(exponent if least is None else least)


# Field: its integer, the bits of its exponent, and from which exponent on no value is finite: usually when all bits
# are set. An E8M0 scale of 2**126 overflows with the largest E2M1 value, and more than that no format can want.
_NOT_FINITE = {
    "f2": _not_finite("<u2", 0x7C00),
    "bf2": _not_finite("<u2", 0x7F80),
    "f4": _not_finite("<u4", 0x7F800000),
    "f8": _not_finite("<u8", 0x7FF0000000000000),
    "e8m0": _not_finite("u1", 0xFF, 253),
    "iq1_m": _not_finite("<u8", 0x7000C00000000000),  # a float16 in the high four bits of four 16-bit words
}

# Source: ggml's ggml.h (type ids) and ggml-common.h (block layouts).
FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Format("F32", 0, 1, 4, blocks.f32, ((0, "f4"),)),
        Format("F16", 1, 1, 2, blocks.f16, ((0, "f2"),)),
        Format("Q4_0", 2, 32, 18, blocks.q4_0, ((0, "f2"),)),
        Format("Q4_1", 3, 32, 20, blocks.q4_1, ((0, "f2"), (2, "f2"))),
        Format("Q5_0", 6, 32, 22, blocks.q5_0, ((0, "f2"),)),
        Format("Q5_1", 7, 32, 24, blocks.q5_1, ((0, "f2"), (2, "f2"))),
        Format("Q8_0", 8, 32, 34, blocks.q8_0, ((0, "f2"),)),
        Format("Q8_1", 9, 32, 36),
        Format("Q2_K", 10, 256, 84, blocks.q2_k, ((80, "f2"), (82, "f2"))),
        Format("Q3_K", 11, 256, 110, blocks.q3_k, ((108, "f2"),)),
        Format("Q4_K", 12, 256, 144, blocks.q4_k, ((0, "f2"), (2, "f2"))),
        Format("Q5_K", 13, 256, 176, blocks.q5_k, ((0, "f2"), (2, "f2"))),
        Format("Q6_K", 14, 256, 210, blocks.q6_k, ((208, "f2"),)),
        Format("Q8_K", 15, 256, 292),
        Format("IQ2_XXS", 16, 256, 66, blocks.iq2_xxs, ((0, "f2"),)),
        Format("IQ2_XS", 17, 256, 74, blocks.iq2_xs, ((0, "f2"),)),
        Format("IQ3_XXS", 18, 256, 98, blocks.iq3_xxs, ((0, "f2"),)),
        Format("IQ1_S", 19, 256, 50, blocks.iq1_s, ((0, "f2"),)),
        Format("IQ4_NL", 20, 32, 18, blocks.iq4_nl, ((0, "f2"),)),
        Format("IQ3_S", 21, 256, 110, blocks.iq3_s, ((0, "f2"),)),
        Format("IQ2_S", 22, 256, 82, blocks.iq2_s, ((0, "f2"),)),
        Format("IQ4_XS", 23, 256, 136, blocks.iq4_xs, ((0, "f2"),)),
        Format("I8", 24, 1, 1),
        Format("I16", 25, 1, 2),
        Format("I32", 26, 1, 4),
        Format("I64", 27, 1, 8),
        Format("F64", 28, 1, 8, None, ((0, "f8"),)),
        Format("IQ1_M", 29, 256, 56, blocks.iq1_m, ((48, "iq1_m"),)),
        Format("BF16", 30, 1, 2, blocks.bf16, ((0, "bf2"),)),
        Format("TQ1_0", 34, 256, 54, blocks.tq1_0, ((52, "f2"),)),
        Format("TQ2_0", 35, 256, 66, blocks.tq2_0, ((64, "f2"),)),
        Format("MXFP4", 39, 32, 17, blocks.mxfp4, ((0, "e8m0"),)),
        Format("NVFP4", 40, 64, 36, blocks.nvfp4),
        Format("Q1_0", 41, 128, 18, blocks.q1_0, ((0, "f2"),)),
    )
}
BY_ID: dict[int, Format] = {format.ggml_id: format for format in FORMATS.values()}
DECODABLE: tuple[str, ...] = tuple(name for name, format in FORMATS.items() if format.decode)
FLOATS: tuple[str, ...] = ("F32", "F16", "BF16")
# What values can be rounded to; a test compares it with what `rounding` has.
WRITABLE: tuple[str, ...] = (*FLOATS, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS")
WRITABLE += ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

# Ids that ggml gave up: files with them exist, and only an old program reads them.
REMOVED: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


# llama.cpp's general.file_type by the name of the type that most weights have, or of the mix: of two names the latter.
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11, "Q3_K": 12,
    "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K": 15, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K": 17, "Q5_K_M": 17,
    "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20, "Q2_K_S": 21, "IQ3_XS": 22, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25,
    "IQ3_S": 26, "IQ3_M": 27, "IQ2_S": 28, "IQ2_M": 29, "IQ4_XS": 30, "IQ1_M": 31, "BF16": 32, "TQ1_0": 36,
    "TQ2_0": 37, "MXFP4": 38, "NVFP4": 39, "Q1_0": 40,
}  # fmt: skip


class HasData(Protocol):
    """What check_finite needs of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> Format: ...
    @property
    def data(self) -> NDArray[np.uint8]: ...


def check_finite(tensor: HasData, data: NDArray[np.uint8] | None = None) -> None:
    """Refuses a tensor with NaN or infinity in its values or scales.

    data:   uint8 (rows, row_bytes), the tensor's bytes where the caller has read them already
    Raises: ModelFileError that names the tensor.
    """
    if not tensor.format.is_finite(tensor.data if data is None else data):
        raise ModelFileError(
            f"Tensor {tensor.name!r} ({tensor.format}) holds NaN or infinity: "
            "the file is damaged or was converted wrongly; download or convert it again."
        )
