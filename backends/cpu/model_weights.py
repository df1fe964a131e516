"""All weights of a model, packed, in the order of the computation."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu.weights import Matrix, Packer, Part, Rows
from edgert.quantize.architecture import Architecture, Experts, Layer


@dataclass(frozen=True)
class Norm:
    """A norm's weight, and of a layer norm its bias.

    scale:  of one behind a block, what the sum of x and what it norms is multiplied by
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class FeedForward:
    """The matrices of one expert, or of several, one below the other; gate and up apart where gate_up is None."""

    gate_up: Matrix | None
    gate: Matrix | None
    up: Matrix | None
    down: Matrix

    def matrices(self) -> Iterator[Matrix]:
        yield from (matrix for matrix in (self.gate_up, self.gate, self.up, self.down) if matrix)


@dataclass(frozen=True)
class ExpertWeights:
    """A mixture of experts.

    router:      float32, one row for each expert; then the row of the shared expert's share, if that is not 1
    preference:  float32 (n_expert) added to the scores by which experts are chosen, or None
    shared:      the expert that sees every token
    """

    router: list[Matrix]
    preference: NDArray[np.float32] | None
    routed: FeedForward
    shared: FeedForward | None

    def all(self) -> list[FeedForward]:
        return [self.routed, self.shared] if self.shared else [self.routed]


@dataclass(frozen=True)
class LayerWeights:
    """The packed tensors of a layer; a list holds matrices that stand one below the other.

    norms:    by name, those that the layer has
    qkv:      or what a convolution reads its inputs from, as attn_output stands for what its results pass
    taps:     float32 (n_taps, n_embd) of a convolution
    gate_up:  panels of both in turn, if they have one codec
    gate:     empty where gate_up is there, or the layer has no gate
    experts:  in place of gate, up and ffn_down
    inp_gate, proj:  of the token's vector for this layer
    """

    norms: Mapping[str, Norm]
    qkv: list[Matrix]
    attn_output: list[Matrix]
    gate_up: Matrix | None = None
    gate: Sequence[Matrix] = ()
    up: Sequence[Matrix] = ()
    ffn_down: Sequence[Matrix] = ()
    sinks: NDArray[np.float32] | None = None
    taps: NDArray[np.float32] | None = None
    experts: ExpertWeights | None = None
    inp_gate: Sequence[Matrix] = ()
    proj: Sequence[Matrix] = ()


@dataclass(frozen=True)
class PerLayerWeights:
    """What makes the vectors that each layer gets of a token.

    norm:  of the part that `projection` makes, divided by the root of 2
    """

    table: Matrix
    projection: list[Matrix]
    norm: Norm


@dataclass(frozen=True)
class ModelWeights:
    """All packed tensors of a model."""

    token_embd: Matrix
    layers: list[LayerWeights]
    output_norm: Norm
    output: list[Matrix]
    position_embd: Matrix | None = None
    token_types: Matrix | None = None
    per_layer: PerLayerWeights | None = None

    @functools.cached_property
    def n_bytes(self) -> int:
        """Bytes of the packed matrices."""
        found: dict[int, int] = {}
        for matrix in self.matrices():
            found[matrix.data.ctypes.data] = matrix.data.nbytes
        return sum(found.values())

    def find(self, name: str) -> list[tuple[Matrix, Part]]:
        """Which matrices hold a tensor's rows, and where. Raises: ValueError when none does."""
        found = {
            (id(matrix), part): (matrix, part)
            for matrix in self.matrices()
            for part in matrix.parts
            if part.rows.name == name
        }
        if not found:
            raise ValueError(f"{name!r} is no matrix of the model")
        return list(found.values())

    def matrices(self) -> Iterator[Matrix]:
        """Every packed matrix, but for routers."""
        yield self.token_embd
        yield from self.output
        if self.position_embd:
            yield self.position_embd
        if self.token_types:
            yield self.token_types
        if self.per_layer:
            yield from (self.per_layer.table, *self.per_layer.projection)
        for layer in self.layers:
            yield from (*layer.qkv, *layer.attn_output, *layer.gate, *layer.up, *layer.ffn_down)
            yield from (*layer.inp_gate, *layer.proj)
            if layer.gate_up:
                yield layer.gate_up
            for block in layer.experts.all() if layer.experts else ():
                yield from block.matrices()


def pack_model(architecture: Architecture, packer: Packer) -> ModelWeights:
    """Packs every tensor that the architecture names."""
    a = architecture
    embedding = packer.pack(["token_embd.weight"])
    layers = [_pack_layer(a, layer, f"blk.{i}.", packer) for i, layer in enumerate(a.layers)]
    output = embedding if a.tied_head else packer.pack(["output.weight"])
    positions = packer.pack(["position_embd.weight"])[0] if "position_embd.weight" in a.outer else None
    types = packer.pack(["token_types.weight"])[0] if "token_types.weight" in a.outer else None
    per_layer = _pack_per_layer(packer) if a.n_embd_per_layer else None
    packer.finish()
    if a.encoder:
        norm, layers = _norms_before(_norm(a, packer, "token_embd_norm", a.outer), layers)
    else:
        norm = _norm(a, packer, a.output_norm, a.outer)
    for vector in (norm.weight, norm.bias):
        if vector is not None:
            vector *= np.float32(a.logit_scale)
    return ModelWeights(embedding[0], layers, norm, output, positions, types, per_layer)


