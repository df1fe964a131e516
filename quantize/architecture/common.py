"""What all families share: reading the sizes from GGUF metadata, and checking the file against them."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize.architecture import mixture
from edgert.quantize.architecture.base import NO_ROPE, Activation, Architecture, Experts, Layer, Rope, Shapes
from edgert.quantize.architecture.rope import FACTORS, LONG_FACTORS, SHORT_FACTORS, read_rope
from edgert.quantize.gguf_file import Model

log = logging.getLogger("edgert")

QkNorm = Literal["", "head", "heads", "row"]
MOST = 2**32 - 1  # that a size may be: GGUF stores sizes in 32 bits, and this one sometimes means "no bound"


class Keys:
    """Reads `<family>.<key>` and refuses what cannot be right; each message names the key."""

    def __init__(self, file: Model[Any]) -> None:
        self.file = file
        self.family = file.architecture

    def name(self, key: str) -> str:
        return f"{self.family}.{key}"

    def raw(self, key: str) -> Any:
        """The value as it stands in the file, arrays as lists; None when the key is absent."""
        value = self.file.metadata.get(self.name(key))
        return value.tolist() if isinstance(value, np.ndarray) else value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer, or an array of one for each layer that are all equal."""
        value = self.raw(key)
        if isinstance(value, list) and value and all(type(entry) is int for entry in value):
            if len(set(value)) > 1:
                shown = f"{min(value)} to {max(value)}"
                raise UnsupportedFormatError(
                    f"{self.file.path}: {self.name(key)} differs from layer to layer ({shown}), "
                    "which edgert does not run."
                )
            value = value[0]
        else:
            value = self.file.get(self.name(key), int, *([] if default is None else [default]))
        if value < least and value != default:
            raise self.error(key, f"is {value}, and must be {least} or more")
        if value > MOST:
            raise self.error(key, f"is {value}, and must be {MOST} or less")
        return value

    def of_layers(self, key: str, n_layer: int, default: int | None = None, least: int = 1) -> list[int]:
        """An integer of each layer: the file has one for all, or an array."""
        value = self.raw(key)
        if not isinstance(value, list) or len(set(map(str, value))) < 2:
            return [self.integer(key, default)] * n_layer
        if len(value) != n_layer:
            raise self.error(key, f"has {len(value)} entries for {n_layer} layers")
        if any(type(entry) is not int or not least <= entry <= MOST for entry in value):
            raise self.error(key, f"holds what is no integer of {least} or more, of 32 bits")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.file.get(self.name(key), float, *([] if default is None else [default]))
        if value <= 0 and value != default:
            raise self.error(key, f"is {value}, and must be positive")
        return value

    def error(self, key: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.file.path}: {self.name(key)} {problem}; convert the model anew.")


def warn_default(file: Model[Any], key: str, value: object) -> None:
    log.warning("%s lacks the key %s: edgert goes on with %s", file.path, key, value)


