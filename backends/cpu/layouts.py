"""How weights lie in memory for the kernels: few packed layouts that serve many GGUF types.

Rows stand in panels of `lanes` rows (16 with AVX-512, 8 with AVX2, 4 with NEON), so that one vector holds the same
place of each row. Along a row, 32 weights make a block of eight quads; the blocks of a panel follow one another. A
block holds:

    codes    `low` vectors of 4*lanes bytes with the low bits (2, 4 or 8) of each code: bytes 4*r .. 4*r + 3 of
             vector v hold for row r the quads v, v + low, v + 2*low ..., the first in the lowest bits
    high     a vector for each further bit: of one, bit j of a byte belongs to quad j;
             of two, the first vector holds two bits for each of the quads 0-3, the second for 4-7
    scales   (32 / group, lanes) in one of the ways of `Codec.scale`
    minima   the same, where the codec has them

Where scales are small integers, each eight blocks (256 weights) have before them what these are multiples of:
float16 (lanes), then for minima float16 (lanes).

Float weights lie k by k: (n_cols, lanes) of their own type. Rows are padded with zeros to a whole panel.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 32  # weights along a row that share the layout's unit, and activations that share a scale
LINE = 64  # bytes of a cache line
PAGE = 16  # positions of a sequence that are cached together
AHEAD = 12  # entries beyond the end of a sequence's table of pages that kernels may look at
WINDOW = 64  # positions that are computed as wide rows when a batch holds all of them
WORDS_BYTES = 16  # beside each block of int8 activations, four float32 words (see `kernels/panel.py`)
CHUNK = 256  # positions of a single token's attention that one unit of work covers

SUPER = 256  # weights along a row that share what their integer scales are multiples of

IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _with_signs(*levels: int) -> tuple[int, ...]:
    """The levels, then their negatives: the code's highest bit is the sign."""
    return *levels, *(-level for level in levels)


# Bytes of a group's scale, by Codec.scale.
_SCALE_BYTES = {"f16": 2, "e8m0": 1, "int8": 1, "nibbles": 1, "super": 0}


@dataclass(frozen=True)
class Codec:
    """weight = scale * (code - offset) + minimum, or scale * table[code], whose values are at most `offset` in size.

    scale:  "f16"; "e8m0": an exponent; "int8": a multiple of the 256 weights' float16; "nibbles": a multiple of four
            bits, with the minimum's in the same byte; "super": the 256 weights' float16 itself
    unit:   by which the scales are to be multiplied
    """

    name: str
    bits: int
    group: int = 32
    has_min: bool = False
    offset: int = 0
    table: tuple[int, ...] = ()
    scale: str = "f16"
    unit: float = 1.0

    @property
    def is_float(self) -> bool:
        return self.bits >= 16 or self.name == "f32"

    @property
    def low(self) -> int:
        """How many bits of a code stand together."""
        return 8 if self.bits == 8 else 4 if self.bits >= 4 else 2

    @property
    def high(self) -> int:
        """How many bits stand apart."""
        return self.bits - self.low

    @property
    def n_groups(self) -> int:
        """Scales of a block."""
        return BLOCK // self.group

    @property
    def has_super(self) -> bool:
        return self.scale in ("int8", "nibbles", "super")

    @property
    def scale_bytes(self) -> int:
        return _SCALE_BYTES[self.scale]

    def scales_at(self, lanes: int) -> int:
        """Where the scales of a block begin."""
        return lanes * BLOCK * self.bits // 8

    def block_bytes(self, lanes: int) -> int:
        """Bytes of 32 columns of one panel, less their share of what 256 columns have together."""
        if self.is_float:
            return BLOCK * lanes * self.bits // 8
        kinds = 1 + (self.has_min and self.scale != "nibbles")
        return self.scales_at(lanes) + lanes * self.n_groups * self.scale_bytes * kinds

    def super_bytes(self, lanes: int) -> int:
        """Bytes that stand before each 256 columns of a panel."""
        return 2 * lanes * (1 + self.has_min) if self.has_super else 0

    def panel_bytes(self, n_cols: int, lanes: int) -> int:
        """Bytes of one panel of `n_cols` columns."""
        if self.is_float:
            return n_cols * lanes * self.bits // 8
        return n_cols // BLOCK * (self.block_bytes(lanes) + self.super_bytes(lanes) * BLOCK // SUPER)


CODECS = {
    codec.name: codec
    for codec in (
        Codec("q4_0", 4, offset=8),
        Codec("q4_1", 4, has_min=True),
        Codec("q5_0", 5, offset=16),
        Codec("q5_1", 5, has_min=True),
        Codec("q8_0", 8, offset=128),
        Codec("q2_k", 2, group=16, has_min=True, scale="nibbles"),
        Codec("q3_k", 3, group=16, offset=4, scale="int8"),
        Codec("q4_k", 4, has_min=True, scale="int8"),
        Codec("q5_k", 5, has_min=True, scale="int8"),
        Codec("q6_k", 6, group=16, offset=32, scale="int8"),
        Codec("q1_0", 2, offset=1),
        Codec("tq2_0", 2, offset=1, scale="super"),
        Codec("iq4_nl", 4, offset=128, table=IQ4_NL_VALUES),
        Codec("iq4_xs", 4, offset=128, table=IQ4_NL_VALUES, scale="int8"),
        Codec("mxfp4", 4, offset=12, table=E2M1_DOUBLED, scale="e8m0", unit=1 / 2),
        Codec("nvfp4", 4, group=16, offset=12, table=E2M1_DOUBLED),
        Codec("iq1_s", 2, offset=9, table=(-7, 1, 9, 0), scale="int8", unit=1 / 8),
        Codec("iq1_m", 3, group=16, offset=9, table=(-7, 1, 9, 0, -9, -1, 7, 0), scale="int8", unit=1 / 8),
        Codec("iq2_xxs", 3, offset=43, table=_with_signs(8, 25, 43, 0), scale="int8", unit=1 / 8),
        Codec("iq2_xs", 3, group=16, offset=43, table=_with_signs(8, 25, 43, 0), scale="int8", unit=1 / 8),
        Codec("iq3_xxs", 4, offset=62, table=_with_signs(4, 12, 20, 28, 36, 44, 52, 62), scale="int8", unit=1 / 4),
        Codec("iq3_s", 4, offset=15, table=_with_signs(*range(1, 16, 2)), scale="int8"),
        Codec("f16", 16),
        Codec("bf16", 16),
        Codec("f32", 32),
    )
}

