"""One description of a model family, which the CPU tape, the ONNX graph and the converter all read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one layer.

    style:    "norm" rotates neighbours (2i, 2i+1), "neox" rotates (i, i + n_dims/2)
    factors:  float32 (n_dims/2,) divisors of the frequencies (GGUF's rope_freqs.weight), or None
    """

    n_dims: int
    base: float
    style: Literal["norm", "neox"]
    scale: float = 1.0  # linear scaling: positions are multiplied by it
    factors: NDArray[np.float32] | None = None

    def frequencies(self) -> NDArray[np.float64]:
        """float64 (n_dims/2,): radians per position."""
        inverse = self.base ** (-np.arange(0, self.n_dims, 2, dtype=np.float64) / self.n_dims) * self.scale
        return inverse if self.factors is None else inverse / self.factors


@dataclass(frozen=True)
class Layer:
    """What may differ from layer to layer."""

    rope: Rope
    window: int = 0  # attention sees this many latest positions (itself included); 0: all


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer as GGUF stores it; names of sizes are GGUF's.

    A layer computes, with x the residual stream (n_embd):
        h = rms_norm(x, attn_norm);  q, k, v = W h (+ biases);  q, k = rms_norm per head if qk_norm
        x += post(Wo attention(rope(q) * attention_scale, rope(k), v))
        h = rms_norm(x, ffn_norm);   x += post(W_down (activation(W_gate h) * (W_up h)))
    with post = rms_norm by post_attention_norm / post_ffw_norm if post_norm, else the identity.
    """

    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx_train: int
    norm_eps: float
    attention_scale: float
    layers: tuple[Layer, ...]
    activation: Literal["silu", "gelu"] = "silu"  # gelu: the tanh form
    embedding_scale: float = 1.0
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norm: bool = False
    tied_head: bool = False  # no output.weight: token_embd.weight serves
