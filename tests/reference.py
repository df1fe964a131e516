"""The plain float32 forward pass that every backend is checked against; Architecture's docstring as NumPy.

Weights are dequantized by gguf-py, so that edgert's own formats are checked as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edgert.quantize.architecture import Architecture, Layer, describe
from edgert.quantize.gguf_file import GGUFFile

Floats = NDArray[Any]
HEAD_ROWS = 16384  # of the output matrix at a time: a large vocabulary in float32 is a gigabyte


class Reference:
    """A model that computes logits with NumPy alone.

    dtype:  float32 as the backends, or float64 to see how far float32 itself is off
    cache:  keep the dequantized layers, for small models that run often
    """

    def __init__(self, path: str | Path, dtype: type = np.float32, cache: bool = True) -> None:
        with GGUFFile.open(path) as file:
            self.architecture = describe(file)
        self.tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        self.dtype = dtype
        self.cache: dict[str, Floats] | None = {} if cache else None

    def weight(self, name: str, rows: slice | Floats = slice(None)) -> Floats:
        """The tensor's values, or those of some rows."""
        if self.cache is not None and name in self.cache:
            return self.cache[name][rows]
        tensor = self.tensors[name]
        whole = isinstance(rows, slice) and rows == slice(None)
        values = gguf.quants.dequantize(tensor.data[rows], tensor.tensor_type).astype(self.dtype)
        if self.cache is not None and whole:
            self.cache[name] = values
        return values

    def logits(self, tokens: Sequence[int], last: bool = False) -> Floats:
        """Token ids (n,) -> logits (n, n_vocab) after each token, or (1, n_vocab) after the last one."""
        a = self.architecture
        x = self.weight("token_embd.weight", np.asarray(tokens)) * self.dtype(a.embedding_scale)  # (n, n_embd)
        for i, layer in enumerate(a.layers):
            x = self.layer(i, layer, x)
        if last:
            x = x[-1:]
        x = rms_norm(x, self.weight("output_norm.weight"), a.norm_eps)
        head = "token_embd.weight" if a.tied_head else "output.weight"
        logits = np.empty((len(x), a.n_vocab), self.dtype)
        for start in range(0, a.n_vocab, HEAD_ROWS):
            rows = slice(start, start + HEAD_ROWS)
            logits[:, rows] = x @ self.weight(head, rows).T
        return softcap(logits, a.final_logit_softcapping)

    def layer(self, i: int, layer: Layer, x: Floats) -> Floats:
        """Residual stream (n, n_embd) -> (n, n_embd)."""
        a = self.architecture

        def w(name: str) -> Floats:
            return self.weight(f"blk.{i}.{name}")

        def project(h: Floats, part: str) -> Floats:
            y = h @ w(f"attn_{part}.weight").T
            if a.qkv_bias:
                y = y + w(f"attn_{part}.bias")
            return y.reshape(len(h), -1, a.head_dim)  # (n, heads, head_dim)

        h = rms_norm(x, w("attn_norm.weight"), a.norm_eps)
        q, k, v = (project(h, part) for part in "qkv")
        if a.qk_norm:
            q = rms_norm(q, w("attn_q_norm.weight"), a.norm_eps)
            k = rms_norm(k, w("attn_k_norm.weight"), a.norm_eps)
        h = attention(rotate(q, layer), rotate(k, layer), v, layer.window, a) @ w("attn_output.weight").T
        if a.post_norm:
            h = rms_norm(h, w("post_attention_norm.weight"), a.norm_eps)
        x = x + h

        h = rms_norm(x, w("ffn_norm.weight"), a.norm_eps)
        gate, up = h @ w("ffn_gate.weight").T, h @ w("ffn_up.weight").T  # (n, n_ff)
        h = (ACTIVATIONS[a.activation](gate) * up) @ w("ffn_down.weight").T
        if a.post_norm:
            h = rms_norm(h, w("post_ffw_norm.weight"), a.norm_eps)
        return x + h


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """(..., n) -> (..., n)."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps)) * weight


def rotate(x: Floats, layer: Layer) -> Floats:
    """Rotary embedding of (n, heads, head_dim); row p stands at position p."""
    rope, half = layer.rope, layer.rope.n_dims // 2
    angles = np.arange(len(x))[:, None, None] * rope.frequencies()  # float64 (n, 1, half)
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    if rope.style == "norm":
        first, second = slice(0, rope.n_dims, 2), slice(1, rope.n_dims, 2)
    else:
        first, second = slice(0, half), slice(half, rope.n_dims)
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


def attention(q: Floats, k: Floats, v: Floats, window: int, a: Architecture) -> Floats:
    """q (n, n_head, head_dim), k and v (n, n_head_kv, head_dim) -> (n, n_head * head_dim)."""
    n = len(q)
    distance = np.arange(n)[:, None] - np.arange(n)  # how far the key lies behind the query
    hidden = (distance < 0) | (distance >= (window or n))
    out = np.empty_like(q)
    for head in range(a.n_head):
        group = head * a.n_head_kv // a.n_head
        scores = softcap(q[:, head] @ k[:, group].T * q.dtype.type(a.attention_scale), a.attn_logit_softcapping)
        scores[hidden] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, group]
    return out.reshape(n, -1)


def silu(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def gelu(x: Floats) -> Floats:
    """The tanh form."""
    return x / 2 * (1 + np.tanh(x.dtype.type(np.sqrt(2 / np.pi)) * (x + x.dtype.type(0.044715) * x**3)))


ACTIVATIONS = {"silu": silu, "gelu": gelu}


def softcap(x: Floats, cap: float) -> Floats:
    return x.dtype.type(cap) * np.tanh(x / x.dtype.type(cap)) if cap else x


def log_softmax(logits: Floats) -> Floats:
    """float64 (n, n_vocab)."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl_divergence(reference: Floats, other: Floats) -> Floats:
    """Logits (n, n_vocab) twice -> float64 (n,): nats lost by using `other`."""
    p, q = log_softmax(reference), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(-1)
