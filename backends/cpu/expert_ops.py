"""Lowers the feed-forward block of a mixture of experts: router, runs of rows by expert, products, weighted sum.

Rows are normed once, in float32: the router reads them so whatever the weights are, and each expert's rows are then
copied in the form that its products read, one expert's after the other's (its slots). An expert that sees every token
is a mixture of one.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu.compiler import name_of
from edgert.backends.cpu.layouts import CODECS, TILE_TOKENS
from edgert.backends.cpu.model_weights import ExpertWeights, FeedForward, Norm
from edgert.backends.cpu.step import N_NARROW_RUNS, N_NARROW_SLOTS, N_TOKENS, N_WIDE_RUNS, N_WIDE_SLOTS, ZERO, Group
from edgert.backends.cpu.tape import Op, Reads, Runs, address, float_bits
from edgert.backends.cpu.weights import Matrix
from edgert.quantize.architecture import Architecture, Experts

if TYPE_CHECKING:
    from edgert.backends.cpu.graph import Graph


@dataclass(frozen=True)
class Slots:
    """Where the runs of one group's rows are noted, and the rows themselves in the forms of `kernels/rows.py`."""

    group: Group  # its slots, all of them
    n_runs: int  # place in the header
    unit: int
    table: NDArray[np.int64]
    rows: NDArray[np.int64]
    shares: NDArray[np.float32]
    forms: dict[str, NDArray[np.uint8]]
    words: NDArray[np.uint8]
    gated: NDArray[np.uint8]
    hidden: NDArray[np.float32]
    up: NDArray[np.float32]


@dataclass(frozen=True)
class Choice:
    """Which experts the rows of a step go to: int64 and float32 (rows, n_used)."""

    ids: NDArray[np.int64]
    shares: NDArray[np.float32]
    n_expert: int


