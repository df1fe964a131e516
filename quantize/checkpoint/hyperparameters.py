"""Sizes and facts of config.json as GGUF keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgert.errors import UnsupportedFormatError
from edgert.quantize.checkpoint.config import Config, load_json
from edgert.quantize.checkpoint.families.family import Family
from edgert.quantize.checkpoint.rope import RopeScaling, read_rope
from edgert.quantize.gguf_value import Kind, Value

_SIZES = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))
# generation_config.json -> general.sampling.*
_SAMPLING = {
    "top_k": ("top_k", Kind.I32),
    "top_p": ("top_p", Kind.F32),
    "min_p": ("min_p", Kind.F32),
    "temperature": ("temp", Kind.F32),
    "repetition_penalty": ("penalty_repeat", Kind.F32),
}


@dataclass(frozen=True)
class Sizes:
    """Names are GGUF's; head_dim is the length of a head."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int


def read_sizes(config: Config, family: Family, n_vocab: int) -> Sizes:
    """Raises: ModelFileError that names the key of config.json."""
    n_embd = config.integer("hidden_size")
    n_head = config.integer("num_attention_heads")
    n_head_kv = config.integer("num_key_value_heads", n_head)
    if n_head % n_head_kv:
        raise config.error("num_key_value_heads", n_head_kv, f"a divisor of num_attention_heads = {n_head}")
    if config.get("head_dim") is None and family.head_size is None and n_embd % n_head:
        raise config.error("num_attention_heads", n_head, f"a divisor of hidden_size = {n_embd}")
    head_dim = config.integer("head_dim", family.head_size or n_embd // n_head)
    if head_dim % 2:
        raise config.error("head_dim", head_dim, "even")
    return Sizes(
        n_layer=config.integer("num_hidden_layers"),
        n_embd=n_embd,
        n_ff=config.integer("intermediate_size"),
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_vocab=n_vocab,
    )


def architecture_keys(
    config: Config, family: Family, sizes: Sizes, notices: list[str]
) -> tuple[dict[str, Value], RopeScaling]:
    """`<family>.*` in llama.cpp's order and types.

    Raises: UnsupportedFormatError for what GGUF has no key for and would change the answers.
    """
    _refuse_variants(config, family)
    rope = read_rope(config, family, sizes.head_dim)
    notices += rope.notices
    keys = {
        "block_count": Value.u32(sizes.n_layer),
        "context_length": Value.u32(config.integer("max_position_embeddings") - family.first_position),
        "embedding_length": Value.u32(sizes.n_embd),
        "feed_forward_length": _of_layers(config, "feed_forward_lengths", sizes.n_ff),
        "attention.head_count": Value.u32(sizes.n_head),
        "attention.head_count_kv": _kv_heads(config, sizes),
        **rope.keys,
        f"attention.layer_norm_{'rms_' * family.eps.startswith('rms')}epsilon": Value.f32(
            config.number(family.eps, 1e-6 if family.eps.startswith("rms") else 1e-5)
        ),
    }
    if config.get("head_dim") is not None or family.head_size is not None:
        keys["attention.key_length"] = Value.u32(sizes.head_dim)
        keys["attention.value_length"] = Value.u32(sizes.head_dim)
    if family.llama_keys:
        keys["vocab_size"] = Value.u32(sizes.n_vocab)
        keys["rope.dimension_count"] = Value.u32(sizes.head_dim)
    for key, setting in family.counts.items():
        keys[key] = Value.u32(config.integer(setting, least=0))
    for key, setting in family.numbers.items():
        value = config.get(setting)
        if isinstance(value, bool):
            keys[key] = Value.number(Kind.BOOL, value)
        elif value is not None:
            keys[key] = Value.f32(config.number(setting))
    if family.encoder:
        keys["attention.causal"] = Value.boolean(False)
    keys |= _pooling(config.path.parent)
    keys |= _expert_keys(config)
    if family.name in ("gemma2", "gemma3"):
        _check_query_scale(config, family, sizes)
    if family.windows:
        keys |= _window_keys(config, family, sizes)
    elif config.get("sliding_window") is not None and config.get("use_sliding_window", family.name == "llama"):
        notices.append(
            f"attention sees the whole text: GGUF's {family.name} has no key for the sliding window of "
            f"{config.get('sliding_window')} tokens in config.json, so longer texts give other answers"
        )
    return {f"{family.name}.{key}": value for key, value in keys.items()}, rope


def _of_layers(config: Config, key: str, usual: int) -> Value:
    """One number, or one for each layer where the family derived several."""
    found = config.get(key, [usual])
    return Value.u32(found[0]) if len(set(found)) == 1 else Value.array(np.array(found, np.int32))


def _kv_heads(config: Config, sizes: Sizes) -> Value:
    """One number, or one for each layer where some convolve, which have none."""
    if config.get("key_value_heads"):
        return _of_layers(config, "key_value_heads", sizes.n_head_kv)
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or "conv" not in kinds:
        return Value.u32(sizes.n_head_kv)
    if len(kinds) != sizes.n_layer or set(kinds) - {"conv", "full_attention"}:
        raise config.error("layer_types", kinds, f"{sizes.n_layer} times conv or full_attention")
    return Value.array(np.array([sizes.n_head_kv * (kind != "conv") for kind in kinds], np.int32))


def _pooling(folder: Path) -> dict[str, Value]:
    """Which states stand for a text, if sentence-transformers' files say so."""
    stated = load_json(folder / "1_Pooling" / "config.json")
    names = {"mean_tokens": 1, "cls_token": 2, "lasttoken": 3}
    found = [number for name, number in names.items() if stated.get(f"pooling_mode_{name}")]
    return {"pooling_type": Value.u32(found[0])} if len(found) == 1 else {}


def _expert_keys(config: Config) -> dict[str, Value]:
    """Of a mixture of experts: how many, how many of them a token goes to, and their sizes where they have own ones."""
    if not config.get("num_experts"):
        return {}
    names = {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }
    return {key: Value.u32(config.integer(name)) for key, name in names.items() if config.get(name) not in (None, 0)}


def _refuse_variants(config: Config, family: Family) -> None:
    activation = next(
        (config.get(key) for key in ("hidden_activation", "hidden_act", "activation") if config.get(key)),
        family.activations[0],
    )
    if activation not in family.activations:
        raise UnsupportedFormatError(
            f"{config.path}: the activation is {activation!r}; edgert converts {family.name} with "
            f"{' or '.join(family.activations)}."
        )
    for key, value in family.demanded.items():
        if config.get(key, value) != value:
            raise UnsupportedFormatError(
                f"{config.path}: {key} is {config.get(key)!r}; edgert converts {family.name} where it is {value!r}."
            )
    if "attn_logit_softcapping" not in family.numbers and config.get("attn_logit_softcapping") is not None:
        raise UnsupportedFormatError(f"{config.path}: edgert does not convert attn_logit_softcapping of {family.name}.")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedFormatError(f"{config.path}: a model whose attention looks ahead writes no text.")
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if method in family.quantized:
            return
        raise UnsupportedFormatError(
            f"{config.path} describes weights that are quantized already ({method or 'quantization_config'}): "
            "take the float original."
        )


def _check_query_scale(config: Config, family: Family, sizes: Sizes) -> None:
    """llama.cpp and edgert take the scale of attention from the sizes; the 27B models are known by their layers."""
    large = {"gemma2": 46, "gemma3": 62}[family.name]
    expected = sizes.n_embd // sizes.n_head if sizes.n_layer == large else sizes.head_dim
    scalar = config.number("query_pre_attn_scalar", 256)
    if scalar != expected:
        raise UnsupportedFormatError(
            f"{config.path}: query_pre_attn_scalar is {scalar:g}; GGUF's {family.name} takes {expected} for it."
        )


def _window_keys(config: Config, family: Family, sizes: Sizes) -> dict[str, Value]:
    """The window, and which layers have it if these are not the family's."""
    window = config.get("sliding_window")
    flags = _windows(config, family, sizes.n_layer)
    if window is None or not any(flags):
        return {"attention.sliding_window": Value.u32(0)} if family.name == "gemma3" else {}
    keys = {"attention.sliding_window": Value.u32(config.integer("sliding_window"))}
    if flags != _habit(family, sizes.n_layer) or family.name == "gemma4":
        keys["attention.sliding_window_pattern"] = Value.bools(flags)
    return keys


def _habit(family: Family, n_layer: int, period: int = 0) -> list[bool]:
    period = period or family.windows
    return [period == 1 or (i + 1) % period != 0 for i in range(n_layer)]


def _windows(config: Config, family: Family, n_layer: int) -> list[bool]:
    """Which layers see a window only."""
    types = config.get("layer_types")
    if types is None:
        own = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", family.windows))
        config.defaults.setdefault("sliding_window_pattern", own)
        return _habit(family, n_layer, config.integer("sliding_window_pattern"))
    if not isinstance(types, list) or len(types) != n_layer or set(types) - {"sliding_attention", "full_attention"}:
        raise config.error("layer_types", types, f"{n_layer} times sliding_attention or full_attention")
    return [kind == "sliding_attention" for kind in types]


def general_keys(folder: Path, config: Config, family: Family, n_parameters: int) -> dict[str, Value]:
    """`general.*`, but for what says how the weights are stored."""
    keys = {
        "general.architecture": Value.string(family.name),
        "general.type": Value.string("model"),
        "general.name": Value.string(_name(folder, config)),
        "general.size_label": Value.string(_size_label(n_parameters)),
    }
    if license := _license(folder):
        keys["general.license"] = Value.string(license)
    return keys | _sampling(load_json(folder / "generation_config.json"))


def _name(folder: Path, config: Config) -> str:
    """What the checkpoint calls itself, unless that is a path on someone's disk; else the folder's name."""
    name = config.get("_name_or_path")
    if isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return name.rpartition("/")[2] or folder.resolve().name
    return folder.resolve().name


def _size_label(n_parameters: int) -> str:
    """17304832 -> "17M", 1100048384 -> "1.1B": two digits at least."""
    for unit, letter in _SIZES:
        if n_parameters >= 0.999 * unit:
            scaled = n_parameters / unit
            return f"{scaled:.1f}{letter}" if scaled < 9.95 else f"{scaled:.0f}{letter}"
    return str(n_parameters)


def _license(folder: Path) -> str:
    """The line `license: ...` of the model card's head, if there is a card and it has one."""
    try:
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as card:
            if card.readline().strip() != "---":
                return ""
            for _, line in zip(range(200), card, strict=False):
                key, _, value = line.partition(":")
                if key == "license":
                    return value.strip().strip("\"'")
                if line.strip() == "---":
                    return ""
    except OSError:
        pass
    return ""


def _sampling(generation: dict[str, Any]) -> dict[str, Value]:
    keys = {}
    for field, (key, kind) in _SAMPLING.items():
        value: Any = generation.get(field)
        wanted = (int,) if kind == Kind.I32 else (int, float)
        if type(value) in wanted and math.isfinite(value) and 0 <= value < 1 << 31:
            keys[f"general.sampling.{key}"] = Value.number(kind, value)
    return keys