def _pack_per_layer(packer: Packer) -> PerLayerWeights:
    weight = packer.vector("per_layer_proj_norm.weight") / np.float32(math.sqrt(2))
    table, projection = (packer.pack([f"per_layer_{name}.weight"]) for name in ("token_embd", "model_proj"))
    return PerLayerWeights(table[0], projection, Norm(weight))


def _norms_before(first: Norm, layers: list[LayerWeights]) -> tuple[Norm, list[LayerWeights]]:
    """An encoder's norms, which stand behind each block, under the names of those before; the last is the output's."""
    moved, before = [], first
    for layer in layers:
        norms = {"attn_norm": before, "ffn_norm": layer.norms["attn_output_norm"]}
        moved.append(replace(layer, norms={**layer.norms, **norms}))
        before = layer.norms["layer_output_norm"]
    return before, moved


def _pack_layer(a: Architecture, layer: Layer, prefix: str, packer: Packer) -> LayerWeights:
    norms = {
        name.removesuffix(".weight"): _norm(a, packer, prefix + name.removesuffix(".weight"), a.tensors())
        for name in layer.tensors
        if name.endswith(("norm.weight", "norm_2.weight"))
    }
    if layer.has("layer_output_scale"):
        last = "post_norm" if layer.has("post_norm") else "post_ffw_norm"
        norms[last] = replace(norms[last], scale=float(packer.vector(f"{prefix}layer_output_scale.weight")[0]))
    parts, output, taps = [name for name in ("attn_q", "attn_k", "attn_v") if layer.has(name)], "attn_output", None
    if parts[1:] == ["attn_k"]:  # which serves for v, too
        parts.append("attn_k")
    if layer.has("attn_qkv"):
        parts = ["attn_qkv"]
    elif layer.n_taps:
        parts, output = ["shortconv.in_proj"], "shortconv.out_proj"
        taps = packer.vector(f"{prefix}shortconv.conv.weight")
        taps[:] = taps.reshape(a.n_embd, -1).T.reshape(-1)
    attention = LayerWeights(
        norms,
        qkv=packer.pack([f"{prefix}{part}.weight" for part in parts]),
        attn_output=packer.pack([f"{prefix}{output}.weight"]),
        sinks=packer.vector(f"{prefix}attn_sinks.weight") if layer.has("attn_sinks") else None,
        taps=taps,
        inp_gate=packer.pack([f"{prefix}inp_gate.weight"]) if layer.has("inp_gate") else (),
        proj=packer.pack([f"{prefix}proj.weight"]) if layer.has("proj") else (),
    )
    if layer.experts:
        return replace(attention, experts=_pack_experts(layer, layer.experts, prefix, packer))
    gate, up = None, Rows(f"{prefix}ffn_up.weight", 0, layer.n_ff)
    if layer.has("ffn_gate"):
        gate = Rows(f"{prefix}ffn_gate.weight", 0, layer.n_ff)
    elif layer.gate_is_fused:
        gate, up = up, Rows(f"{prefix}ffn_up.weight", layer.n_ff, layer.n_ff)
    pair = packer.pack_pair(gate, up) if gate else None
    return replace(
        attention,
        gate_up=pair,
        gate=packer.pack([gate]) if gate and not pair else [],
        up=[] if pair else packer.pack([up]),
        ffn_down=packer.pack([f"{prefix}ffn_down.weight"]),
    )


def _pack_experts(layer: Layer, experts: Experts, prefix: str, packer: Packer) -> ExpertWeights:
    n, n_ff = experts.n_expert, experts.n_ff
    router = [f"{prefix}{name}.weight" for name in ("ffn_gate_inp", "ffn_gate_inp_shexp") if layer.has(name)]
    if layer.has("ffn_gate_up_exps"):
        fused = f"{prefix}ffn_gate_up_exps.weight"
        pairs = [Rows(fused, part * n_ff, n_ff) for part in range(2 * n)]
    else:
        pairs = [Rows(f"{prefix}ffn_{part}_exps.weight", 0, n * n_ff) for part in ("gate", "up")]
    preference = packer.vector(f"{prefix}exp_probs_b.bias") if "exp_probs_b.bias" in layer.tensors else None
    shared = None
    if layer.has("ffn_up_shexp"):
        one = [Rows(f"{prefix}ffn_{part}_shexp.weight", 0, layer.n_ff) for part in ("gate", "up")]
        shared = _pack_feed_forward(one, f"{prefix}ffn_down_shexp.weight", packer)
    routed = _pack_feed_forward(pairs, f"{prefix}ffn_down_exps.weight", packer)
    return ExpertWeights(packer.router(router), preference, routed, shared)


def _pack_feed_forward(pairs: list[Rows], down: str, packer: Packer) -> FeedForward:
    """pairs: of gate and up, of one codec where they are more than one pair."""
    pair = packer.pack_pairs(pairs)
    gate, up = (None, None) if pair else (packer.pack([rows])[0] for rows in pairs)
    return FeedForward(pair, gate, up, packer.pack([down])[0])


def _norm(a: Architecture, packer: Packer, name: str, tensors: Container[str]) -> Norm:
    """A norm by its name; a layer norm without a bias has one of zeros."""
    weight = packer.vector(f"{name}.weight")
    if a.norm == "rms":
        return Norm(weight)
    bias = packer.vector(f"{name}.bias") if f"{name}.bias" in tensors else np.zeros_like(weight)
    return Norm(weight, bias)
