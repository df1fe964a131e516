"""The plain float32 forward pass that every backend is checked against; Architecture's docstring as NumPy.

Weights are dequantized by gguf-py or libggml, so that edgert's own formats are checked as well.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Backend, Batch
from edgert.quantize.architecture import Architecture, Experts, Layer, describe
from edgert.quantize.gguf_file import GGUFFile

Floats = NDArray[Any]
FLOATS = {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16}
HEAD_ROWS = 16384  # of the output matrix at a time: a large vocabulary in float32 is a gigabyte


class Reference:
    """A model that computes logits with NumPy alone.

    dtype:  float32 as the backends, or float64 to see how far float32 itself is off
    cache:  keep the dequantized layers, for small models that run often
    n_ctx:  of the context, which decides on the rotation of some models; 0: as in training
    """

    def __init__(self, path: str | Path, dtype: type = np.float32, cache: bool = True, n_ctx: int = 0) -> None:
        with GGUFFile.open(path) as file:
            a = describe(file)
        self.architecture = a.for_context(n_ctx or a.n_ctx_train)
        self.tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        self.dtype = dtype
        self.cache: dict[str, Floats] | None = {} if cache else None

    def weight(self, name: str, rows: slice | Floats = slice(None)) -> Floats:
        """The tensor's values, or those of some rows."""
        if self.cache is not None and name in self.cache:
            return self.cache[name][rows]
        tensor = self.tensors[name]
        whole = isinstance(rows, slice) and rows == slice(None)
        values = dequantize(tensor.data[rows], tensor.tensor_type).astype(self.dtype)
        if self.cache is not None and whole:
            self.cache[name] = values
        return values

    def states(self, tokens: Sequence[int], last: bool = False) -> Floats:
        """Token ids (n,) -> what the head reads after each, (n, n_embd), or after the last one."""
        a = self.architecture
        x = self.weight("token_embd.weight", np.asarray(tokens)) * self.dtype(a.embedding_scale)  # (n, n_embd)
        vectors = self.vectors(tokens, x) if a.n_embd_per_layer else None
        kept: dict[int, tuple[Floats, Floats]] = {}
        if "position_embd.weight" in a.outer:
            x = x + self.weight("position_embd.weight", np.arange(len(x)))
        for i, layer in enumerate(a.layers):
            x = self.layer(i, layer, x, kept)
            if vectors is not None:
                h = ACTIVATIONS[a.activation](self.product(x, f"blk.{i}.inp_gate")) * vectors[:, i]
                x = x + self.norm(self.product(h, f"blk.{i}.proj"), f"blk.{i}.post_norm")
            if layer.has("layer_output_scale"):
                x = x * self.weight(f"blk.{i}.layer_output_scale.weight")
        if last:
            x = x[-1:]
        return self.norm(x, a.output_norm) * self.dtype(a.logit_scale)

    def logits(self, tokens: Sequence[int], last: bool = False) -> Floats:
        """Token ids (n,) -> logits (n, n_vocab) after each token, or (1, n_vocab) after the last one."""
        a, x = self.architecture, self.states(tokens, last)
        head = "token_embd.weight" if a.tied_head else "output.weight"
        logits = np.empty((len(x), a.n_vocab), self.dtype)
        for start in range(0, a.n_vocab, HEAD_ROWS):
            rows = slice(start, start + HEAD_ROWS)
            logits[:, rows] = x @ self.weight(head, rows).T
        if "output.bias" in a.outer:
            logits += self.weight("output.bias")
        return softcap(logits, a.final_logit_softcapping)

    def vectors(self, tokens: Sequence[int], x: Floats) -> Floats:
        """What each layer gets of each token, (n, n_layer, n_embd_per_layer)."""
        a = self.architecture
        shape = len(x), a.n_layer, a.n_embd_per_layer
        made = self.product(x, "per_layer_model_proj") / self.dtype(math.sqrt(a.n_embd))
        looked_up = self.weight("per_layer_token_embd.weight", np.asarray(tokens)).reshape(shape)
        made = self.norm(made.reshape(shape), "per_layer_proj_norm")
        return (made + looked_up * self.dtype(math.sqrt(a.n_embd_per_layer))) / self.dtype(math.sqrt(2))

    def layer(self, i: int, layer: Layer, x: Floats, kept: dict[int, tuple[Floats, Floats]]) -> Floats:
        """Residual stream (n, n_embd) -> (n, n_embd).

        kept:  keys and values of the layers before, by their number
        """
        a, n, dim = self.architecture, len(x), layer.head_dim

        def product(h: Floats, part: str) -> Floats:
            return self.product(h, f"blk.{i}.{part}")

        def norm(h: Floats, name: str) -> Floats:
            return self.norm(h, f"blk.{i}.{name}") if layer.has(name) else h

        h = norm(x, layer.attention_norm)
        if layer.n_taps:
            x = x + product(self.convolved(i, product(h, "shortconv.in_proj")), "shortconv.out_proj")
            return x + self.feed_forward(i, layer, norm(x, layer.feed_forward_norm))
        if layer.has("attn_qkv"):
            q, k, v = np.split(product(h, "attn_qkv"), np.cumsum([layer.n_head, layer.n_head_kv]) * dim, axis=-1)
        elif layer.kv_layer is not None:
            q = k = v = product(h, "attn_q")
        else:
            q, k = product(h, "attn_q"), product(h, "attn_k")
            v = product(h, "attn_v") if layer.has("attn_v") else k
        if layer.tensors.get("attn_q_norm.weight", (dim,))[-1] > dim:
            q, k = norm(q, "attn_q_norm"), norm(k, "attn_k_norm")
        q, k, v = (part.reshape(n, -1, dim) for part in (q, k, v))  # (n, heads, head_dim)
        if a.rope_first:
            q, k = rotate(q, layer), rotate(k, layer)
        if layer.tensors.get("attn_q_norm.weight", (0,))[-1] == dim:
            q, k = norm(q, "attn_q_norm"), norm(k, "attn_k_norm")
        if not a.rope_first:
            q, k = rotate(q, layer), rotate(k, layer)
        if a.value_norm:
            v = rms_norm(v, v.dtype.type(1), a.norm_eps)
        if layer.kv_layer is not None:
            k, v = kept[layer.kv_layer]
        kept[i] = k, v
        q = q * layer.rope.query_scales(n)[:, None, None].astype(q.dtype)
        sinks = self.weight(f"blk.{i}.attn_sinks.weight") if layer.has("attn_sinks") else None
        h = attention(q, k, v, layer.window, a, sinks)
        attended = norm(product(h, "attn_output"), layer.attention_post_norm)
        before = x
        x = x + attended
        h = norm(before if layer.parallel else x, layer.feed_forward_norm)
        return x + norm(self.feed_forward(i, layer, h), "post_ffw_norm")

    def convolved(self, i: int, h: Floats) -> Floats:
        """(n, 3 n_embd) -> (n, n_embd)."""
        b, c, h = np.split(h, 3, axis=1)
        taps = self.weight(f"blk.{i}.shortconv.conv.weight")
        before = np.concatenate([np.zeros((taps.shape[1] - 1, h.shape[1]), h.dtype), b * h])
        return c * sum(before[tap : tap + len(h)] * taps[:, tap] for tap in range(taps.shape[1]))

    def feed_forward(self, i: int, layer: Layer, h: Floats) -> Floats:
        """(n, n_embd) -> (n, n_embd)."""
        if layer.experts:
            return self.mixture(i, layer, layer.experts, h)
        up = self.product(h, f"blk.{i}.ffn_up")
        activation = ACTIVATIONS[self.architecture.activation]
        if layer.has("ffn_gate"):
            h = activation(self.product(h, f"blk.{i}.ffn_gate")) * up
        elif layer.gate_is_fused:
            h = activation(up[:, : layer.n_ff]) * up[:, layer.n_ff :]
        else:
            h = activation(up)
        return self.product(h, f"blk.{i}.ffn_down")

    def mixture(self, i: int, layer: Layer, e: Experts, h: Floats) -> Floats:
        """What the experts of layer i make of the normed rows (n, n_embd)."""
        scores = self.product(h, f"blk.{i}.ffn_gate_inp")
        if e.gating == "softmax":
            scores = np.exp(log_softmax(scores)).astype(h.dtype)
        elif e.gating == "sigmoid":
            scores = 1 / (1 + np.exp(-scores))
        liked = scores + self.weight(f"blk.{i}.exp_probs_b.bias") if "exp_probs_b.bias" in layer.tensors else scores
        chosen = np.argsort(-liked, axis=1, kind="stable")[:, : e.n_used]
        shares = np.take_along_axis(scores, chosen, 1)
        if e.gating == "chosen":
            shares = np.exp(log_softmax(shares)).astype(h.dtype)
        if e.norm:
            shares = shares / shares.sum(1, keepdims=True)
        shares = shares * h.dtype.type(e.scale)
        out = np.zeros_like(h)
        for expert in range(e.n_expert):
            rows, places = np.nonzero(chosen == expert)

            def product(x: Floats, part: str, expert: int = expert) -> Floats:
                name = f"blk.{i}.ffn_{part}_exps"
                y = x @ self.weight(f"{name}.weight")[expert].T
                return y + self.weight(f"{name}.bias")[expert] if f"{name}.bias" in self.tensors else y

            if layer.has("ffn_gate_up_exps"):
                gate, up = np.split(product(h[rows], "gate_up"), 2, axis=1)
            else:
                gate, up = product(h[rows], "gate"), product(h[rows], "up")
            out[rows] += shares[rows, places, None] * product(self.gated(gate, up), "down")
        if layer.has("ffn_up_shexp"):
            hidden = self.gated(*(self.product(h, f"blk.{i}.ffn_{part}_shexp") for part in ("gate", "up")))
            shared = self.product(hidden, f"blk.{i}.ffn_down_shexp")
            if layer.has("ffn_gate_inp_shexp"):
                shared *= 1 / (1 + np.exp(-self.product(h, f"blk.{i}.ffn_gate_inp_shexp").reshape(-1, 1)))
            out += shared
        return out

    def gated(self, gate: Floats, up: Floats) -> Floats:
        if self.architecture.activation != "swiglu_oai":
            return ACTIVATIONS[self.architecture.activation](gate) * up
        gate = np.minimum(gate, 7)
        return gate / (1 + np.exp(-gate.dtype.type(1.702) * gate)) * (np.clip(up, -7, 7) + 1)

    def product(self, h: Floats, name: str) -> Floats:
        """(n, columns) -> (n, rows), with the bias where there is one."""
        y = h @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if f"{name}.bias" in self.tensors else y

    def norm(self, x: Floats, name: str) -> Floats:
        """(..., n) -> (..., n)."""
        weight, eps = self.weight(f"{name}.weight"), x.dtype.type(self.architecture.norm_eps)
        if self.architecture.norm == "rms":
            return rms_norm(x, weight, eps)
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
        return x + self.weight(f"{name}.bias") if f"{name}.bias" in self.tensors else x


