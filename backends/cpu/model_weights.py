"""All weights of a model, packed, in the order of the computation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgert.backends.cpu.weights import Matrix, Packer, Part
from edgert.quantize.architecture import Architecture


@dataclass(frozen=True)
class LayerWeights:
    """The packed tensors of a layer; a list holds matrices that stand one below the other."""

    attn_norm: NDArray[np.float32]
    qkv: list[Matrix]
    bias: NDArray[np.float32] | None
    q_norm: NDArray[np.float32] | None
    k_norm: NDArray[np.float32] | None
    attn_output: list[Matrix]
    post_attention_norm: NDArray[np.float32] | None
    ffn_norm: NDArray[np.float32]
    gate_up: Matrix | None  # panels in turn, if both have one codec
    gate: list[Matrix]
    up: list[Matrix]
    ffn_down: list[Matrix]
    post_ffw_norm: NDArray[np.float32] | None


@dataclass(frozen=True)
class ModelWeights:
    """All packed tensors of a model."""

    token_embd: Matrix
    layers: list[LayerWeights]
    output_norm: NDArray[np.float32]
    output: list[Matrix]

    @functools.cached_property
    def n_bytes(self) -> int:
        """Bytes of the packed matrices."""
        found: dict[int, int] = {}
        for matrix in self.matrices():
            found[matrix.data.ctypes.data] = matrix.data.nbytes
        return sum(found.values())

    def find(self, name: str) -> tuple[Matrix, Part]:
        """The matrix that holds a tensor, and where in it. Raises: ValueError when none does."""
        for matrix in self.matrices():
            for part in matrix.parts:
                if part.name == name:
                    return matrix, part
        raise ValueError(f"{name!r} is no matrix of the model")

    def matrices(self) -> Iterator[Matrix]:
        """Every packed matrix."""
        yield self.token_embd
        yield from self.output
        for layer in self.layers:
            yield from (*layer.qkv, *layer.attn_output, *layer.gate, *layer.up, *layer.ffn_down)
            if layer.gate_up:
                yield layer.gate_up


def pack_model(architecture: Architecture, packer: Packer) -> ModelWeights:
    """Packs every tensor that the architecture names."""
    a = architecture
    embedding = packer.pack(["token_embd.weight"])
    layers = []
    for i in range(a.n_layer):
        name = f"blk.{i}.".__add__
        qkv = ["attn_q", "attn_k", "attn_v"]
        pair = packer.pack_pair(name("ffn_gate.weight"), name("ffn_up.weight"))
        layers.append(
            LayerWeights(
                attn_norm=packer.vector(name("attn_norm.weight")),
                qkv=packer.pack([name(part + ".weight") for part in qkv]),
                bias=np.concatenate([packer.vector(name(part + ".bias")) for part in qkv]) if a.qkv_bias else None,
                q_norm=packer.vector(name("attn_q_norm.weight")) if a.qk_norm else None,
                k_norm=packer.vector(name("attn_k_norm.weight")) if a.qk_norm else None,
                attn_output=packer.pack([name("attn_output.weight")]),
                post_attention_norm=packer.vector(name("post_attention_norm.weight")) if a.post_norm else None,
                ffn_norm=packer.vector(name("ffn_norm.weight")),
                gate_up=pair,
                gate=[] if pair else packer.pack([name("ffn_gate.weight")]),
                up=[] if pair else packer.pack([name("ffn_up.weight")]),
                ffn_down=packer.pack([name("ffn_down.weight")]),
                post_ffw_norm=packer.vector(name("post_ffw_norm.weight")) if a.post_norm else None,
            )
        )
    output = embedding if a.tied_head else packer.pack(["output.weight"])
    return ModelWeights(embedding[0], layers, packer.vector("output_norm.weight"), output)
