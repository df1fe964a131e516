"""The products of `experts.py` for runs of many tokens, by tile instructions: see `tiles.py`."""

from __future__ import annotations

from collections.abc import Callable

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.amx import configure_tiles, release_tiles
from edgert.backends.cpu.kernels.tiles import finisher, unit_product
from edgert.backends.cpu.layouts import BLOCK, CODECS, TILE, TILE_TOKENS
from edgert.backends.cpu.simd import GATED, emitted, word

ARGUMENTS = (
    "weights",  # panels, one expert after the other
    "x",  # bf16 tiles by slot; an expert's slots start at a multiple of TILE_TOKENS
    "y",  # float32 rows: by slot; with "scatter" those of the step; for activations bf16 tiles by slot
    "y_stride",  # bytes
    "n_cols",
    "n_panels",  # of one expert, even
    "table",  # see `gather.py`
    "n_active_at",
    "rows",  # int64 (n_slots): the row of y that a slot is added to
    "shares",  # float32 (n_slots): what it is multiplied by
    "bias",  # float32 (n_expert, n_panels, 16), where there is one
    "scratch",
    "scratch_stride",  # bytes between the threads' scratches
)


def build(isa: Isa, codec: str, epilogue: str, bias: str = "no") -> Callable[[int, int, int], None]:
    """A kernel of one type of weights; epilogues as in `experts.py`, activations write bf16 tiles."""
    panel_row = CODECS[codec].panel_bytes(BLOCK, isa.lanes)
    gated, scatters = epilogue in GATED, epilogue == "scatter"
    configure = emitted(isa, 1, configure_tiles)
    release = emitted(isa, 0, release_tiles)
    multiply = unit_product(isa, CODECS[codec])
    finish = emitted(isa, 7, finisher(epilogue, bias == "yes"))

    def experts(thread, n_threads, a):
        x, y, y_stride = word(a, 1), word(a, 2), word(a, 3)
        n_blocks = word(a, 4) // BLOCK
        n_units = word(a, 5) // 2
        scratch = word(a, 11) + thread * word(a, 12)
        unit_bytes = 2 * n_blocks * panel_row
        configure(scratch)
        for i in range(word(word(a, 7), 0)):
            entry = word(a, 6) + 24 * i
            expert, slot, count = word(entry, 0), word(entry, 1), word(entry, 2)
            x_e = x + slot // 16 * n_blocks * TILE
            for unit in range(n_units * thread // n_threads, n_units * (thread + 1) // n_threads):
                place = expert * n_units + unit
                results = multiply(word(a, 0) + place * unit_bytes, x_e, scratch + 64, n_blocks, count)
                for t in range(0, count, TILE_TOKENS):
                    if gated:
                        y_t = y + ((slot + t) // 16 * (n_units // 2) + unit // 2) * TILE + unit % 2 * 32
                    elif scatters:
                        y_t = y + unit * 128
                    else:
                        y_t = y + (slot + t) * y_stride + unit * 128
                    finish(
                        results + t // TILE_TOKENS * 4 * TILE,
                        y_t,
                        n_units // 2 * TILE if gated else y_stride,
                        min(count - t, TILE_TOKENS),
                        word(a, 8) + 8 * (slot + t),
                        word(a, 9) + 4 * (slot + t),
                        word(a, 10) + place * 128,
                    )
        release()

    return experts