def dequantize(data: Floats, kind: gguf.GGMLQuantizationType) -> Floats:
    """By gguf-py, or by libggml where that does not know the type."""
    try:
        return gguf.quants.dequantize(data, kind)
    except NotImplementedError:
        import ggml

        return ggml.dequantize(data, kind.name)


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """(..., n) -> (..., n)."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps)) * weight


def rotate(x: Floats, layer: Layer) -> Floats:
    """Rotary embedding of (n, heads, head_dim); row p stands at position p."""
    rope, half = layer.rope, layer.rope.n_dims // 2
    angles = np.arange(len(x))[:, None, None] * rope.frequencies()  # float64 (n, 1, half)
    cos, sin = (rope.magnitude * wave(angles) for wave in (np.cos, np.sin))
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    if rope.style == "norm":
        first, second = slice(0, rope.n_dims, 2), slice(1, rope.n_dims, 2)
    else:
        first, second = slice(0, half), slice(half, rope.n_dims)
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


def attention(q: Floats, k: Floats, v: Floats, window: int, a: Architecture, sinks: Floats | None = None) -> Floats:
    """q (n, n_head, head_dim), k and v (n, n_head_kv, head_dim) -> (n, n_head * head_dim).

    sinks:  (n_head,) scores of a position that has no value, or None
    """
    n = len(q)
    distance = np.arange(n)[:, None] - np.arange(n)  # how far the key lies behind the query
    hidden = (distance < 0) | (distance >= (window or n))
    out = np.empty_like(q)
    for head in range(q.shape[1]):
        group = head * k.shape[1] // q.shape[1]
        scores = softcap(q[:, head] @ k[:, group].T * q.dtype.type(a.attention_scale), a.attn_logit_softcapping)
        scores[hidden] = -np.inf
        most = scores.max(-1, keepdims=True)
        scores = np.exp(scores - most)
        total = scores.sum(-1, keepdims=True)
        if sinks is not None:
            total += np.exp(sinks[head] - most)
        out[:, head] = scores / total @ v[:, group]
    return out.reshape(n, -1)


def silu(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def gelu(x: Floats) -> Floats:
    """The tanh form."""
    return x / 2 * (1 + np.tanh(x.dtype.type(np.sqrt(2 / np.pi)) * (x + x.dtype.type(0.044715) * x**3)))


def gelu_erf(x: Floats) -> Floats:
    return x / 2 * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x / np.sqrt(2)))


def relu(x: Floats) -> Floats:
    return np.maximum(x, 0)


def relu_sqr(x: Floats) -> Floats:
    return np.maximum(x, 0) ** 2


ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_erf": gelu_erf, "relu": relu, "relu_sqr": relu_sqr}


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


class ObservedReference(Reference):
    """Notes the input of every product of the reference.

    int8:  multiply quantized weights with what is left of it in blocks of 32 bytes, as kernels without tiles do: what
           that alone costs
    """

    def __init__(self, path: str | Path, int8: bool = False, n_ctx: int = 0) -> None:
        super().__init__(path, n_ctx=n_ctx)
        self.seen: dict[str, np.ndarray] = {}
        seen, outer = self.seen, self
        rounds = {tensor.name for tensor in self.tensors.values() if int8 and tensor.tensor_type not in FLOATS}

        class Noting(np.ndarray):
            """A weight that notes what is multiplied with its transpose."""

            name = ""

            def __array_finalize__(self, obj: Any) -> None:
                self.name = getattr(obj, "name", "")

            def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
                plain = [np.asarray(x) for x in inputs]
                if ufunc is np.matmul and isinstance(inputs[1], Noting):
                    seen[inputs[1].name] = plain[0].copy()
                    plain[0] = in_bytes(plain[0]) if inputs[1].name in rounds else plain[0]
                return getattr(ufunc, method)(*plain, **kwargs)

        def weight(name: str, rows: Any = slice(None)) -> Any:
            values = Reference.weight(outer, name, rows)
            if values.ndim == 2 and isinstance(rows, slice):
                values = values.view(Noting)
                values.name = name
            return values

        self.weight = weight  # type: ignore[method-assign]

    def inputs(self, tokens: list[int]) -> dict[str, np.ndarray]:
        self.logits(tokens)
        return self.seen


def in_bytes(x: np.ndarray) -> np.ndarray:
    """Rows of floats -> the nearest that blocks of 32 signed bytes with one scale can hold."""
    blocks = x.reshape(len(x), -1, 32)
    scales = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.rint(blocks / np.where(scales, scales, 1)) * scales).reshape(x.shape)


def observed(backend: Backend, batch: Batch) -> dict[str, np.ndarray]:
    """What the products of a step read, by tensor."""
    parts: dict[str, list[np.ndarray]] = defaultdict(list)

    def on_input(names: tuple[str, ...], inputs: np.ndarray) -> None:
        assert inputs.dtype == np.float32
        for name in names:
            parts[name].append(inputs.copy())

    backend.observe(batch, on_input)
    return {name: np.concatenate(found) for name, found in parts.items()}


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """In the root mean square of what is expected."""
    assert found.shape == expected.shape
    return float(np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()))
