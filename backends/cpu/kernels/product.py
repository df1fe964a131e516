"""Product of packed weights and a batch's activations, with what follows it done while the result is at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.kernels.panel import float_panel_product, panel_product
from edgert.backends.cpu.layouts import BLOCK, CODECS, WORDS_BYTES, Codec
from edgert.backends.cpu.simd import GATED, Emitter, Value, emitted, word

FAR = 16384  # bytes at least from what is multiplied to the panel that is asked for meanwhile

# Places of the arguments (int64 each).
ARGUMENTS = (
    "weights",  # panels
    "x",  # int8 (or float32 for float weights) activations (n_tokens, n_cols)
    "words",  # four words for each block of the activations
    "y",  # float32 (n_tokens, y_stride / 4)
    "y_stride",  # bytes
    "n_cols",
    "n_panels",
    "n_tokens_at",  # address of the int64 number of tokens of this step
    "private",  # bytes between the threads' own copies of x and words (0: shared)
    "first_row_at",  # address of the int64 row of y at which the tokens start
    "bias",  # float32 (n_panels, lanes), where there is one
    "following",  # panels that the team reads next, of which each thread asks for the first of its share
    "following_panels",
    "following_panel_bytes",
)


def build(
    isa: Isa, codec: str, width: str, epilogue: str, bias: str = "no", form: str = "int8"
) -> Callable[[int, int, int], None]:
    """A product kernel.

    width:     tokens that run together, each weight unpacked once for all of them; the last run may reach past
               n_tokens, so x and y have `width` rows to spare
    epilogue:  "store" writes y; "add" adds to y; an activation takes panels in pairs, gate and up, and writes
               activation(gate) * up
    bias:      "yes" adds the bias to what is stored or added
    form:      of the activations beside packed weights: "int8" or "pairs" (see `rows.py`)
    """
    kind = CODECS[codec]
    tile = int(width)
    pair = 2 if epilogue in GATED else 1
    has_bias = bias == "yes"
    run = _panels_times_tokens(isa, kind, tile, epilogue, has_bias, form == "pairs")
    x_bytes = 4 if kind.is_float else 1
    panel_row = kind.panel_bytes(BLOCK, isa.lanes)
    lanes = isa.lanes

    def product(thread, n_threads, a):
        private = thread * word(a, 8)
        x, words = word(a, 1) + private, word(a, 2) + private
        y_stride = word(a, 4)
        n_cols = word(a, 5)
        n_units = word(a, 6) // pair
        n_tokens = word(word(a, 7), 0)
        y = word(a, 3) + word(word(a, 9), 0) * y_stride
        panel_bytes = n_cols * panel_row // BLOCK
        x_stride = n_cols * x_bytes
        words_stride = n_cols // BLOCK * WORDS_BYTES
        end = n_units * (thread + 1) // n_threads
        further = 1 + FAR // (pair * panel_bytes)
        then = word(a, 11) + word(a, 12) * thread // n_threads * word(a, 13)
        for unit in range(n_units * thread // n_threads, end):
            panel = word(a, 0) + unit * pair * panel_bytes
            next_unit = unit + further
            following = word(a, 0) + next_unit * pair * panel_bytes
            if next_unit >= end:
                following = then + (next_unit - end) * pair * word(a, 13)
            for t in range(0, n_tokens, tile):
                run(
                    panel,
                    x + t * x_stride,
                    words + t * words_stride,
                    n_cols,
                    x_stride,
                    words_stride,
                    y + t * y_stride + unit * lanes * 4,
                    y_stride,
                    word(a, 10) + unit * lanes * 4 if has_bias else 0,
                    following,
                )

    return product


def products(
    e: Emitter,
    codec: Codec,
    n_tokens: int,
    panel: Value,
    x: Value,
    words: Value,
    n_cols: Value,
    x_stride: Value,
    words_stride: Value,
    following: Value,
    paired: bool = False,
) -> list[Value]:
    """One panel times n_tokens tokens, whatever its codec; a panel at `following` is read soon."""
    if codec.is_float:
        return float_panel_product(e, codec, n_tokens, panel, x, n_cols, x_stride)
    n_blocks = e.b.sdiv(n_cols, e.i64(BLOCK))
    return panel_product(e, codec, n_tokens, panel, x, words, n_blocks, x_stride, words_stride, following, paired)


def _panels_times_tokens(isa: Isa, codec: Codec, n_tokens: int, epilogue: str, has_bias: bool, paired: bool) -> Any:
    """One panel (or pair) times n_tokens tokens, then the epilogue."""

    def finish(e: Emitter, panel, x, words, n_cols, x_stride, words_stride, y, y_stride, bias, following) -> None:  # type: ignore[no-untyped-def]
        def product(at: Value, then: Value) -> list[Value]:
            return products(e, codec, n_tokens, at, x, words, n_cols, x_stride, words_stride, then, paired)

        ups: list[Value | None] = [None] * n_tokens
        if epilogue in GATED:
            bytes_32 = codec.panel_bytes(BLOCK, e.lanes)
            second = e.add(panel, e.b.sdiv(e.mul(n_cols, bytes_32), e.i64(BLOCK)))
            gates, ups = product(panel, following), list(product(second, e.add(following, e.b.sub(second, panel))))
        else:
            gates = product(panel, following)
        for t, (gate, up) in enumerate(zip(gates, ups, strict=True)):
            finish_token(e, epilogue, gate, up, e.add(y, e.mul(y_stride, t)), bias if has_bias else None)

    return emitted(isa, 10, finish)


def finish_token(e: Emitter, epilogue: str, value: Value, up: Value | None, place: Value, bias: Value | None) -> None:
    """The epilogue of a panel's product with a token; up: the second of a pair's, for gated ones."""
    if up is not None:
        value = e.glu(epilogue, value, up)
    if bias is not None:
        value = e.b.fadd(value, e.load(e.vf, bias))
    if epilogue == "add":
        value = e.b.fadd(value, e.load(e.vf, place))
    e.store(value, place)