# GGUF type -> codec. All exact.
CODEC_OF = {
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "Q4_0": "q4_0",
    "Q4_1": "q4_1",
    "Q5_0": "q5_0",
    "Q5_1": "q5_1",
    "Q8_0": "q8_0",
    "Q2_K": "q2_k",
    "Q3_K": "q3_k",
    "Q4_K": "q4_k",
    "Q5_K": "q5_k",
    "Q6_K": "q6_k",
    "Q1_0": "q1_0",
    "TQ1_0": "tq2_0",
    "TQ2_0": "tq2_0",
    "IQ4_NL": "iq4_nl",
    "IQ4_XS": "iq4_xs",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
    "IQ1_S": "iq1_s",
    "IQ1_M": "iq1_m",
    "IQ2_XXS": "iq2_xxs",
    "IQ2_XS": "iq2_xs",
    "IQ2_S": "iq2_xs",
    "IQ3_XXS": "iq3_xxs",
    "IQ3_S": "iq3_s",
}


@dataclass(frozen=True)
class CacheType:
    """How a head's keys or values lie in a page of PAGE positions (see `kernels/rope.py` and `kernels/packed.py`).

    value = scale * (code - offset), with a float16 scale for each position and block of 32 dimensions
    rotated:  a Hadamard rotation of the head's dimensions spreads outliers before they are rounded
    refined:  keys are held less a mean, which changes no attention; and of the first page of a sequence, to which
              all later tokens attend, what rounding left is held as well
    """

    name: str
    bits: int
    offset: int = 0
    rotated: bool = False
    refined: bool = False

    @property
    def is_packed(self) -> bool:
        return self.bits < 16

    @property
    def is_bytes(self) -> bool:
        """Whether keys are bytes that say all of them."""
        return self.bits == 8 and not self.refined

    def page_bytes(self, head_dim: int) -> int:
        """Bytes of one head's keys, or values, of one page."""
        scales = head_dim // BLOCK * PAGE * 2 if self.is_packed else 0
        return head_dim * PAGE * self.bits // 8 + scales


CACHE_TYPES = {
    kind.name: kind
    for kind in (
        CacheType("f16", 16),
        CacheType("q8_0", 8, offset=128),
        CacheType("q4_0", 4, offset=8, rotated=True, refined=True),
    )
}


def n_panels(n_rows: int, lanes: int) -> int:
    """Panels that hold `n_rows` rows."""
    return -(-n_rows // lanes)


def partial_bytes(head_dim: int) -> int:
    """Bytes of one partial result of attention: float32 (head_dim), maximum, sum, and padding to a cache line."""
    return (head_dim + 2) * 4 + 63 & ~63


TILE = 1024  # bytes of a tile: 16 rows of 64
TILE_TOKENS = 32  # tokens that a pass of the tile kernel multiplies
TILE_CHUNK = 8  # blocks of two panels that are unpacked at a time, so that they stay in the first-level cache


BYTE_TILE_CHUNK = 8  # blocks of a panel that int8 tiles take at a time, as many as share a unit of their scales
BYTE_TILE_TOKENS = 64  # for which they are unpacked once
TOGETHER = 4  # of these, those whose totals stay in registers while scales pass by


def byte_tile_scratch_bytes() -> int:
    """What a thread of `kernels/byte_tiles.py` needs."""
    return 64 + BYTE_TILE_CHUNK * (BLOCK * 16 + 4 * 64 + 2 * TILE) + (TOGETHER + 2 * BYTE_TILE_TOKENS) * 64


def tile_scratch_bytes(n_tokens: int) -> int:
    """What a thread of the tile product needs: its configuration, a chunk of two panels, the results of all tokens."""
    return 64 + 2 * TILE_CHUNK * TILE + -(-n_tokens // TILE_TOKENS) * 4 * TILE


def wide_attention_tokens(registers: int, group: int) -> int:
    """Tokens whose queries pass over the keys together, as vector registers allow: a power of two."""
    tokens = max(1, (12 if registers == 32 else 4) // group)
    return 1 << min(3, tokens.bit_length() - 1)


ATTENTION_SPAN = 256  # positions that the tile attention takes at a time


def attention_scratch_bytes(head_dim: int, group: int) -> int:
    """What a thread of `kernels/attention_tiles.py` needs."""
    spans = ATTENTION_SPAN * head_dim * 2 * 2 + ATTENTION_SPAN // 16 * TILE + ATTENTION_SPAN // 32 * TILE
    per_query_tile = (head_dim // 32 + head_dim // 16) * TILE + 128
    return 64 + spans + WINDOW // 16 * group * per_query_tile