def describe(
    file: Model[Any],
    *,
    rope_style: Literal["norm", "neox"] | None,
    rope_base: float = 10_000.0,
    norm: Literal["rms", "layer"] = "rms",
    norms: Sequence[str] = ("attn_norm", "ffn_norm"),
    qk_norm: QkNorm = "",
    qkv_bias: bool = False,
    gated: bool = True,
    activation: Activation = "silu",
    parallel: bool = False,
    experts: Experts | None = None,
    taps: int = 0,
    head_dims: Sequence[int] | None = None,
) -> Architecture:
    """The description of a family whose layers are alike but for their sizes.

    Fused tensors take the place of their parts, and biases are added, where the file has them.

    rope_style:  None: nothing is rotated, and positions have a table
    rope_base:   what the family's models were trained with when the file does not say, with a warning
    norms:       those that a layer has
    qk_norm:     of q and k: "" none, "head" each head alike, "heads" each head by weights of its own, "row" all at once
    qkv_bias:    whether q, k and v must have biases
    experts:     how they are chosen where the file has some; its sizes count
    taps:        of the convolution that layers without key-value heads have; 0: all have some
    head_dims:   of each layer; None: the file has one for all

    Raises: ModelFileError, UnsupportedFormatError.
    """
    keys = Keys(file)
    experts = mixture.read(keys, experts)
    n_layer = keys.integer("block_count")
    if n_layer > len(file.tensors):
        raise keys.error("block_count", f"is {n_layer}, and the file has {len(file.tensors)} tensors")
    n_next = keys.integer("nextn_predict_layers", default=0, least=0)  # behind the others, to guess tokens ahead
    if n_next >= n_layer:
        raise keys.error("nextn_predict_layers", f"is {n_next}, of block_count = {n_layer}")
    n_layer -= n_next
    n_embd = keys.integer("embedding_length")
    n_head = keys.of_layers("attention.head_count", n_layer)
    groups = keys.raw("attention.head_count_kv") is not None
    least = 0 if taps else 1
    n_head_kv = keys.of_layers("attention.head_count_kv", n_layer, least=least) if groups else n_head
    for all_heads, kv_heads in zip(n_head, n_head_kv, strict=True):
        if kv_heads and all_heads % kv_heads:
            raise keys.error("attention.head_count", f"is {all_heads}, no multiple of head_count_kv = {kv_heads}")
    head_dim = _head_dim(keys, n_embd, n_head[0])
    n_vocab = _n_vocab(keys)
    stored = {name.split(".", 2)[2]: x.shape for name, x in file.tensors.items() if re.match(r"blk\.\d+\.", name)}
    if qkv_bias and "attn_qkv.weight" not in stored:
        stored["attn_q.bias"] = ()
    rope = NO_ROPE if rope_style is None else read_rope(keys, rope_style, _rope_base(keys, rope_base), head_dim)
    layers = []
    widths = keys.of_layers("feed_forward_length", n_layer)
    mixtures = mixture.of_layers(keys, n_layer, experts)
    dims = list(head_dims or [head_dim] * n_layer)[:n_layer]
    for heads, heads_kv, dim, n_ff, own in zip(n_head, n_head_kv, dims, widths, mixtures, strict=True):
        if heads_kv:
            mixing = _attention(n_embd, heads * dim, heads_kv * dim, dim, qk_norm, stored)
        else:
            mixing = _convolution(n_embd, taps)
        if own:
            n_ff = mixture.shared_width(keys, stored)
            block: Shapes = mixture.tensors(n_embd, n_ff, own, stored)
        else:
            block = _feed_forward(n_embd, n_ff, gated, stored)
        tensors = _with_biases(_layer_tensors(n_embd, norms, mixing, block), stored, norm)
        turned = rope if heads_kv else NO_ROPE
        layers.append(Layer(heads, heads_kv, n_ff, tensors, turned, parallel=parallel, experts=own))
    return Architecture(
        name=keys.family,
        n_layer=n_layer,
        n_embd=n_embd,
        head_dim=max(head_dim, *dims),
        n_vocab=n_vocab,
        n_ctx_train=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon" if norm == "rms" else "attention.layer_norm_epsilon"),
        attention_scale=1 / math.sqrt(head_dim),
        layers=tuple(layers),
        outer=_outer_tensors(file, n_vocab, n_embd, norm, rope),
        norm=norm,
        activation=activation,
        attn_logit_softcapping=keys.number("attn_logit_softcapping", default=0.0),
        final_logit_softcapping=keys.number("final_logit_softcapping", default=0.0),
    )


def _layer_tensors(n_embd: int, norms: Sequence[str], mixing: Shapes, block: Shapes) -> Shapes:
    """Names and shapes of a layer's weights, in the order of the computation.

    mixing:  of attention, or of what a layer has in its place
    block:   of the feed-forward block
    """
    shapes: dict[str, tuple[int, ...]] = {name: (n_embd,) for name in ("attn_norm", "attn_norm_2") if name in norms}
    shapes |= mixing
    shapes |= {name: (n_embd,) for name in ("post_attention_norm", "attn_output_norm", "ffn_norm") if name in norms}
    shapes |= block
    shapes |= {name: (n_embd,) for name in ("post_ffw_norm", "layer_output_norm") if name in norms}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _convolution(n_embd: int, taps: int) -> Shapes:
    return {
        "shortconv.in_proj": (3 * n_embd, n_embd),
        "shortconv.conv": (n_embd, taps),
        "shortconv.out_proj": (n_embd, n_embd),
    }


