"""Lowers a layer's attention: head norms, rotation, the write to the cache, scores and values, joined results.

Wide rows of one sequence are attended to together and give results at once. Narrow ones give partial results, of some
chunks of what they look at each, which are joined in the form that the next product reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu.compiler import name_of
from edgert.backends.cpu.layouts import (
    CACHE_TYPES,
    CHUNK,
    PAGE,
    attention_scratch_bytes,
    partial_bytes,
    wide_attention_tokens,
)
from edgert.backends.cpu.memory import aligned
from edgert.backends.cpu.model_weights import Norm
from edgert.backends.cpu.step import N_NARROW, N_TOKENS, N_WIDE, PRIVATE_ROWS, ZERO, Group, Shape
from edgert.backends.cpu.tape import Op, address, float_bits
from edgert.quantize.architecture import Layer, Rope

if TYPE_CHECKING:
    from edgert.backends.cpu.graph import Graph


class AttentionOps:
    """Builds the ops of attention for one graph; owns the buffers that only they need.

    qkv:           float32 (rows, n_qkv), what the products with the weights leave for the ops of `layer`
    key_means:     float32 (n_layer, n_head_kv, head_dim), what keys of few bits are held less of
    scratch_bytes: of each thread
    bfloat:        whether wide rows' weights and values are rounded to bf16
    """

    def __init__(self, graph: Graph, n_rows: int, n_batch: int) -> None:
        a, arena = graph.architecture, graph.arena
        self._graph: Graph = weakref.proxy(graph)  # its owner: a cycle would leave weights and cache to the collector
        convolves = any(layer.n_taps for layer in a.layers)
        n_qkv = -(-max((a.n_head + 2 * a.n_head_kv) * a.head_dim, 3 * a.n_embd * convolves) // 32) * 32
        self.qkv = arena.floats(n_rows, n_qkv)
        n_results = max(a.n_head * a.head_dim, a.n_embd * convolves)
        self._results = arena.floats(max(n_rows, graph.n_threads * PRIVATE_ROWS), n_results)
        self._rope_tables: dict[Rope, tuple[NDArray[np.float64], NDArray[np.float32]]] = {}
        for rope in {layer.rope: None for layer in a.layers if layer.rope.n_dims}:
            frequencies = np.ascontiguousarray(rope.frequencies(), np.float64)
            self._rope_tables[rope] = frequencies, arena.floats(n_rows, rope.n_dims)
        # By position, where these grow.
        self._query_scales = {
            rope: (a.attention_scale * rope.query_scales(graph.cache.max_pages * PAGE)).astype(np.float32)
            for rope in self._rope_tables
            if rope.temperature
        }
        self.key_means = arena.floats(a.n_layer, a.n_head_kv, a.head_dim)
        # Most of it is never touched: it is for many tokens of long sequences at once.
        self.max_chunks = -(-graph.cache.max_pages * 16 // CHUNK) + 1
        self.partials = aligned(n_batch * a.n_head * self.max_chunks * partial_bytes(a.head_dim))
        group = max(layer.n_head // layer.n_head_kv for layer in a.layers if layer.n_head_kv)
        at_once = (wide_attention_tokens(graph.isa.registers, n) * n for n in range(1, group + 1))
        self.scratch_bytes = max(at_once) * partial_bytes(a.head_dim)
        suits = all(layer.head_dim % 32 == 0 for layer in a.layers)
        self._tiles = graph.tiles and suits
        # float16 keys and queries would lose 3 of 11 bits in bf16, for less gain.
        self.bfloat = self._tiles or (graph.bfloat and suits and CACHE_TYPES[graph.cache.type_k].is_bytes)
        if self.bfloat:
            self.scratch_bytes = max(self.scratch_bytes, attention_scratch_bytes(a.head_dim, group))

    def angles(self) -> list[Op]:
        """What all layers rotate by in a step."""
        graph = self._graph
        return [
            Op("angles", [address(graph.positions), graph.at(N_TOKENS), address(frequencies), len(frequencies),
                          address(out), float_bits(rope.magnitude)], meet=False)
            for rope, (frequencies, out) in self._rope_tables.items()
        ]  # fmt: skip

    def tables(self) -> list[NDArray[np.float32]]:
        """What `angles` fills, float32 (rows, n_dims) each."""
        return [table for _, table in self._rope_tables.values()]

    def layer(self, shape: Shape, groups: list[Group], i: int) -> list[Op]:
        """From q, k and v of a layer to the results in the forms that its attn_output reads."""
        if self._graph.architecture.layers[i].n_taps:
            return [self._convolve(i), *self._convert_all(groups, i)]
        return [*self._write(i), *self._attend(shape, i), *self._join(shape, groups, i)]

    def _write(self, i: int) -> list[Op]:
        """Head norms, rotation and the write to the cache."""
        graph, a = self._graph, self._graph.architecture
        layer = a.layers[i]
        norms = [graph.weights.layers[i].norms.get(f"attn_{part}_norm") for part in "qk"]
        ops = []
        dim = layer.head_dim
        q_norm = layer.tensors.get("attn_q_norm.weight", (dim,))
        if q_norm[-1] > dim:
            ops.append(self._row_norm(layer, *norms))
            norms = [None, None]
        kind: dict[str, str] = {"norm": a.norm} if norms[0] and a.norm != "rms" else {}
        if a.rope_first and layer.rope.n_dims:
            kind["first"] = "rope"
        if a.value_norm:
            kind["values"] = "norm"
        heads = self._heads(layer)
        if layer.kv_layer is not None:
            heads["n_head_kv"] = 0
        ops.append(
            Op(
                name_of("rope", **heads, n_rot=layer.rope.n_dims, style=layer.rope.style, **kind),
                [
                    *self._rows_of_qkv(),
                    graph.at(N_TOKENS),
                    address(graph.positions),
                    address(graph.slots),
                    *graph.cache.addresses(i),
                    address(self._rope_tables[layer.rope][1] if layer.rope.n_dims else None),
                    *(address(norm.weight if norm else None) for norm in norms),
                    4 * dim if len(q_norm) > 1 else 0,
                    float_bits(a.norm_eps),
                    float_bits(a.attention_scale),
                    address(self.key_means[i]),
                    address(self._query_scales.get(layer.rope)),
                ],
            )
        )
        return ops

    def _row_norm(self, layer: Layer, q: Norm | None, k: Norm | None) -> Op:
        """The norms of all of q and all of k."""
        assert q and k
        a = self._graph.architecture
        places = [address(part) for norm in (q, k) for part in (norm.weight, norm.bias)]
        return Op(
            name_of("row_norm", norm=a.norm),
            [*self._rows_of_qkv(), self._graph.at(N_TOKENS), layer.n_head * layer.head_dim,
             layer.n_head_kv * layer.head_dim, *places, float_bits(a.norm_eps)],
        )  # fmt: skip

    def _attend(self, shape: Shape, i: int) -> list[Op]:
        """The results of wide rows, and the partial ones of narrow rows; all of an encoder's are taken as narrow."""
        graph, a = self._graph, self._graph.architecture
        layer, sinks = a.layers[i], graph.weights.layers[i].sinks
        heads, softcap = self._heads(layer), a.attn_logit_softcapping
        if softcap:
            heads["capped"] = "yes"
        source = i if layer.kv_layer is None else layer.kv_layer
        looks = [address(graph.reach), address(graph.slots), *graph.cache.addresses(source), layer.window]
        ops = []
        if shape.wide and not a.encoder:
            kernel = "attention_tiles" if self.bfloat else "attention_wide"
            out = address(graph.forms["tiles"] if self._tiles else self._results)
            ops.append(
                Op(
                    name_of(kernel, **heads, **_with(sinks)),
                    [*self._rows_of_qkv(), graph.at(N_WIDE), *looks, out, address(graph.scratch), graph.scratch_stride,
                     float_bits(softcap), address(sinks)],
                    meet=False,
                )
            )  # fmt: skip
        first, count = (ZERO, N_TOKENS) if a.encoder else (N_WIDE, N_NARROW)
        ops.append(
            Op(
                name_of("attention", **heads),
                [*self._rows_of_qkv(), graph.at(first), graph.at(count), *looks, address(self.partials),
                 self.max_chunks, float_bits(softcap)],
            )
        )  # fmt: skip
        return ops

    def _join(self, shape: Shape, groups: list[Group], i: int) -> list[Op]:
        """All results in the forms that attn_output reads."""
        graph, matrices = self._graph, self._graph.weights.layers[i].attn_output
        narrow = Group(N_WIDE, N_NARROW, graph.int8_form(shape.narrow), 0)
        form = narrow.form_for(matrices[0])
        if graph.architecture.encoder:
            return [self._merge(i, Group(ZERO, N_TOKENS, "int8", 0), "none"), *self._convert_all(groups, i)]
        if shape.private:
            return [self._merge(i, narrow, form, private=True)]
        if not graph.tiles:  # joined into float32 rows below the wide ones first; then all rows are converted together
            return [self._merge(i, narrow, "none"), self._convert(i, groups[0], form)]
        ops = []
        if shape.wide and not self._tiles:
            ops.append(self._convert(i, groups[0], "tiles"))
        if shape.narrow:
            ops.append(self._merge(i, narrow, form))
        return ops

    def _merge(self, i: int, group: Group, form: str, private: bool = False) -> Op:
        """Partial results joined."""
        graph, sinks = self._graph, self._graph.weights.layers[i].sinks
        layer = graph.architecture.layers[i]
        dim = layer.head_dim
        parameters = {"n_head": layer.n_head, "head_dim": dim, "type_v": graph.cache.type_v, **_with(sinks)}
        rows = self._rows_of_results(layer)
        return graph.rows(
            group, "merge", form, rows, rows.shape[1], private=private, window=layer.window, sinks=sinks,
            parameters=parameters,
        )  # fmt: skip

    def _convolve(self, i: int) -> Op:
        """What a layer has in place of attention: inputs to the cache, results from it."""
        graph, layer = self._graph, self._graph.architecture.layers[i]
        table, row, inputs, _, stride = graph.cache.addresses(i)
        return Op(
            name_of("shortconv", n_taps=layer.n_taps),
            [
                *self._rows_of_qkv(),
                graph.at(N_TOKENS),
                address(graph.positions),
                address(graph.slots),
                *(table, row, inputs, stride),
                address(graph.weights.layers[i].taps),
                address(self._results),
                graph.architecture.n_embd,
            ],
        )

    def _convert_all(self, groups: list[Group], i: int) -> list[Op]:
        """Float32 results in the forms that attn_output reads."""
        matrices = self._graph.weights.layers[i].attn_output
        return [self._convert(i, group, form) for group in groups for form in group.forms_for(matrices)]

    def _convert(self, i: int, group: Group, form: str) -> Op:
        """Float32 results in another form."""
        rows = self._rows_of_results(self._graph.architecture.layers[i])
        return self._graph.rows(group, "plain", form, rows, rows.shape[1], private=group.private)

    def _rows_of_results(self, layer: Layer) -> NDArray[np.float32]:
        """Float32 (rows, n_head * head_dim) of this layer."""
        a = self._graph.architecture
        n_cols = a.n_embd if layer.n_taps else layer.n_head * layer.head_dim
        return self._results.reshape(-1)[: len(self._results) * n_cols].reshape(-1, n_cols)

    def _rows_of_qkv(self) -> Sequence[int]:
        return address(self.qkv), self.qkv.strides[0]

    def _heads(self, layer: Layer) -> dict[str, object]:
        """The parameters of kernels that read heads or the cache."""
        cache = self._graph.cache
        return {"n_head": layer.n_head, "n_head_kv": layer.n_head_kv, "head_dim": layer.head_dim,
                "type_k": cache.type_k, "type_v": cache.type_v}  # fmt: skip


def _with(sinks: NDArray[np.float32] | None) -> dict[str, str]:
    return {} if sinks is None else {"sinks": "yes"}
