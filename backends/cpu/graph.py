"""Lowers an architecture to tapes: which kernels a forward step runs, on which buffers.

A step's rows (tokens) stand in two groups. Wide rows are whole windows of WINDOW positions of a sequence; they come
first and take the kernels made for many tokens. Narrow rows are the rest: single tokens of many sequences, drafts
to check, the ends of prompts. Which group a token is in depends on its own sequence alone, so that a reply does not
change with what else is in the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu.attention_ops import AttentionOps
from edgert.backends.cpu.cache import PagedCache
from edgert.backends.cpu.compiler import name_of
from edgert.backends.cpu.expert_ops import ExpertOps, needs_experts
from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.layouts import BLOCK, CODECS, TILE_TOKENS, byte_tile_scratch_bytes, tile_scratch_bytes
from edgert.backends.cpu.memory import Arena
from edgert.backends.cpu.model_weights import LayerWeights, ModelWeights, Norm
from edgert.backends.cpu.per_layer_ops import PerLayerOps
from edgert.backends.cpu.step import (
    BYTE_TILES,
    N_NARROW,
    N_PLACES,
    N_TOKENS,
    N_WANTED,
    N_WANTED_TILED,
    N_WIDE,
    PRIVATE_ROWS,
    SPARE,
    WIDTHS,
    ZERO,
    FewTokens,
    Group,
    Shape,
    width_for,
)
from edgert.backends.cpu.tape import Op, Reads, address, float_bits
from edgert.backends.cpu.weights import Matrix
from edgert.quantize.architecture import Architecture

ARENA_BYTES = 8 << 20  # of buffers allocated at a time
FOLLOWING = 3  # the last arguments of `kernels/product.py`, which tell of the weights that follow


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
        floats = {matrix.codec for matrix in weights.matrices() if CODECS[matrix.codec].is_float}
        self.tiles = isa.tiles and floats <= {"bf16"}
        self.bfloat = isa.bfloat and not isa.tiles and not floats
        self.tile_head = self.tiles and tile_head
        rows = n_batch + SPARE
        arena = self.arena = Arena(ARENA_BYTES)
        self.header = arena.integers(N_PLACES)
        self.tokens, self.positions, self.slots, self.wanted = (arena.integers(rows) for _ in range(4))
        self.few = FewTokens(self.tokens, self.positions, self.slots, self.wanted, self.header)
        # To which position each row's attention looks.
        self.reach = arena.integers(rows) if a.encoder else self.positions
        self.zeros = arena.integers(rows) if a.encoder else self.positions
        most = max(a.n_embd, a.n_ff, a.n_head * a.head_dim)
        self.private_stride = SPARE * most * (4 if floats else 1)  # words take half a byte each
        n_private = n_threads * self.private_stride
        self.words = arena.take(max(rows * most // 2, n_private))
        self.x = arena.floats(rows, a.n_embd)
        self.attention = AttentionOps(self, rows, n_batch)
        self.hidden = arena.floats(rows, a.n_ff)
        apart = any(layer.gate and layer.up for layer in weights.layers)
        self.up = arena.floats(rows, a.n_ff) if apart else self.hidden
        self.post = arena.floats(rows, a.n_embd) if a.post_norm else self.x
        self.forms: dict[str, NDArray[np.uint8]] = {
            "int8": arena.take(max(rows * most, n_private)),
            "f32": arena.take(max(rows * most * 4, n_private) if floats else 0),
            "tiles": arena.take(rows * most * 2 if self.tiles else 0),
            "none": arena.take(0),
        }
        self.forms["pairs"] = self.forms["int8"]
        self.gated_tiles = arena.take(rows * a.n_ff * 2 if self.tiles else 0)
        self.experts = ExpertOps(self, rows) if needs_experts(a) else None
        self.per_layer = PerLayerOps(self, weights.per_layer, rows) if weights.per_layer else None
        needs = self.attention.scratch_bytes
        if self.tiles:
            needs = max(needs, tile_scratch_bytes(n_batch), byte_tile_scratch_bytes())
        self.scratch_stride = needs + 63 & ~63
        self.scratch = arena.take(n_threads * self.scratch_stride)

    @property
    def n_bytes(self) -> int:
        """Bytes that the buffers may take."""
        return self.arena.n_bytes

    def shape(self, n_wide: int, n_narrow: int, n_wanted: int) -> Shape:
        """The shape of a step with so many rows."""
        n_int8 = n_narrow if self.tiles else n_wide + n_narrow
        return Shape(
            n_wide > 0,
            self._width(n_int8),
            TILE_TOKENS if self.tiled(n_wanted) else self._width(n_wanted),
            not n_wide and 0 < n_narrow <= PRIVATE_ROWS and not self.architecture.encoder,
        )

    def _width(self, n: int) -> int:
        """The width of the products of n rows."""
        return BYTE_TILES if self.tiles and n > WIDTHS[-1] else width_for(n) if n else 0

    def tiled(self, n_wanted: int) -> int:
        """Rows that the head computes by tiles to give so many logits; 0: it takes the kernels of few tokens."""
        return -(-n_wanted // TILE_TOKENS) * TILE_TOKENS if self.tile_head and n_wanted >= TILE_TOKENS else 0

    def ops(self, shape: Shape, output: list[Matrix] | None = None) -> list[Op]:
        """The ops of a step. Where the logits go is set by `set_logits`.

        output:  the head's matrices, where they are not the model's
        """
        groups = self._groups(shape)
        ops = [*self.attention.angles(), *self._embed()]
        if self.per_layer:
            ops += self.per_layer.begin(groups)
        post: Norm | None = None  # the norm of what the step before left in self.post
        for i, (layer, weights) in enumerate(zip(self.architecture.layers, self.weights.layers, strict=True)):
            gates = self._gates(weights)
            shared = layer.parallel and layer.feed_forward_norm == layer.attention_norm
            ops += self.norm(groups, weights.norms.get(layer.attention_norm), weights.qkv + gates * shared, post)
            ops += self.products(groups, weights.qkv, self.attention.qkv, "store", private=post is None)
            if layer.parallel:
                if not shared:
                    ops += self.norm(groups, weights.norms.get(layer.feed_forward_norm), gates, None)
                ops += self._up(groups, weights)
            ops += self.attention.layer(shape, groups, i)
            post = weights.norms.get(layer.attention_post_norm)
            ops += self.products(groups, weights.attn_output, *self._residual(post))
            if self.experts and layer.experts and weights.experts:
                norm = weights.norms.get(layer.feed_forward_norm)
                ops += self.experts.block(groups, weights.experts, layer.experts, norm, post)
                post = None
            else:
                if not layer.parallel:
                    ops += self.norm(groups, weights.norms.get(layer.feed_forward_norm), gates, post)
                    ops += self._up(groups, weights, private=post is None)
                ops += self._activate(groups, weights)
                post = weights.norms.get("post_ffw_norm")
                y = self._residual(post)
                ops += self.products(groups, weights.ffn_down, *y, gated=weights.gate_up is not None)
            if self.per_layer:
                ops += self.per_layer.layer(groups, i, post)
                post = weights.norms["post_norm"]
            ops[-1].ends_layer = True
        if shape.wanted:
            if post is not None:
                everything = Group(ZERO, N_TOKENS, "int8", 0)
                ops.append(self.rows(everything, "post", "none", self.x, self.architecture.n_embd, post=post))
            ops += self._head(shape, output or self.weights.output)
        self._tell_what_follows(ops)
        return ops

    def _tell_what_follows(self, ops: list[Op]) -> None:
        """Lets products ask for the weights of the next one, the last for those of the next step's first."""
        reading = [op for op in ops if op.reads is not None and op.reads.runs is None]
        for op, following in zip(reading, [*reading[1:], *reading[:1]], strict=True):
            if op.kernel.startswith("product.") and following.reads is not None:
                matrix = following.reads.matrix
                panel_bytes = matrix.data.nbytes // matrix.n_panels
                op.arguments[-FOLLOWING:] = matrix.data.ctypes.data, matrix.n_panels, panel_bytes

    def observed_ops(self, shape: Shape, *, squares: bool = False) -> list[Op]:
        """The ops of a step whose products all read rows that `Reads.values` can show: tiles are spread out first.

        What the head reads is shown as it is before it is rounded.

        squares:  `Reads.squares` is enough: tiles are summed up where they are
        """
        ops = []
        head = {id(matrix) for matrix in self.weights.output}
        for op in self.ops(shape):
            if op.reads is not None and id(op.reads.matrix) in head:
                ops.append(self._states())
                op.reads = replace(op.reads, form="f32", rows=self.floats)
            elif op.reads is not None and op.reads.form == "tiles":
                reads, n_cols = op.reads, op.reads.matrix.n_cols
                rows = self.floats
                kernel, form = ("squares", "squares") if squares and reads.runs is None else ("untile", "f32")
                ops.append(Op(kernel, [address(reads.rows), n_cols, self.at(reads.count), address(rows)]))
                op.reads = replace(reads, form=form, rows=rows)
            ops.append(op)
        return ops

    def states_ops(self, shape: Shape) -> list[Op]:
        """The ops of a step that ends with what the head would read, in `floats`."""
        return [*self.ops(shape)[: -len(self._head(shape, self.weights.output))], self._states()]

    def _states(self) -> Op:
        """What the head reads of the wanted rows, before it is rounded."""
        wanted, norm, n_embd = Group(ZERO, N_WANTED, "int8", 0), self.weights.output_norm, self.architecture.n_embd
        return self.rows(wanted, "norm", "f32", self.x, n_embd, norm=norm, index=self.wanted, out=self.floats)

    @functools.cached_property
    def floats(self) -> NDArray[np.uint8]:
        """Room for the widest rows in float32, where tiles are spread out."""
        most = max(matrix.n_cols for matrix in self.weights.matrices())
        return self.arena.take(max(len(self.tokens), self.experts.n_slots if self.experts else 0) * most * 4)

    def state(self, n: int) -> list[NDArray[Any]]:
        """What the next layer finds of a step of n rows, and nothing else."""
        rows: list[NDArray[Any]] = [self.x, self.tokens, self.positions, self.slots, self.wanted]
        rows += [] if self.post is self.x else [self.post]
        rows += [self.per_layer.vectors] if self.per_layer else []
        return [self.header, *(array[:n] for array in [*rows, *self.attention.tables()])]

    def _residual(self, post: Norm | None) -> tuple[NDArray[np.float32], str]:
        """Where the product that ends a block goes: added to x, or aside if a norm comes between."""
        return (self.x, "add") if post is None else (self.post, "store")

    def set_logits(self, ops: list[Op], logits: NDArray[np.float32], output: list[Matrix] | None = None) -> None:
        """Points the head's products at the rows of `logits`, float32 (n_wanted + SPARE, stride)."""
        output, column = output or self.weights.output, 0
        for op, matrix in zip(ops[-len(output) :], output, strict=True):
            place = 2 if op.reads is not None and op.reads.form == "tiles" else 3
            op.arguments[place : place + 2] = logits.ctypes.data + 4 * column, logits.strides[0]
            column += matrix.n_rows

    def _groups(self, shape: Shape) -> list[Group]:
        if not self.tiles:
            return [Group(ZERO, N_TOKENS, self.int8_form(shape.narrow), shape.narrow, shape.private)]
        groups = []
        if shape.wide:
            groups.append(Group(ZERO, N_WIDE, "tiles", 0))
        if shape.narrow:
            groups.append(Group(N_WIDE, N_NARROW, "int8", shape.narrow, shape.private))
        return groups

    def int8_form(self, width: int) -> str:
        """The form of rows of int8 of which so many run together."""
        return "pairs" if self.isa.matrix and width > 1 else "int8"

    def at(self, place: int) -> int:
        return self.header.ctypes.data + 8 * place

    def _embed(self) -> list[Op]:
        """x: the tokens' rows, and those of their positions."""
        scale = self.architecture.embedding_scale
        tables: list[tuple[Matrix, NDArray[np.int64], float, dict[str, str]]]
        tables = [(self.weights.token_embd, self.tokens, scale, {})]
        if self.weights.position_embd:
            tables.append((self.weights.position_embd, self.positions, 1.0, {"adds": "yes"}))
        if self.weights.token_types:  # all of a text is of the first type
            tables.append((self.weights.token_types, self.zeros, 1.0, {"adds": "yes"}))
        return [
            Op(
                name_of("embed", codec=matrix.codec, **parameters),
                [
                    index.ctypes.data,
                    self.at(N_TOKENS),
                    matrix.data.ctypes.data,
                    matrix.n_cols,
                    self.x.ctypes.data,
                    float_bits(factor),
                ],
            )
            for matrix, index, factor, parameters in tables
        ]

    def rows(
        self,
        group: Group,
        source: str,
        form: str,
        x: NDArray[np.float32],
        n_cols: int,
        *,
        norm: Norm | None = None,
        post: Norm | None = None,
        up: NDArray[np.float32] | None = None,
        index: NDArray[np.int64] | None = None,
        private: bool = False,
        window: int = 0,
        sinks: NDArray[np.float32] | None = None,
        parameters: Mapping[str, object] | None = None,
        out: NDArray[Any] | None = None,
        words: NDArray[np.uint8] | None = None,
        eps: float | None = None,
    ) -> Op:
        """An op of `kernels/rows.py`; with `private`, every thread prepares all rows for itself and does not wait.

        out, words:  where the rows go; None: to the graph's own of that form
        eps:         of the norms; None: the model's
        """
        a = self.architecture
        kind = {"norm": a.norm} if (norm or post) and a.norm != "rms" else {}
        return Op(
            name_of("rows", source=source, form=form, **kind, **(parameters or {})),
            [
                x.ctypes.data,
                x.strides[0],
                address(norm.weight if norm else up),
                n_cols,
                self.at(group.first),
                self.at(group.count),
                address(self.forms[form] if out is None else out),
                address(self.words if words is None else words),
                self.private_stride if private else 0,
                address(index),
                float_bits(a.norm_eps if eps is None else eps),
                self.post.ctypes.data,
                self.post.strides[0],
                address(post.weight if post else None),
                address(self.attention.partials),
                self.attention.max_chunks,
                self.reach.ctypes.data,
                window,
                PRIVATE_ROWS * x.strides[0] if private else 0,
                address(norm.bias if norm else None),
                address(post.bias if post else None),
                0 if up is None else up.strides[0],
                float_bits(post.scale if post else 1.0),
                address(sinks),
            ],
            meet=not private,
        )

    def norm(self, groups: list[Group], norm: Norm | None, matrices: Sequence[Matrix], post: Norm | None) -> list[Op]:
        """x, or a norm of it, before some products; with `post`, self.post is normed by it and added to x first."""
        ops = []
        for group in groups:
            for i, form in enumerate(group.forms_for(matrices)):
                adds = post is not None and i == 0
                source = ("post_norm" if norm else "post") if adds else "norm" if norm else "plain"
                if self.architecture.encoder:  # x itself is normed, once
                    source = "plain" if i else "renorm"
                op = self.rows(
                    group,
                    source,
                    form,
                    self.x,
                    self.architecture.n_embd,
                    norm=norm,
                    post=post if adds else None,
                    private=group.private and post is None,
                )
                ops.append(op)
        return ops

    def products(
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
                ops.append(self.product(group, matrix, place, y.strides[0], epilogue, private, gated))
                column += matrix.n_rows
                # Panels past the last row write zeros over what stands to the right.
                ops[-1].meet = matrix.n_panels * self.isa.lanes != matrix.n_rows
        if ops:
            ops[-1].meet = True
        return ops

    def product(
        self,
        group: Group,
        matrix: Matrix,
        y: int,
        stride: int,
        epilogue: str,
        private: bool = True,
        gated: bool = False,
        rows: NDArray[np.uint8] | None = None,
    ) -> Op:
        """rows: what it reads; None: the graph's own of the matrix' form."""
        form = group.form_for(matrix)
        if rows is None:
            rows = self.gated_tiles if gated and form == "tiles" else self.forms[form]
        reads = Reads(matrix, form, group.count, rows, self.words)
        parameters = {"codec": matrix.codec, "epilogue": epilogue} | ({} if matrix.bias is None else {"bias": "yes"})
        parameters |= {"form": "pairs"} if form == "pairs" else {}
        if form == "tiles":
            return Op(
                name_of("tiles", **parameters),
                [
                    matrix.data.ctypes.data,
                    rows.ctypes.data,
                    y,
                    stride,
                    matrix.n_cols,
                    matrix.n_panels,
                    self.at(group.count),
                    self.scratch.ctypes.data,
                    self.scratch_stride,
                    address(matrix.bias),
                ],
                reads=reads,
            )
        arguments = [
            matrix.data.ctypes.data,
            rows.ctypes.data,
            self.words.ctypes.data,
            y,
            stride,
            matrix.n_cols,
            matrix.n_panels,
            self.at(group.count),
            self.private_stride if group.private and private else 0,
            self.at(group.first),
            address(matrix.bias),
        ]
        # Tiles of half a block cost as much as those of a whole one, so there they gain nothing.
        if group.width == BYTE_TILES and form == "int8" and CODECS[matrix.codec].group == BLOCK:
            arguments += [self.scratch.ctypes.data, self.scratch_stride]
            return Op(name_of("byte_tiles", **parameters), arguments, reads=reads)
        arguments += [0] * FOLLOWING
        return Op(name_of("product", width=min(group.width, WIDTHS[-1]), **parameters), arguments, reads=reads)

    @staticmethod
    def _gates(layer: LayerWeights) -> list[Matrix]:
        return [layer.gate_up] if layer.gate_up else [*layer.gate, *layer.up]

    def _up(self, groups: list[Group], layer: LayerWeights, private: bool = True) -> list[Op]:
        """gate and up, or where they are one matrix activation(gate) * up."""
        ops = []
        for group in groups:
            if layer.gate_up is None:
                hidden = self.up if layer.gate else self.hidden
                ops += self.products([group], layer.gate, self.hidden, "store", private)
                ops += self.products([group], layer.up, hidden, "store", private)
            else:
                y, stride = self.hidden.ctypes.data, self.hidden.strides[0]
                if group.form == "tiles":
                    y, stride = self.gated_tiles.ctypes.data, 0
                activation = self.architecture.activation
                ops.append(self.product(group, layer.gate_up, y, stride, activation, private))
        return ops

    def _activate(self, groups: list[Group], layer: LayerWeights) -> list[Op]:
        """activation(gate) * up, or activation(up), in the form that ffn_down reads."""
        activation, n_ff = self.architecture.activation, layer.ffn_down[0].n_cols
        ops = []
        for group in groups:
            if group.form == "tiles" and layer.gate_up:
                continue
            source = "plain" if layer.gate_up else activation
            ungated = None if layer.gate_up or layer.gate else {"gated": "no"}
            for form in group.forms_for(layer.ffn_down):
                op = self.rows(
                    group, source, form, self.hidden, n_ff, up=self.up, private=group.private, parameters=ungated
                )
                ops.append(op)
        return ops

    def _head(self, shape: Shape, output: list[Matrix]) -> list[Op]:
        """The last norm and the logits of the wanted rows."""
        tiles = shape.wanted == TILE_TOKENS
        wanted = Group(ZERO, N_WANTED, "tiles" if tiles else self.int8_form(shape.wanted), shape.wanted)
        norm = self.weights.output_norm
        ops = [
            self.rows(wanted, "norm", form, self.x, self.architecture.n_embd, norm=norm, index=self.wanted)
            for form in wanted.forms_for(output)
        ]
        rows = replace(wanted, count=N_WANTED_TILED) if tiles else wanted
        for matrix in output:
            op = self.product(rows, matrix, 0, 0, "store")
            assert op.reads is not None
            op.reads = replace(op.reads, count=N_WANTED)
            ops.append(op)
        return ops
