"""One description of a model family, which the CPU tape, the ONNX graph and the converter all read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# name in the layer; rows and columns; the field of Architecture that asks for it ("": every family)
LAYER_TENSORS = (
    ("attn_norm.weight", "embd", ""),
    ("attn_q.weight", "q embd", ""),
    ("attn_q.bias", "q", "qkv_bias"),
    ("attn_k.weight", "kv embd", ""),
    ("attn_k.bias", "kv", "qkv_bias"),
    ("attn_v.weight", "kv embd", ""),
    ("attn_v.bias", "kv", "qkv_bias"),
    ("attn_q_norm.weight", "head", "qk_norm"),
    ("attn_k_norm.weight", "head", "qk_norm"),
    ("attn_output.weight", "embd q", ""),
    ("post_attention_norm.weight", "embd", "post_norm"),
    ("ffn_norm.weight", "embd", ""),
    ("ffn_gate.weight", "ff embd", ""),
    ("ffn_up.weight", "ff embd", ""),
    ("ffn_down.weight", "embd ff", ""),
    ("post_ffw_norm.weight", "embd", "post_norm"),
)


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
    x starts as token_embd * embedding_scale; logits = output rms_norm(x, output_norm).
    A softcapping c > 0 replaces scores or logits y by c * tanh(y / c).
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
    attn_logit_softcapping: float = 0.0
    final_logit_softcapping: float = 0.0

    def layer_tensors(self, i: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes (rows first) of what layer i needs, in the order of the computation."""
        sizes = {
            "embd": self.n_embd,
            "q": self.n_head * self.head_dim,
            "kv": self.n_head_kv * self.head_dim,
            "head": self.head_dim,
            "ff": self.n_ff,
        }
        return {
            f"blk.{i}.{name}": tuple(sizes[size] for size in shape.split())
            for name, shape, condition in LAYER_TENSORS
            if not condition or getattr(self, condition)
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes (rows first) of all that the model needs, in the order of the computation."""
        needed: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.n_vocab, self.n_embd)}
        factors = next((layer.rope.factors for layer in self.layers if layer.rope.factors is not None), None)
        if factors is not None:
            needed["rope_freqs.weight"] = factors.shape
        for i in range(self.n_layer):
            needed |= self.layer_tensors(i)
        needed["output_norm.weight"] = (self.n_embd,)
        if not self.tied_head:
            needed["output.weight"] = (self.n_vocab, self.n_embd)
        return needed
