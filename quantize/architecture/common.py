"""What all families share: reading the sizes from GGUF metadata, and checking the file against them."""

from __future__ import annotations

import logging
import math
import re
from typing import Any, Literal

import numpy as np

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize.architecture.base import LAYER_TENSORS, Architecture, Layer, Rope
from edgert.quantize.gguf_file import Model

log = logging.getLogger("edgert")

ESSENTIAL_TOKENS = ("bos", "eos", "unknown", "eot", "eom")
# Parts of layers that change the result: a file that has them must not run without them.
UNSUPPORTED_PARTS = (
    *(
        "attn_output.bias",
        "ffn_gate.bias",
        "ffn_up.bias",
        "ffn_down.bias",
        "attn_qkv.weight",
        "attn_qkv.bias",
    ),
    *("ffn_gate_inp.weight", "attn_sinks.weight", "attn_norm.bias", "ffn_norm.bias", "attn_gate.weight"),
)
UNSUPPORTED_TENSORS = (
    "output.bias",
    "output_norm.bias",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)


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
    rope_style: Literal["norm", "neox"],
    rope_base: float = 10_000.0,
    activation: Literal["silu", "gelu"] = "silu",
    qkv_bias: bool | None = None,
    qk_norm: bool = False,
    post_norm: bool = False,
) -> Architecture:
    """The description of a family whose layers are all alike, checked against the file.

    rope_base:  what the family's models were trained with when the file does not say, with a warning
    qkv_bias:   None: when the file has them

    Raises: ModelFileError, UnsupportedFormatError.
    """
    keys = Keys(file)
    if keys.integer("expert_count", default=0, least=0):
        raise UnsupportedFormatError(f"{file.path} is a mixture of experts, which edgert does not run.")
    n_layer = keys.integer("block_count")
    if n_layer > len(file.tensors):
        raise keys.error("block_count", f"is {n_layer}, and the file has {len(file.tensors)} tensors")
    n_embd = keys.integer("embedding_length")
    n_head = keys.integer("attention.head_count")
    n_head_kv = keys.integer("attention.head_count_kv", default=n_head)
    if n_head % n_head_kv:
        raise keys.error("attention.head_count", f"is {n_head}, no multiple of head_count_kv = {n_head_kv}")
    head_dim = _head_dim(keys, n_embd, n_head)
    biases = [f"blk.0.attn_{part}.bias" for part in "qkv"]
    architecture = Architecture(
        name=keys.family,
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=keys.integer("feed_forward_length"),
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_vocab=_n_vocab(keys),
        n_ctx_train=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        attention_scale=1 / math.sqrt(head_dim),
        layers=(Layer(_rope(keys, rope_style, rope_base, head_dim)),) * n_layer,
        activation=activation,
        qkv_bias=any(name in file.tensors for name in biases) if qkv_bias is None else qkv_bias,
        qk_norm=qk_norm,
        post_norm=post_norm,
        tied_head="output.weight" not in file.tensors,
        attn_logit_softcapping=keys.number("attn_logit_softcapping", default=0.0),
        final_logit_softcapping=keys.number("final_logit_softcapping", default=0.0),
    )
    _check_tensors(file, architecture)
    _check_token_ids(file, architecture.n_vocab)
    return architecture


def _head_dim(keys: Keys, n_embd: int, n_head: int) -> int:
    if keys.raw("attention.key_length") is None and n_embd % n_head:
        raise keys.error("embedding_length", f"is {n_embd}, no multiple of head_count = {n_head}")
    head_dim = keys.integer("attention.key_length", default=n_embd // n_head)
    if head_dim % 2:
        raise keys.error("attention.key_length", f"is {head_dim}, and must be even")
    for key in ("attention.value_length", "rope.dimension_count"):
        value = keys.integer(key, default=head_dim)
        if value != head_dim:
            raise UnsupportedFormatError(
                f"{keys.file.path}: {keys.name(key)} is {value} and a head has {head_dim} elements; "
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


def _rope(keys: Keys, style: Literal["norm", "neox"], default_base: float, n_dims: int) -> Rope:
    """Base, linear scaling and the factors of rope_freqs.weight (llama-3 scaling)."""
    base = keys.number("rope.freq_base", default=default_base)
    if keys.raw("rope.freq_base") is None:
        warn_default(keys.file, keys.name("rope.freq_base"), default_base)
    kind = keys.file.get(keys.name("rope.scaling.type"), str, "linear")
    if kind not in ("none", "linear"):
        raise UnsupportedFormatError(
            f"{keys.file.path}: {keys.name('rope.scaling.type')} is {kind!r}; edgert runs 'none', 'linear' "
            "and the factors of rope_freqs.weight."
        )
    if keys.raw("rope.scaling.attn_factor") not in (None, 1.0):
        raise UnsupportedFormatError(f"{keys.file.path}: edgert does not run rope.scaling.attn_factor.")
    old_key = "rope.scale_linear"  # the name before 2023-11
    key = "rope.scaling.factor" if keys.raw(old_key) is None else old_key
    factor = keys.raw(key) or 1.0  # 0 means none, as llama.cpp reads it
    scale = 1.0 if kind == "none" or factor == 1.0 else 1 / keys.number(key)
    return Rope(n_dims, base, style, scale, _rope_factors(keys.file, n_dims))


def _rope_factors(file: Model[Any], n_dims: int) -> np.ndarray | None:
    if "rope_freqs.weight" not in file.tensors:
        return None
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.shape != (n_dims // 2,):
        raise _wrong_shape(file, tensor.name, tensor.shape, (n_dims // 2,))
    factors = tensor.dequantize()
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFileError(f"{file.path}: rope_freqs.weight holds factors that are not positive numbers.")
    return factors


def _check_tensors(file: Model[Any], architecture: Architecture) -> None:
    """Needed tensors are there, in their shapes; surplus ones that would change the result are refused."""
    needed = architecture.tensors()
    for name, shape in needed.items():
        found = file.tensor(name).shape
        if found != shape:
            raise _wrong_shape(file, name, found, shape)
    extra = [name for name in file.tensors if name not in needed]
    parts = {*UNSUPPORTED_PARTS, *(row[0] for row in LAYER_TENSORS)}
    for name in extra:
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        in_layer = layer is not None and int(layer[1]) < architecture.n_layer and layer[2] in parts
        if in_layer or name in UNSUPPORTED_TENSORS:
            raise UnsupportedFormatError(
                f"{file.path} has the tensor {name!r}, which edgert's {architecture.name} does not know: "
                "without it the answers would be wrong."
            )
    if extra:
        shown = ", ".join(extra[:5]) + (" ..." if len(extra) > 5 else "")
        log.warning("%s holds more than the model needs: %d not used, %s", file.path, len(extra), shown)


def _wrong_shape(file: Model[Any], name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> ModelFileError:
    return ModelFileError(
        f"{file.path}: the tensor {name!r} has the shape {found} and should have {expected} by the metadata; "
        "convert the model anew."
    )


def _check_token_ids(file: Model[Any], n_vocab: int) -> None:
    """Special token ids lie within the vocabulary."""
    for key in file.metadata:
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            token = file.get(key, int)
            if 0 <= token < n_vocab:
                continue
            if key.removeprefix("tokenizer.ggml.").removesuffix("_token_id") in ESSENTIAL_TOKENS:
                raise ModelFileError(
                    f"{file.path}: {key} is {token}, outside the vocabulary of {n_vocab} tokens; "
                    "convert the model anew."
                )
            log.warning("%s: %s is %d, outside the vocabulary of %d: ignored", file.path, key, token, n_vocab)
