"""Lowers the vectors that layers get of a token: all are made first, then each layer adds what it makes of its own."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

from edgert.backends.cpu.compiler import name_of
from edgert.backends.cpu.model_weights import Norm, PerLayerWeights
from edgert.backends.cpu.step import N_TOKENS, ZERO, Group
from edgert.backends.cpu.tape import Op, float_bits

if TYPE_CHECKING:
    from edgert.backends.cpu.graph import Graph


class PerLayerOps:
    """Builds their ops for one graph.

    vectors:  float32 (rows, n_layer * n_embd_per_layer)
    """

    def __init__(self, graph: Graph, weights: PerLayerWeights, n_rows: int) -> None:
        a = graph.architecture
        self._graph: Graph = weakref.proxy(graph)  # its owner
        self._weights, self._size = weights, a.n_embd_per_layer
        self.vectors = graph.arena.floats(n_rows, a.n_layer * self._size)
        self._gates = graph.arena.floats(n_rows, self._size)

    def begin(self, groups: list[Group]) -> list[Op]:
        """The vectors of all layers, while x is what the table of tokens holds."""
        graph, weights = self._graph, self._weights
        a = graph.architecture
        ops = graph.norm(groups, None, weights.projection, None)
        ops += graph.products(groups, weights.projection, self.vectors, "store")
        everything = Group(ZERO, N_TOKENS, "int8", 0)
        for start in range(0, self.vectors.shape[1], self._size):
            part = self.vectors[:, start:]
            # The product is to be divided by the root of n_embd, which is left to the norm's eps.
            eps = a.norm_eps * a.n_embd
            ops.append(graph.rows(everything, "renorm", "none", part, self._size, norm=weights.norm, eps=eps))
            ops[-1].meet = False
        ops[-1].meet = True
        table = weights.table
        ops.append(
            Op(
                name_of("embed", codec=table.codec, adds="yes"),
                [
                    graph.tokens.ctypes.data,
                    graph.at(N_TOKENS),
                    table.data.ctypes.data,
                    table.n_cols,
                    self.vectors.ctypes.data,
                    float_bits(math.sqrt(self._size / 2)),
                ],
            )
        )
        return ops

    def layer(self, groups: list[Group], i: int, post: Norm | None) -> list[Op]:
        """What ends layer i: the product that its own norm adds to x.

        post:  the norm of what stands in graph.post
        """
        graph = self._graph
        weights = graph.weights.layers[i]
        ops = graph.norm(groups, None, weights.inp_gate, post)
        ops += graph.products(groups, weights.inp_gate, self._gates, "store", private=post is None)
        vector = self.vectors[:, i * self._size :]
        for group in groups:
            for form in group.forms_for(weights.proj):
                activation = graph.architecture.activation
                ops.append(
                    graph.rows(group, activation, form, self._gates, self._size, up=vector, private=group.private)
                )
        return ops + graph.products(groups, weights.proj, graph.post, "store")