def _attention(n_embd: int, q: int, kv: int, head_dim: int, qk_norm: QkNorm, stored: Shapes) -> Shapes:
    """q, kv:   elements of all heads of q, and of those of k
    stored:  what some layer of the file has: fused tensors take the place of their parts
    """
    shapes: dict[str, tuple[int, ...]] = {}
    if "attn_qkv.weight" in stored:
        shapes["attn_qkv"] = (q + 2 * kv, n_embd)
    else:
        shapes |= {"attn_q": (q, n_embd), "attn_k": (kv, n_embd), "attn_v": (kv, n_embd)}
    for name, size in (("attn_q_norm", q), ("attn_k_norm", kv)):
        if qk_norm:
            shapes[name] = {"head": (head_dim,), "heads": (size // head_dim, head_dim), "row": (size,)}[qk_norm]
    if "attn_sinks.weight" in stored:
        shapes["attn_sinks"] = (q // head_dim,)
    shapes["attn_output"] = (n_embd, q)
    return shapes


def _feed_forward(n_embd: int, n_ff: int, gated: bool, stored: Shapes) -> Shapes:
    """Of a block that every token passes."""
    is_fused = gated and "ffn_gate.weight" not in stored and stored.get("ffn_up.weight") == (2 * n_ff, n_embd)
    shapes: dict[str, tuple[int, ...]] = {"ffn_gate": (n_ff, n_embd)} if gated and not is_fused else {}
    return shapes | {"ffn_up": (2 * n_ff if is_fused else n_ff, n_embd), "ffn_down": (n_embd, n_ff)}


def _with_biases(weights: Shapes, stored: Shapes, norm: str) -> Shapes:
    """Adds the biases that some layer of the file has, of q, k and v all or none; rms norms have none."""
    together = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        shapes[name] = shape
        bias = name.removesuffix("weight") + "bias"
        found = any(other in stored for other in (together if bias in together else (bias,)))
        if found and (norm == "layer" or not name.endswith("norm.weight")):
            shapes[bias] = shape[: max(1, len(shape) - 1)]
        if name == "ffn_gate_inp.weight" and "exp_probs_b.bias" in stored:
            shapes["exp_probs_b.bias"] = shape[:1]
    return shapes


def _outer_tensors(file: Model[Any], n_vocab: int, n_embd: int, norm: str, rope: Rope) -> Shapes:
    """Names and shapes of what belongs to no layer."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd)}
    if not rope.n_dims:
        shapes["position_embd.weight"] = (Keys(file).integer("context_length"), n_embd)
    used = {FACTORS: rope.factors, LONG_FACTORS: rope.long_factors, SHORT_FACTORS: rope.long_factors}
    for name, factors in used.items():
        if factors is not None and name in file.tensors:
            shapes[name] = (rope.n_dims // 2,)
    shapes["output_norm.weight"] = (n_embd,)
    if norm == "layer" and "output_norm.bias" in file.tensors:
        shapes["output_norm.bias"] = (n_embd,)
    if "output.weight" in file.tensors:
        shapes["output.weight"] = (n_vocab, n_embd)
        if "output.bias" in file.tensors:
            shapes["output.bias"] = (n_vocab,)
    return shapes


def _head_dim(keys: Keys, n_embd: int, n_head: int) -> int:
    if keys.raw("attention.key_length") is None and n_embd % n_head:
        raise keys.error("embedding_length", f"is {n_embd}, no multiple of head_count = {n_head}")
    head_dim = keys.integer("attention.key_length", default=n_embd // n_head)
    if head_dim % 2:
        raise keys.error("attention.key_length", f"is {head_dim}, and must be even")
    value = keys.integer("attention.value_length", default=head_dim)
    if value != head_dim:
        raise UnsupportedFormatError(
            f"{keys.file.path}: {keys.name('attention.value_length')} is {value} and a head has {head_dim} elements; "
            "edgert runs models where they are equal."
        )
    return head_dim


def _n_vocab(keys: Keys) -> int:
    """The rows of token_embd.weight, which must be the tokens of the vocabulary."""
    shape = keys.file.tensor("token_embd.weight").shape
    n_vocab = shape[0]
    n_tokens = keys.file.metadata.length("tokenizer.ggml.tokens")
    if n_tokens is not None and n_tokens != n_vocab:
        raise ModelFileError(
            f"{keys.file.path}: token_embd.weight has {n_vocab} rows and the vocabulary "
            f"(tokenizer.ggml.tokens) {n_tokens} tokens; convert the model anew."
        )
    stated = keys.integer("vocab_size", default=n_vocab)
    if stated != n_vocab:
        log.warning("%s: %s is %d, and the model has %d", keys.file.path, keys.name("vocab_size"), stated, n_vocab)
    return n_vocab


def _rope_base(keys: Keys, default: float) -> float:
    base = keys.number("rope.freq_base", default=default)
    if keys.raw("rope.freq_base") is None:
        warn_default(keys.file, keys.name("rope.freq_base"), default)
    if base <= 1:
        raise keys.error("rope.freq_base", f"is {base}, and must be more than 1")
    return base


def local_layers(keys: Keys, n_layer: int, period: int) -> list[bool]:
    """Which layers see a window only: GGUF stores a period, a flag for each layer, or nothing.

    period:  when the file does not say: of so many layers the last one sees the whole text
    """
    key = "attention.sliding_window_pattern"
    flags = keys.raw(key)
    if isinstance(flags, list):
        if len(flags) != n_layer:
            raise keys.error(key, f"has {len(flags)} entries for {n_layer} layers")
        return [bool(flag) for flag in flags]
    period = keys.integer(key, default=period)
    return [i % period < period - 1 for i in range(n_layer)]


def with_windows(
    layers: tuple[Layer, ...], is_local: Sequence[bool], window: int, rope: Rope | None = None
) -> tuple[Layer, ...]:
    """The layers with a window on the local ones (0: on none), and there another rope where one is given."""
    if not window:
        return layers
    return tuple(
        replace(layer, window=window, rope=rope or layer.rope) if local else layer
        for layer, local in zip(layers, is_local, strict=True)
    )


def with_one_window(file: Model[Any], a: Architecture) -> Architecture:
    """The description with the window of the file, if it has one, on every layer."""
    window = Keys(file).integer("attention.sliding_window", default=0, least=0)
    return replace(a, layers=with_windows(a.layers, [True] * a.n_layer, window))


def scale_residuals(a: Architecture, scale: float) -> Architecture:
    """The description of a model whose blocks add `scale` times what they compute to x.

    Each block reads x through a norm, so that x / scale, to which the blocks add all of it, gives the same with eps /
    scale**2.
    """
    return replace(a, embedding_scale=a.embedding_scale / scale, norm_eps=a.norm_eps / scale**2)
