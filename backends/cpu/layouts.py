"""How weights lie in memory for the kernels: few packed layouts that serve many GGUF types.

Rows stand in panels of `lanes` rows (16 with AVX-512, 8 with AVX2, 4 with NEON), so that one vector holds the same
place of each row. Along a row, 32 weights make a block; the blocks of a panel follow one another. A block holds:

    codes    4 bits: 4 vectors of 4*lanes bytes; byte 4*r + i of vector v holds for row r the weight 4v + i in its
             low nibble and 16 + 4v + i in its high one. 8 bits: 8 such vectors, one weight a byte.
    high     5 bits: one vector, bit j of a byte belongs to vector j of the eight unpacked ones;
             6 bits: two vectors, two bits for each of the eight (vectors 0-3, then 4-7).
    scales   float16 (32 / group, lanes)
    minima   float16 (lanes), where the codec has them

Float weights lie k by k: (n_cols, lanes) of their own type. Rows are padded with zeros to a whole panel.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 32  # weights along a row that share the layout's unit, and activations that share a scale
PAGE = 16  # positions of a sequence that are cached together
AHEAD = 12  # entries beyond the end of a sequence's table of pages that kernels may look at
WINDOW = 64  # positions that are computed as wide rows when a batch holds all of them
WORDS_BYTES = 16  # beside each block of int8 activations, four float32 words (see `kernels/panel.py`)
CHUNK = 256  # positions of a single token's attention that one unit of work covers

IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Codec:
    """weight = scale * (code - offset) + minimum, or scale * table[code]."""

    name: str
    bits: int
    group: int = 32
    has_min: bool = False
    offset: int = 0
    table: tuple[int, ...] = ()

    @property
    def is_float(self) -> bool:
        return self.bits >= 16 or self.name == "f32"

    def block_bytes(self, lanes: int) -> int:
        """Bytes of 32 columns of one panel."""
        if self.is_float:
            return BLOCK * lanes * self.bits // 8
        return lanes * (BLOCK * self.bits // 8 + 2 * (BLOCK // self.group) + 2 * self.has_min)

    def panel_bytes(self, n_cols: int, lanes: int) -> int:
        """Bytes of one panel of `n_cols` columns."""
        if self.is_float:
            return n_cols * lanes * self.bits // 8
        return n_cols // BLOCK * self.block_bytes(lanes)


CODECS = {
    codec.name: codec
    for codec in (
        Codec("q4_0", 4, offset=8),
        Codec("q4_1", 4, has_min=True),
        Codec("q5_0", 5, offset=16),
        Codec("q5_1", 5, has_min=True),
        Codec("q6_k", 6, group=16, offset=32),
        Codec("q8_0", 8, offset=128),
        Codec("iq4_nl", 4, offset=128, table=IQ4_NL_VALUES),
        Codec("f16", 16),
        Codec("bf16", 16),
        Codec("f32", 32),
    )
}

# GGUF type -> codec. All exact, but for Q4_K and Q5_K: their products of a 6-bit scale (or minimum) and a float16
# are rounded to float16, an error of at most 2**-11 of the scale.
CODEC_OF = {
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "Q4_0": "q4_0",
    "Q4_1": "q4_1",
    "Q4_K": "q4_1",
    "Q5_0": "q5_0",
    "Q5_1": "q5_1",
    "Q5_K": "q5_1",
    "Q6_K": "q6_k",
    "Q8_0": "q8_0",
    "IQ4_NL": "iq4_nl",
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
