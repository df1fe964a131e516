"""One description of a model family, which the CPU tape, the ONNX graph and the converter all read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Activation = Literal["silu", "gelu", "gelu_erf", "relu", "relu_sqr", "swiglu_oai"]
Shapes = Mapping[str, tuple[int, ...]]  # of tensors by name, rows first, in the order of the computation


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one layer.

    n_dims:     of a head, its first ones, that are rotated; 0: none
    style:      "norm" rotates neighbours (2i, 2i+1), "neox" rotates (i, i + n_dims/2)
    factors:    n_dims/2 divisors of the frequencies, or None
    magnitude:  what cosines and sines are multiplied by
    long_factors:  those for contexts beyond n_ctx_original, or None where `factors` serve for all
    temperature:   q at position p is multiplied by 1 + temperature * log(1 + p // n_ctx_original)
    """

    n_dims: int
    base: float
    style: Literal["norm", "neox"]
    scale: float = 1.0  # linear scaling: positions are multiplied by it
    factors: tuple[float, ...] | None = None
    magnitude: float = 1.0
    long_factors: tuple[float, ...] | None = None
    n_ctx_original: int = 0
    temperature: float = 0.0

    def for_context(self, n_ctx: int) -> Rope:
        """The rotation in a context of so many positions."""
        if self.long_factors is None:
            return self
        factors = self.long_factors if n_ctx > self.n_ctx_original else self.factors
        return replace(self, factors=factors, long_factors=None)

    def frequencies(self) -> NDArray[np.float64]:
        """float64 (n_dims/2,): radians per position."""
        inverse = self.base ** (-np.arange(0, self.n_dims, 2, dtype=np.float64) / self.n_dims) * self.scale
        return inverse if self.factors is None else inverse / np.asarray(self.factors, np.float64)

    def query_scales(self, n_ctx: int) -> NDArray[np.float64]:
        """float64 (n_ctx,): what q is multiplied by at each position, beside the scale of attention."""
        if not self.temperature:
            return np.ones(n_ctx)
        return 1 + self.temperature * np.log1p(np.arange(n_ctx) // self.n_ctx_original)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor multiplies, or its rows are looked up; norms of heads, biases of experts and taps do not."""
    return len(shape) > 1 and not name.endswith(("_norm.weight", ".bias", "shortconv.conv.weight"))


NO_ROPE = Rope(0, 1.0, "norm")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: each token goes to the n_used of them that its router prefers.

    n_ff:    of one expert
    gating:  what an expert's share is made of its logit by: the softmax or the sigmoid of all; "chosen": the softmax
             of the chosen ones' logits
    norm:    shares are divided by their sum
    scale:   what they are multiplied by then
    """

    n_expert: int = 0
    n_used: int = 0
    n_ff: int = 0
    gating: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    norm: bool = True
    scale: float = 1.0


@dataclass(frozen=True)
class Layer:
    """What may differ from layer to layer.

    tensors:   by name in the layer; which there are says what is computed, as Architecture tells
    window:    attention sees this many latest positions (itself included); 0: all
    parallel:  the feed-forward block reads x as it is before the attention
    kv_layer:  the earlier layer whose keys and values it reads; None: it has its own
    experts:   the feed-forward block is a mixture; n_ff is then that of the expert that sees every token, 0: none
    """

    n_head: int
    n_head_kv: int
    n_ff: int
    tensors: Shapes
    rope: Rope
    window: int = 0
    parallel: bool = False
    experts: Experts | None = None
    kv_layer: int | None = None

    @property
    def head_dim(self) -> int:
        """Elements of a head; 0 where it has a convolution in place of attention."""
        return self.tensors["attn_output.weight"][1] // self.n_head if self.has("attn_output") else 0

    def has(self, name: str) -> bool:
        """Whether it has the tensor name.weight."""
        return f"{name}.weight" in self.tensors

    @property
    def n_taps(self) -> int:
        """Of the convolution that it has in place of attention; 0: it has attention."""
        return self.tensors.get("shortconv.conv.weight", (0, 0))[1]

    @property
    def attention_norm(self) -> str:
        """The norm through which attention reads x, "" for none."""
        if self.has("attn_norm_2"):
            return "attn_norm_2"
        return "attn_norm" if self.has("attn_norm") or self.has("layer_output_norm") else ""

    @property
    def feed_forward_norm(self) -> str:
        """The norm through which the feed-forward block reads x, "" for none."""
        if self.has("ffn_norm") or self.has("attn_output_norm"):
            return "ffn_norm"
        if self.has("post_attention_norm") and not self.has("post_ffw_norm"):
            return "post_attention_norm"
        return "attn_norm" if self.parallel else ""

    @property
    def attention_post_norm(self) -> str:
        """The norm of what attention adds to x, "" for none."""
        own = self.has("post_attention_norm") and self.feed_forward_norm != "post_attention_norm"
        return "post_attention_norm" if own else ""

    @property
    def gate_is_fused(self) -> bool:
        """ffn_up has the rows of the gate, then its own."""
        return self.has("ffn_up") and not self.has("ffn_gate") and self.tensors["ffn_up.weight"][0] == 2 * self.n_ff


@dataclass(frozen=True)
class Architecture:
    """A transformer as GGUF stores it, decoder or encoder; names of sizes and of tensors are GGUF's.

    x starts as token_embd * embedding_scale (+ position_embd). A layer computes, each norm only where it has its
    tensor, and every product with its bias where it has one:
        h = norm(x, attn_norm);  q, k, v = W h, of attn_q, attn_k, attn_v or of attn_qkv, which are these three
        q, k = norm(q, attn_q_norm), norm(k, attn_k_norm), of each head or of the whole row, as the norm is long; with
            rope_first after the rotation
        x += norm(W attention(rope(q) * attention_scale, rope(k), v), post_attention_norm)     W: attn_output
        h = norm(x, ffn_norm);  u = activation(W h) * (W h), of ffn_gate and ffn_up, or of both halves of a double
            ffn_up;  u = activation(W h) where there is no gate
        x += norm(W u, post_ffw_norm)                                                             W: ffn_down
    (post_attention_norm stands for ffn_norm where a layer has neither this nor post_ffw_norm.)
    With experts, the last two lines are those of each chosen one, times its share, which the router finds from the
    same h by ffn_gate_inp; exp_probs_b counts for the choice alone. A shared expert (ffn_*_shexp) sees every token,
    with the share 1, or sigmoid(ffn_gate_inp_shexp . h).
    A layer with a convolution in place of attention (n_head_kv is 0) computes
        b, c, h = the thirds of W h;  h = b * h;  x += W (c * the sum of taps[:, -1 - i] * h, as it was i positions
            before)                                      W: shortconv.in_proj, shortconv.out_proj; taps: shortconv.conv
    With per_layer_token_embd each layer gets a vector p of its own, for which x is as it starts:
        p = (norm(W x / sqrt(n_embd), per_layer_proj_norm) + per_layer_token_embd * sqrt(n_embd_per_layer)) / sqrt(2)
            W, and the table's row: the layer's part of per_layer_model_proj and of per_layer_token_embd
        and ends with x += norm(W (activation(W x) * p), post_norm)                    W: proj, inp_gate
    A layer that has layer_output_scale multiplies x by it at last. One without attn_v takes W h of attn_k for v, too.
    In a parallel layer both blocks read the x that came in, through one norm if there is no ffn_norm.
    logits = output norm(x, output_norm) * logit_scale (+ output.bias).
    A softcapping c > 0 replaces scores or logits y by c * tanh(y / c).

    An encoder sees all of a text at once, x starts as token_embd + row 0 of token_types (+ position_embd), and a norm
    stands behind each sum: x = norm(x, token_embd_norm) first, x = norm(x + W attention(...), attn_output_norm) and
    x = norm(x + W u, layer_output_norm) in a layer. The last x is what it makes of the text; there are no logits.

    outer:  the tensors that belong to no layer
    norm:   "rms", or "layer": (x - mean) / deviation * weight + bias
    head_dim:    of the layers that have the largest heads
    value_norm:  v of each head is normed, without a weight
    """

    name: str
    n_layer: int
    n_embd: int
    head_dim: int
    n_vocab: int
    n_ctx_train: int
    norm_eps: float
    attention_scale: float
    layers: tuple[Layer, ...]
    outer: Shapes
    norm: Literal["rms", "layer"] = "rms"
    activation: Activation = "silu"  # gelu: the tanh form
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    attn_logit_softcapping: float = 0.0
    final_logit_softcapping: float = 0.0
    encoder: bool = False
    rope_first: bool = False
    value_norm: bool = False

    @property
    def n_embd_per_layer(self) -> int:
        """Of the vector that each layer gets of a token; 0: it gets none."""
        return self.outer.get("per_layer_proj_norm.weight", (0,))[0]

    @property
    def n_head(self) -> int:
        """Of the layer that has most."""
        return max(layer.n_head for layer in self.layers)

    @property
    def n_head_kv(self) -> int:
        """Of the layer that has most."""
        return max(layer.n_head_kv for layer in self.layers)

    @property
    def n_ff(self) -> int:
        """Of the widest layer."""
        return max(layer.n_ff for layer in self.layers)

    @property
    def output_norm(self) -> str:
        """The norm before the head, which lfm2 calls by the name that encoders have for their first."""
        return "output_norm" if "output_norm.weight" in self.outer else "token_embd_norm"

    @property
    def qkv_bias(self) -> bool:
        """Whether the products of q, k and v have biases."""
        return self._has("attn_q.bias") or self._has("attn_qkv.bias")

    @property
    def qk_norm(self) -> bool:
        """Whether q and k are normed."""
        return self._has("attn_q_norm.weight")

    @property
    def post_norm(self) -> bool:
        """Whether what a block adds to x is normed."""
        return any(layer.attention_post_norm or layer.has("post_ffw_norm") for layer in self.layers)

    @property
    def tied_head(self) -> bool:
        """Whether token_embd.weight serves as output.weight."""
        return "output.weight" not in self.outer

    def _has(self, name: str) -> bool:
        return any(name in layer.tensors for layer in self.layers)

    def for_context(self, n_ctx: int) -> Architecture:
        """The model as it runs in a context of so many positions."""
        return replace(self, layers=tuple(replace(x, rope=x.rope.for_context(n_ctx)) for x in self.layers))

    def layer_tensors(self, i: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes (rows first) of what layer i needs, in the order of the computation."""
        return {f"blk.{i}.{name}": shape for name, shape in self.layers[i].tensors.items()}

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Of `tensors` those that multiply, or whose rows are looked up."""
        return {name: shape for name, shape in self.tensors().items() if is_matrix(name, shape)}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes (rows first) of all that the model needs, in the order of the computation."""
        needed = {name: shape for name, shape in self.outer.items() if not name.startswith("output")}
        for i in range(self.n_layer):
            needed |= self.layer_tensors(i)
        return needed | dict(self.outer)