class ExpertOps:
    """Builds the ops of such blocks for one graph; owns the buffers that only they need."""

    def __init__(self, graph: Graph, n_rows: int) -> None:
        a, arena = graph.architecture, graph.arena
        self._graph: Graph = weakref.proxy(graph)  # its owner: a cycle would leave weights and cache to the collector
        experts = [layer.experts for layer in a.layers if layer.experts]
        most, used = max(one.n_expert for one in experts), max(one.n_used for one in experts)
        self.x = arena.floats(n_rows, a.n_embd)
        self.logits = arena.floats(n_rows, -(-most // 32) * 32 + 32)
        self.keys = arena.floats(graph.n_threads, most)
        self.counts = arena.integers(most)
        self.shared = Choice(arena.integers(n_rows, 1), arena.floats(n_rows, 1), 1)
        self.choice = {
            (one.n_expert, one.n_used): Choice(
                arena.integers(n_rows, one.n_used), arena.floats(n_rows, one.n_used), one.n_expert
            )
            for one in dict.fromkeys(experts)
        }
        n_pairs = n_rows * used
        tiled = -(-(n_pairs + (TILE_TOKENS - 1) * min(most, n_pairs)) // TILE_TOKENS) * TILE_TOKENS
        self.n_slots = max(n_pairs, tiled if graph.tiles else 0)
        self.n_ff = max(ff.down.n_cols for layer in graph.weights.layers if layer.experts for ff in layer.experts.all())
        self.slots = {"int8": self._slots(n_pairs, most, "int8", N_NARROW_RUNS, N_NARROW_SLOTS, 1)}
        if graph.tiles:
            self.slots["tiles"] = self._slots(tiled, most, "tiles", N_WIDE_RUNS, N_WIDE_SLOTS, TILE_TOKENS)

    def _slots(self, n: int, n_expert: int, form: str, n_runs: int, n_slots: int, unit: int) -> Slots:
        arena, a, weights = self._graph.arena, self._graph.architecture, self._graph.weights
        widest = max(a.n_embd, self.n_ff)
        blocks = [ff for layer in weights.layers if layer.experts for ff in layer.experts.all()]
        has_floats = any(CODECS[matrix.codec].is_float for ff in blocks for matrix in ff.matrices())
        apart = any(ff.gate for ff in blocks)
        tiles = form == "tiles"
        hidden = arena.floats(n if not tiles or apart else 0, self.n_ff)
        return Slots(
            Group(ZERO, n_slots, form, 0),
            n_runs,
            unit,
            arena.integers(n_expert, 3),
            arena.integers(n),
            arena.floats(n),
            {
                "int8": arena.take(0 if tiles else n * widest),
                "f32": arena.take(n * widest * 4 if has_floats and not tiles else 0),
                "tiles": arena.take(n * widest * 2 if tiles else 0),
            },
            arena.take(0 if tiles else n * widest // 2),
            arena.take(n * self.n_ff * 2 if tiles else 0),
            hidden,
            arena.floats(n, self.n_ff) if apart else hidden,
        )

    def block(
        self, groups: list[Group], weights: ExpertWeights, experts: Experts, norm: Norm | None, post: Norm | None
    ) -> list[Op]:
        """Adds to the step's rows what the experts make of them; with `post`, the block before is added first."""
        graph = self._graph
        everything = Group(ZERO, N_TOKENS, "int8", max(group.width or 8 for group in groups))
        source = ("post_norm" if norm else "post") if post else "norm" if norm else "plain"
        n_embd = graph.architecture.n_embd
        ops = [graph.rows(everything, source, "f32", graph.x, n_embd, norm=norm, post=post, out=self.x)]
        column = 0
        for matrix in weights.router:
            place = self.logits.ctypes.data + 4 * column
            rows = self.x.reshape(-1).view(np.uint8)
            ops.append(graph.product(everything, matrix, place, self.logits.strides[0], "store", False, rows=rows))
            column += matrix.n_rows
        choice = self.choice[experts.n_expert, experts.n_used]
        ops.append(self._route(weights, experts, choice))
        for group in groups:
            if weights.shared:
                ops += self._feed_forward(group, weights.shared, self.shared)
            ops += self._feed_forward(group, weights.routed, choice)
        return ops

    def _route(self, weights: ExpertWeights, experts: Experts, choice: Choice) -> Op:
        gate = sum(matrix.n_rows for matrix in weights.router) > experts.n_expert
        return Op(
            name_of("route", gating=experts.gating, norm=int(experts.norm)),
            [
                self.logits.ctypes.data,
                self.logits.strides[0],
                self._graph.at(N_TOKENS),
                address(weights.preference),
                experts.n_expert,
                experts.n_used,
                float_bits(experts.scale),
                choice.ids.ctypes.data,
                choice.shares.ctypes.data,
                self.keys.ctypes.data,
                self.shared.shares.ctypes.data if weights.shared else 0,
                4 * experts.n_expert if gate else 0,
            ],
        )

    def _feed_forward(self, group: Group, block: FeedForward, choice: Choice) -> list[Op]:
        """Sorts the group's rows by expert, and adds to each what its experts make of it."""
        graph, slots = self._graph, self.slots["tiles" if group.form == "tiles" else "int8"]
        activation = graph.architecture.activation
        gates = [block.gate_up] if block.gate_up else [block.gate, block.up]
        ops = [self._gather(group, slots, choice)]
        for form in slots.group.forms_for([matrix for matrix in gates if matrix]):
            op = graph.rows(
                slots.group, "plain", form, self.x, self.x.shape[1], index=slots.rows, out=slots.forms[form],
                words=slots.words,
            )  # fmt: skip
            ops.append(op)
        tiled = group.form == "tiles"
        if block.gate_up:
            y, stride = slots.hidden.ctypes.data, slots.hidden.strides[0]
            if tiled:
                y, stride = slots.gated.ctypes.data, 0
            ops.append(self._product(group, slots, block.gate_up, choice, y, stride, activation))
        else:
            for matrix, rows in ((block.gate, slots.hidden), (block.up, slots.up)):
                assert matrix
                place = rows.ctypes.data, rows.strides[0]
                ops.append(self._product(group, slots, matrix, choice, *place, "store"))
        if not (tiled and block.gate_up):
            for form in slots.group.forms_for([block.down]):
                op = graph.rows(
                    slots.group, "plain" if block.gate_up else activation, form, slots.hidden, block.down.n_cols,
                    up=slots.up, out=slots.forms[form], words=slots.words,
                )  # fmt: skip
                ops.append(op)
        x = graph.x
        gated = tiled and block.gate_up is not None
        return [*ops, self._product(group, slots, block.down, choice, x.ctypes.data, x.strides[0], "scatter", gated)]

    def _gather(self, group: Group, slots: Slots, choice: Choice) -> Op:
        at = self._graph.at
        return Op(
            "gather",
            [
                choice.ids.ctypes.data,
                choice.shares.ctypes.data,
                choice.ids.shape[1],
                choice.n_expert,
                at(group.first),
                at(group.count),
                slots.unit,
                slots.table.ctypes.data,
                at(slots.n_runs),
                at(slots.group.count),
                slots.rows.ctypes.data,
                slots.shares.ctypes.data,
                self.counts.ctypes.data,
            ],
        )

    def _product(
        self,
        group: Group,
        slots: Slots,
        matrix: Matrix,
        choice: Choice,
        y: int,
        stride: int,
        epilogue: str,
        gated: bool = False,
    ) -> Op:
        """The products of all runs; gated: tiles come from the gated product before."""
        graph = self._graph
        tiled = group.form == "tiles"
        form = slots.group.form_for(matrix)
        rows = slots.gated if gated else slots.forms[form]
        runs = Runs(slots.table, slots.n_runs, choice.n_expert)
        reads = Reads(matrix, form, slots.group.count, rows, slots.words, runs)
        parameters = {"codec": matrix.codec, "epilogue": epilogue} | ({} if matrix.bias is None else {"bias": "yes"})
        table = [slots.table.ctypes.data, graph.at(slots.n_runs), slots.rows.ctypes.data, slots.shares.ctypes.data]
        sizes = [matrix.n_cols, matrix.n_panels // choice.n_expert]
        bias = address(matrix.bias)
        weights, x = matrix.data.ctypes.data, rows.ctypes.data
        if tiled:
            scratch = [graph.scratch.ctypes.data, graph.scratch_stride]
            return Op(
                name_of("expert_tiles", **parameters), [weights, x, y, stride, *sizes, *table, bias, *scratch],
                reads=reads,
            )  # fmt: skip
        width = 1 if group.width == 1 else 8
        return Op(
            name_of("experts", width=width, **parameters),
            [weights, x, slots.words.ctypes.data, y, stride, *sizes, *table, bias],
            reads=reads,
        )


def needs_experts(a: Architecture) -> bool:
    """Whether some layer is a mixture."""
    return any(layer.experts for layer in a.layers)
