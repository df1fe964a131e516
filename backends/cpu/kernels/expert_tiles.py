"""The products of `experts.py` for runs of many tokens, by tile instructions: see `tiles.py`."""

from __future__ import annotations

from collections.abc import Callable

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.amx import configure_tiles, release_tiles
from edgert.backends.cpu.kernels.tiles import multiply, unpacker
from edgert.backends.cpu.layouts import BLOCK, CODECS, TILE, TILE_CHUNK, TILE_TOKENS
from edgert.backends.cpu.simd import F32, GATED, I64, Emitter, Value, emitted, to_bfloat, word

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
    kind = CODECS[codec]
    panel_row = kind.panel_bytes(BLOCK, isa.lanes)
    gated, scatters = epilogue in GATED, epilogue == "scatter"
    unpack = emitted(isa, 3, unpacker(kind))
    configure = emitted(isa, 1, configure_tiles)
    release = emitted(isa, 0, release_tiles)
    multiply_tokens = emitted(isa, 6, multiply)
    finish = emitted(isa, 7, _finisher(epilogue, bias == "yes"))

    def experts(thread, n_threads, a):
        weights, x, y, y_stride = word(a, 0), word(a, 1), word(a, 2), word(a, 3)
        n_cols = word(a, 4)
        n_units = word(a, 5) // 2
        scratch = word(a, 11) + thread * word(a, 12)
        panels = scratch + 64
        results = panels + 2 * TILE_CHUNK * TILE
        n_blocks = n_cols // BLOCK
        panel_bytes = n_blocks * panel_row
        row_of_tiles = n_blocks * TILE
        configure(scratch)
        for i in range(word(word(a, 7), 0)):
            entry = word(a, 6) + 24 * i
            expert, slot, count = word(entry, 0), word(entry, 1), word(entry, 2)
            x_e = x + slot // 16 * row_of_tiles
            for unit in range(n_units * thread // n_threads, n_units * (thread + 1) // n_threads):
                first = weights + 2 * (expert * n_units + unit) * panel_bytes
                for k in range(0, n_blocks, TILE_CHUNK):
                    n = min(TILE_CHUNK, n_blocks - k)
                    unpack(first + k * panel_row, panels, n)
                    unpack(first + panel_bytes + k * panel_row, panels + TILE_CHUNK * TILE, n)
                    for t in range(0, count, TILE_TOKENS):
                        x_t = x_e + t // 16 * row_of_tiles + k * TILE
                        multiply_tokens(x_t, panels, results + t // TILE_TOKENS * 4 * TILE, n, row_of_tiles, k)
                for t in range(0, count, TILE_TOKENS):
                    if gated:
                        place = y + ((slot + t) // 16 * (n_units // 2) + unit // 2) * TILE + unit % 2 * 32
                    elif scatters:
                        place = y + unit * 128
                    else:
                        place = y + (slot + t) * y_stride + unit * 128
                    finish(
                        results + t // TILE_TOKENS * 4 * TILE,
                        place,
                        n_units // 2 * TILE if gated else y_stride,
                        min(count - t, TILE_TOKENS),
                        word(a, 8) + 8 * (slot + t),
                        word(a, 9) + 4 * (slot + t),
                        word(a, 10) + (expert * n_units + unit) * 128,
                    )
        release()

    return experts


def _finisher(epilogue: str, biased: bool) -> Callable[..., None]:
    """Of up to 32 slots and two panels."""

    def finish(
        e: Emitter, results: Value, y: Value, stride: Value, count: Value, rows: Value, shares: Value, bias: Value
    ) -> None:
        biases = [e.load(e.vf, bias, 64 * i) for i in range(2)] if biased else []
        with e.loop(0, count) as slot:
            half, token = e.b.sdiv(slot, e.i64(16)), e.b.srem(slot, e.i64(16))
            line = e.add(results, e.mul(half, 2 * TILE), e.mul(token, 64))
            values = [e.load(e.vf, line, i * TILE) for i in range(2)]
            if biased:
                values = [e.b.fadd(value, added) for value, added in zip(values, biases, strict=True)]
            if epilogue in GATED:
                e.store(to_bfloat(e, e.glu(epilogue, *values)), e.add(y, e.b.mul(stride, half), e.mul(token, 64)))
            elif epilogue == "scatter":
                place = e.add(y, e.b.mul(stride, e.load(I64, rows, e.mul(slot, 8))))
                share = e.broadcast(F32, shares, e.mul(slot, 4))
                for i, value in enumerate(values):
                    e.store(e.fma(value, share, e.load(e.vf, place, 64 * i)), place, 64 * i)
            else:
                for i, value in enumerate(values):
                    e.store(value, e.add(y, e.b.mul(stride, slot)), 64 * i)

    return finish
