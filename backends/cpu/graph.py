"""Lowers an architecture to tapes: which kernels a forward step runs, on which buffers.

A step's rows (tokens) stand in two groups. Wide rows are whole windows of WINDOW positions of a sequence; they come
first and take the kernels made for many tokens. Narrow rows are the rest: single tokens of many sequences, drafts
to check, the ends of prompts. Which group a token is in depends on its own sequence alone, so that a reply does not
change with what else is in the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu.cache import PagedCache
from edgert.backends.cpu.compiler import name_of
from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.layouts import (
    CHUNK,
    CODECS,
    TILE_TOKENS,
    attention_scratch_bytes,
    partial_bytes,
    tile_scratch_bytes,
    wide_attention_tokens,
)
from edgert.backends.cpu.memory import Arena, aligned
from edgert.backends.cpu.model_weights import LayerWeights, ModelWeights
from edgert.backends.cpu.tape import Op, Reads, float_bits
from edgert.backends.cpu.weights import Matrix
from edgert.quantize.architecture import Architecture

SPARE = 8  # rows that buffers have beyond n_batch, since products run in steps of up to so many
WIDTHS = (1, 2, 3, 4, 5, 6, 8)  # tokens that a product kernel may run together
ARENA_BYTES = 8 << 20  # of buffers allocated at a time
PRIVATE_ROWS = 2  # up to so many rows every thread prepares its own copy instead of meeting the others

# Places in a step's header.
N_TOKENS, N_WIDE, N_NARROW, N_WANTED, ZERO, N_WANTED_TILED = range(6)


def width_for(n: int) -> int:
    """The narrowest product kernel that runs n tokens at once, or the widest."""
    return next((width for width in WIDTHS if width >= n), WIDTHS[-1])


@dataclass(frozen=True)
class Group:
    """Rows that take the same kernels: from which row, how many (places in the header), in which form, how wide."""

    first: int
    count: int
    form: str  # "int8" or "tiles"
    width: int
    private: bool = False


@dataclass(frozen=True)
class Shape:
    """What of a step decides its tape: whether there are wide rows, and the widths of the other products."""

    wide: bool
    narrow: int  # width of the narrow rows' products, 0: none
    wanted: int  # width of the head's product, 0: no logits, TILE_TOKENS: by tiles
    private: bool


class Graph:
    """Builds tapes for one model; owns the buffers that they work on."""

    def __init__(
        self,
        architecture: Architecture,
        weights: ModelWeights,
        cache: PagedCache,
        isa: Isa,
        n_threads: int,
        n_batch: int,
        tile_head: bool = False,
    ) -> None:
        a = architecture
        self.architecture, self.weights, self.cache, self.isa, self.n_threads = a, weights, cache, isa, n_threads
        self.tiles = isa.tiles and all(not CODECS[m.codec].is_float or m.codec == "bf16" for m in weights.matrices())
        self.tile_head = self.tiles and tile_head
        rows = n_batch + SPARE
        arena = self.arena = Arena(ARENA_BYTES)
        self.header = arena.integers(8)
        self.tokens, self.positions, self.slots, self.wanted = (arena.integers(rows) for _ in range(4))
        self.n_qkv = -(-(a.n_head + 2 * a.n_head_kv) * a.head_dim // 32) * 32
        n_attn = a.n_head * a.head_dim
        most = max(a.n_embd, a.n_ff, n_attn)
        has_floats = any(CODECS[matrix.codec].is_float for matrix in weights.matrices())
        self.private_stride = SPARE * most * (4 if has_floats else 1)  # words take half a byte each
        n_private = n_threads * self.private_stride
        self.words = arena.take(max(rows * most // 2, n_private))
        self.x = arena.floats(rows, a.n_embd)
        self.qkv = arena.floats(rows, self.n_qkv)
        self.attn = arena.floats(max(rows, n_threads * PRIVATE_ROWS), n_attn)
        self.hidden = arena.floats(rows, a.n_ff)
        self.up = arena.floats(rows, a.n_ff) if any(not layer.gate_up for layer in weights.layers) else self.hidden
        self.post = arena.floats(rows, a.n_embd) if a.post_norm else self.x
        self.forms: dict[str, NDArray[np.uint8]] = {
            "int8": arena.take(max(rows * most, n_private)),
            "f32": arena.take(max(rows * most * 4, n_private) if has_floats else 0),
            "tiles": arena.take(rows * most * 2 if self.tiles else 0),
            "none": arena.take(0),
        }
        self.gated_tiles = arena.take(rows * a.n_ff * 2 if self.tiles else 0)
        group = a.n_head // a.n_head_kv
        self.tile_attention = self.tiles and a.head_dim % 32 == 0
        needs = [wide_attention_tokens(isa.registers, group) * group * partial_bytes(a.head_dim)]
        if self.tiles:
            needs += [tile_scratch_bytes(n_batch), attention_scratch_bytes(a.head_dim, group)]
        self.scratch_stride = max(needs) + 63 & ~63
        self.scratch = arena.take(n_threads * self.scratch_stride)
        self.rope_tables: dict[tuple[float, float, int, bool], tuple[NDArray[np.float64], NDArray[np.float32]]] = {}
        for layer in a.layers:
            if self._rope_key(layer.rope) not in self.rope_tables:
                frequencies = np.ascontiguousarray(layer.rope.frequencies(), np.float64)
                self.rope_tables[self._rope_key(layer.rope)] = (frequencies, arena.floats(rows, layer.rope.n_dims))
        self.key_means = arena.floats(a.n_layer, a.n_head_kv, a.head_dim)
        # Most of it is never touched: it is for many tokens of long sequences at once.
        self.max_chunks = -(-cache.max_pages * 16 // CHUNK) + 1
        self.partials = aligned(n_batch * a.n_head * self.max_chunks * partial_bytes(a.head_dim))

    @staticmethod
    def _rope_key(rope) -> tuple[float, float, int, bool]:  # type: ignore[no-untyped-def]
        return rope.base, rope.scale, rope.n_dims, rope.factors is not None

    @property
    def n_bytes(self) -> int:
        """Bytes that the buffers may take."""
        return self.arena.n_bytes

    def shape(self, n_wide: int, n_narrow: int, n_wanted: int) -> Shape:
        """The shape of a step with so many rows."""
        n_int8 = n_narrow if self.tiles else n_wide + n_narrow
        return Shape(
            n_wide > 0,
            width_for(n_int8) if n_int8 else 0,
            TILE_TOKENS if self.tiled(n_wanted) else width_for(n_wanted) if n_wanted else 0,
            not n_wide and 0 < n_narrow <= PRIVATE_ROWS,
        )

    def tiled(self, n_wanted: int) -> int:
        """Rows that the head computes by tiles to give so many logits; 0: it takes the kernels of few tokens."""
        return -(-n_wanted // TILE_TOKENS) * TILE_TOKENS if self.tile_head and n_wanted >= TILE_TOKENS else 0

    def ops(self, shape: Shape, output: list[Matrix] | None = None) -> list[Op]:
        """The ops of a step. Where the logits go is set by `set_logits`.

        output:  the head's matrices, where they are not the model's
        """
        a = self.architecture
        groups = self._groups(shape)
        ops = [*self._angles(), self._embed()]
        post: NDArray[np.float32] | None = None  # the norm of what the step before left in self.post
        for i, layer in enumerate(self.weights.layers):
            ops += self._norm(groups, layer.attn_norm, layer.qkv, post)
            ops += self._product(groups, layer.qkv, self.qkv, "store", private=post is None)
            ops += self._attention(shape, i, layer)
            ops += self._from_attention(shape, groups, i, layer.attn_output)
            ops += self._product(groups, layer.attn_output, *self._residual)
            post = layer.post_attention_norm
            ops += self._norm(groups, layer.ffn_norm, self._gates(layer), post)
            ops += self._feed_forward(groups, layer, private=post is None)
            ops += self._product(groups, layer.ffn_down, *self._residual, gated=layer.gate_up is not None)
            post = layer.post_ffw_norm
        if shape.wanted:
            if post is not None:
                everything = Group(ZERO, N_TOKENS, "int8", 0)
                ops.append(self._rows(everything, "post", "none", self.x, a.n_embd, post_weight=post))
            ops += self._head(shape, output or self.weights.output)
        return ops

    def observed_ops(self, shape: Shape) -> list[Op]:
        """The ops of a step whose products all read rows that `Reads.values` can show: tiles are spread out first."""
        ops = []
        for op in self.ops(shape):
            if op.reads is not None and op.reads.form == "tiles":
                reads, n_cols = op.reads, op.reads.matrix.n_cols
                rows = self.floats[: len(self.tokens) * n_cols * 4]
                ops.append(Op("untile", [_address(reads.rows), n_cols, self._at(reads.count), _address(rows)]))
                op.reads = replace(reads, form="f32", rows=rows)
            ops.append(op)
        return ops

    @functools.cached_property
    def floats(self) -> NDArray[np.uint8]:
        """Room for the widest rows in float32, where tiles are spread out."""
        most = max(matrix.n_cols for matrix in self.weights.matrices())
        return self.arena.take(len(self.tokens) * most * 4)

    @property
    def _residual(self) -> tuple[NDArray[np.float32], str]:
        """Where the products that end a block go: added to x, or aside if a norm comes between."""
        return (self.post, "store") if self.architecture.post_norm else (self.x, "add")

    def set_logits(self, ops: list[Op], logits: NDArray[np.float32], output: list[Matrix] | None = None) -> None:
        """Points the head's products at the rows of `logits`, float32 (n_wanted + SPARE, stride)."""
        output, column = output or self.weights.output, 0
        for op, matrix in zip(ops[-len(output) :], output, strict=True):
            place = 2 if op.reads is not None and op.reads.form == "tiles" else 3
            op.arguments[place : place + 2] = logits.ctypes.data + 4 * column, logits.strides[0]
            column += matrix.n_rows

    def _groups(self, shape: Shape) -> list[Group]:
        if not self.tiles:
            return [Group(ZERO, N_TOKENS, "int8", shape.narrow, shape.private)]
        groups = []
        if shape.wide:
            groups.append(Group(ZERO, N_WIDE, "tiles", 0))
        if shape.narrow:
            groups.append(Group(N_WIDE, N_NARROW, "int8", shape.narrow, shape.private))
        return groups

    def _at(self, place: int) -> int:
        return self.header.ctypes.data + 8 * place

    def _angles(self) -> list[Op]:
        return [
            Op("angles", [self.positions.ctypes.data, self._at(N_TOKENS), frequencies.ctypes.data, len(frequencies),
                          out.ctypes.data], meet=False)
            for frequencies, out in self.rope_tables.values()
        ]  # fmt: skip

    def _embed(self) -> Op:
        matrix = self.weights.token_embd
        return Op(
            name_of("embed", codec=matrix.codec),
            [
                self.tokens.ctypes.data,
                self._at(N_TOKENS),
                matrix.data.ctypes.data,
                matrix.n_cols,
                self.x.ctypes.data,
                float_bits(self.architecture.embedding_scale),
            ],
        )

    def _rows(
        self,
        group: Group,
        kernel: str,
        form: str,
        source: NDArray[np.float32],
        n_cols: int,
        *,
        weight: NDArray[np.float32] | None = None,
        index: NDArray[np.int64] | None = None,
        post_weight: NDArray[np.float32] | None = None,
        private: bool = False,
        window: int = 0,
    ) -> Op:
        """An op of `kernels/rows.py`; with `private`, every thread prepares all rows for itself and does not wait."""
        a = self.architecture
        parameters: dict[str, object] = {"source": kernel, "form": form}
        if kernel == "merge":
            parameters |= {"n_head": a.n_head, "head_dim": a.head_dim, "type_v": self.cache.type_v}
        return Op(
            name_of("rows", **parameters),
            [
                source.ctypes.data,
                source.strides[0],
                _address(weight),
                n_cols,
                self._at(group.first),
                self._at(group.count),
                _address(self.forms[form]),
                self.words.ctypes.data,
                self.private_stride if private else 0,
                _address(index),
                float_bits(a.norm_eps),
                self.post.ctypes.data,
                self.post.strides[0],
                _address(post_weight),
                self.partials.ctypes.data,
                self.max_chunks,
                self.positions.ctypes.data,
                window,
                PRIVATE_ROWS * source.strides[0] if private else 0,
            ],
            meet=not private,
        )

    @staticmethod
    def _forms_for(group: Group, matrices: Sequence[Matrix]) -> list[str]:
        """The forms in which these matrices read the group's activations."""
        if group.form == "tiles":
            return ["tiles"]
        return sorted({_form(matrix) for matrix in matrices})

    def _norm(
        self,
        groups: list[Group],
        weight: NDArray[np.float32],
        matrices: Sequence[Matrix],
        post: NDArray[np.float32] | None,
    ) -> list[Op]:
        """The norm of x before some products; with `post`, self.post is normed by it and added to x first."""
        ops = []
        for group in groups:
            for i, form in enumerate(self._forms_for(group, matrices)):
                kernel = "norm" if post is None or i else "post"
                op = self._rows(
                    group,
                    kernel,
                    form,
                    self.x,
                    self.architecture.n_embd,
                    weight=weight,
                    post_weight=post,
                    private=group.private and post is None,
                )
                ops.append(op)
        return ops

    def _product(
        self,
        groups: list[Group],
        matrices: Sequence[Matrix],
        y: NDArray[np.float32],
        epilogue: str,
        private: bool = True,
        gated: bool = False,
    ) -> list[Op]:
        """Products of matrices one below the other with the prepared activations, into columns of y.

        private:  whether narrow rows were prepared privately (if the group is)
        gated:    whether tiles come from the gated product before
        """
        ops = []
        for group in groups:
            column = 0
            for matrix in matrices:
                place = y.ctypes.data + 4 * column
                ops.append(self._one_product(group, matrix, place, y.strides[0], epilogue, private, gated))
                column += matrix.n_rows
                # Panels past the last row write zeros over what stands to the right.
                ops[-1].meet = matrix.n_panels * self.isa.lanes != matrix.n_rows
        ops[-1].meet = True
        return ops

    def _one_product(
        self,
        group: Group,
        matrix: Matrix,
        y: int,
        stride: int,
        epilogue: str,
        private: bool = True,
        gated: bool = False,
    ) -> Op:
        form = group.form if group.form == "tiles" else _form(matrix)
        rows = self.gated_tiles if gated and form == "tiles" else self.forms[form]
        reads = Reads(matrix, form, group.count, rows, self.words)
        if form == "tiles":
            return Op(
                name_of("tiles", codec=matrix.codec, epilogue=epilogue),
                [
                    matrix.data.ctypes.data,
                    rows.ctypes.data,
                    y,
                    stride,
                    matrix.n_cols,
                    matrix.n_panels,
                    self._at(group.count),
                    self.scratch.ctypes.data,
                    self.scratch_stride,
                ],
                reads=reads,
            )
        return Op(
            name_of("product", codec=matrix.codec, width=group.width, epilogue=epilogue),
            [
                matrix.data.ctypes.data,
                rows.ctypes.data,
                self.words.ctypes.data,
                y,
                stride,
                matrix.n_cols,
                matrix.n_panels,
                self._at(group.count),
                self.private_stride if group.private and private else 0,
                self._at(group.first),
            ],
            reads=reads,
        )

    def _attention(self, shape: Shape, i: int, layer: LayerWeights) -> list[Op]:
        """Bias, head norms, rotation and the write to the cache; then the attention of both groups of rows."""
        a, cache = self.architecture, self.cache
        table, width, keys, values, stride = cache.addresses(i)
        rope = a.layers[i].rope
        window = a.layers[i].window
        common = [self.positions.ctypes.data, self.slots.ctypes.data, table, width, keys, values, stride]
        heads = {"n_head": a.n_head, "n_head_kv": a.n_head_kv, "head_dim": a.head_dim,
                 "type_k": cache.type_k, "type_v": cache.type_v}  # fmt: skip
        ops = [
            Op(
                name_of("rope", **heads, n_rot=rope.n_dims, style=rope.style),
                [
                    self.qkv.ctypes.data,
                    self.qkv.strides[0],
                    self._at(N_TOKENS),
                    *common,
                    self.rope_tables[self._rope_key(rope)][1].ctypes.data,
                    0 if layer.bias is None else layer.bias.ctypes.data,
                    0 if layer.q_norm is None else layer.q_norm.ctypes.data,
                    0 if layer.k_norm is None else layer.k_norm.ctypes.data,
                    float_bits(a.norm_eps),
                    float_bits(a.attention_scale),
                    self.key_means[i].ctypes.data,
                ],
            )
        ]
        if shape.wide:
            kernel, out = "attention_wide", _address(self.attn)
            if self.tile_attention:
                kernel, out = "attention_tiles", _address(self.forms["tiles"])
            ops.append(
                Op(
                    name_of(kernel, **heads),
                    [self.qkv.ctypes.data, self.qkv.strides[0], self._at(N_WIDE), *common, window,
                     out, self.scratch.ctypes.data, self.scratch_stride],
                    meet=False,
                )
            )  # fmt: skip
        ops.append(
            Op(
                name_of("attention", **heads),
                [self.qkv.ctypes.data, self.qkv.strides[0], self._at(N_WIDE), self._at(N_NARROW), *common, window,
                 self.partials.ctypes.data, self.max_chunks],
            )
        )  # fmt: skip
        return ops

    def _from_attention(self, shape: Shape, groups: list[Group], i: int, matrices: list[Matrix]) -> list[Op]:
        """The attention's results in the form that attn_output reads."""
        a = self.architecture
        n_cols = a.n_head * a.head_dim
        window = a.layers[i].window
        narrow = Group(N_WIDE, N_NARROW, "int8", 0)
        form = _form(matrices[0])
        if shape.private:
            return [self._rows(narrow, "merge", form, self.attn, n_cols, private=True, window=window)]
        if not self.tiles:  # joined into float32 rows below the wide ones first; then all rows are converted together
            joined = self._rows(narrow, "merge", "none", self.attn, n_cols, window=window)
            return [joined, self._rows(groups[0], "plain", form, self.attn, n_cols)]
        ops = []
        if shape.wide and not self.tile_attention:
            ops.append(self._rows(groups[0], "plain", "tiles", self.attn, n_cols))
        if shape.narrow:
            ops.append(self._rows(narrow, "merge", form, self.attn, n_cols, window=window))
        return ops

    @staticmethod
    def _gates(layer: LayerWeights) -> list[Matrix]:
        return [layer.gate_up] if layer.gate_up else [*layer.gate, *layer.up]

    def _feed_forward(self, groups: list[Group], layer: LayerWeights, private: bool) -> list[Op]:
        """activation(gate) * up, in the form that ffn_down reads."""
        a = self.architecture
        ops = []
        for group in groups:
            if layer.gate_up is None:
                ops += self._product([group], layer.gate, self.hidden, "store", private)
                ops += self._product([group], layer.up, self.up, "store", private)
            else:
                y, stride = self.hidden.ctypes.data, self.hidden.strides[0]
                if group.form == "tiles":
                    y, stride = self.gated_tiles.ctypes.data, 0
                ops.append(self._one_product(group, layer.gate_up, y, stride, a.activation, private))
        for group in groups:
            if group.form == "tiles" and layer.gate_up:
                continue
            kernel = "plain" if layer.gate_up else a.activation
            for form in self._forms_for(group, layer.ffn_down):
                ops.append(self._rows(group, kernel, form, self.hidden, a.n_ff, weight=self.up, private=group.private))
        return ops

    def _head(self, shape: Shape, output: list[Matrix]) -> list[Op]:
        """The last norm and the logits of the wanted rows."""
        tiles = shape.wanted == TILE_TOKENS
        wanted = Group(ZERO, N_WANTED, "tiles" if tiles else "int8", shape.wanted)
        norm = self.weights.output_norm
        ops = [
            self._rows(wanted, "norm", form, self.x, self.architecture.n_embd, weight=norm, index=self.wanted)
            for form in self._forms_for(wanted, output)
        ]
        rows = replace(wanted, count=N_WANTED_TILED) if tiles else wanted
        for matrix in output:
            op = self._one_product(rows, matrix, 0, 0, "store")
            assert op.reads is not None
            op.reads = replace(op.reads, count=N_WANTED)
            ops.append(op)
        return ops


def _form(matrix: Matrix) -> str:
    """The form in which a matrix reads narrow rows."""
    return "f32" if CODECS[matrix.codec].is_float else "int8"


def _address(array: NDArray[Any] | None) -> int:
    return 0 if array is None else array.ctypes.data
