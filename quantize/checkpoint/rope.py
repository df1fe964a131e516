"""Rotary scaling of a checkpoint as GGUF stores it: keys of the metadata, or factors of the frequencies.

Source: transformers' modeling_rope_utils.py (meaning of config.json's fields), llama.cpp's keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize.architecture.rope import FACTORS, LONG_FACTORS, SHORT_FACTORS
from edgert.quantize.checkpoint.config import Config
from edgert.quantize.checkpoint.families.family import Family
from edgert.quantize.gguf_value import Value


@dataclass(frozen=True)
class RopeScaling:
    """What GGUF says of rotation.

    keys:     `<family>.` is to be put before each
    tensors:  float32 (n_dims / 2,) factors of the frequencies, by GGUF's name
    n_dims:   of a head, that are rotated
    notices:  sentences that the user should read
    """

    keys: dict[str, Value]
    tensors: dict[str, NDArray[np.float32]]
    n_dims: int
    notices: tuple[str, ...] = ()


def read_rope(config: Config, family: Family, head_dim: int) -> RopeScaling:
    """Reads both spellings: rope_theta and rope_scaling, or rope_parameters.

    Raises: UnsupportedFormatError for kinds that GGUF or the family's runtime has no keys for.
    """
    if "position_embd.weight" in family.outer_names.values():
        return RopeScaling({}, {}, 0)
    fields, local = _fields(config)
    base = _number(config, fields, "rope_theta", config.number("rope_theta", 10_000.0))
    if "alpha" in family.scalings and _kind(fields) == "dynamic" and fields.get("alpha"):
        alpha = _number(config, fields, "alpha")
        if not (head_dim > 2 and alpha < 1e6):
            raise ModelFileError(f"{config.path}: 'alpha' of the rope scaling is {alpha:g}, too large for a factor.")
        base *= alpha ** (head_dim / (head_dim - 2))
        fields = {}
    keys = {"rope.freq_base": Value.f32(base)}
    if local is not None:
        own = _number(config, local, "rope_theta", 10_000.0)
        if family.name == "gemma3" or own != base:
            keys["rope.freq_base_swa"] = Value.f32(own)
        if _kind(local) != "default":
            raise UnsupportedFormatError(
                f"{config.path} scales the rotation of sliding windows, which GGUF cannot say."
            )
    if _kind(fields) == "proportional" and "proportional" in family.scalings:
        return RopeScaling(keys, {FACTORS: _proportional(config, fields, head_dim)}, head_dim)
    share = config.get("partial_rotary_factor", fields.get("partial_rotary_factor", family.partial or 1.0))
    if share != 1.0 and family.partial is None:
        raise UnsupportedFormatError(f"{config.path} rotates a part of each head (partial_rotary_factor).")
    n_dims = int(head_dim * share)
    if family.partial is not None:
        keys["rope.dimension_count"] = Value.u32(n_dims)
    kind = _kind(fields)
    if "mrope" in family.scalings:
        keys["rope.dimension_sections"] = _sections(config, fields, n_dims)
        kind = "default" if kind == "mrope" else kind
    if kind == "default":
        return RopeScaling(keys, {}, n_dims)
    if kind == "dynamic" and kind in family.scalings:
        n_ctx = config.integer("max_position_embeddings")
        notice = f"beyond {n_ctx:,} tokens the checkpoint stretches its rotation as it goes, which GGUF cannot say"
        return RopeScaling(keys, {}, n_dims, (notice,))
    if kind in ("longrope", "su") and kind in family.scalings:
        more, tensors = _longrope(config, fields, n_dims)
        return RopeScaling(keys | more, tensors, n_dims)
    factor = _number(config, fields, "factor")
    if kind == "linear":
        scaling = {"rope.scaling.type": Value.string("linear"), "rope.scaling.factor": Value.f32(factor)}
        return RopeScaling(keys | scaling, {}, n_dims)
    if kind == "llama3" and kind in family.scalings:
        return RopeScaling(keys, {FACTORS: _llama3(config, fields, base, factor, n_dims)}, n_dims)
    if kind == "yarn":
        return RopeScaling(keys | _yarn(config, fields, factor), {}, n_dims)
    raise UnsupportedFormatError(
        f"{config.path} scales its rotation by {kind!r}; edgert converts {family.name} with "
        f"{', '.join(('linear', 'yarn', *family.scalings))}."
    )


def _sections(config: Config, fields: dict[str, Any], n_dims: int) -> Value:
    """How many pairs of a head follow time, height and width (of text all the same)."""
    sections = fields.get("mrope_section")
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or not all(type(n) is int and n >= 0 for n in sections)
        or sum(sections) != n_dims // 2
    ):
        raise config.error("mrope_section", sections, f"three integers whose sum is {n_dims // 2}")
    return Value.array(np.array([*sections, 0], np.int32))


def _proportional(config: Config, fields: dict[str, Any], head_dim: int) -> NDArray[np.float32]:
    """Of the frequencies of a whole head only the first ones turn; the others are divided by so much that none does."""
    n_turned = int(head_dim * _number(config, fields, "partial_rotary_factor", 1.0) / 2)
    return np.where(np.arange(head_dim // 2) < n_turned, 1, 1e30).astype(np.float32)


def _longrope(
    config: Config, fields: dict[str, Any], n_dims: int
) -> tuple[dict[str, Value], dict[str, NDArray[np.float32]]]:
    """Factors for contexts up to the original length, and for longer ones."""
    context, original = config.integer("max_position_embeddings"), _original(config, fields)
    scale = context / original
    magnitude = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    if fields.get("attention_factor") is not None:
        magnitude = _number(config, fields, "attention_factor")
    tensors = {}
    for name, key in ((LONG_FACTORS, "long_factor"), (SHORT_FACTORS, "short_factor")):
        factors = fields.get(key)
        factors = factors if isinstance(factors, list) else []
        if len(factors) != n_dims // 2 or not all(type(value) in (int, float) and value > 0 for value in factors):
            raise ModelFileError(
                f"{config.path}: {key!r} of the rope scaling should be {n_dims // 2} positive numbers."
            )
        tensors[name] = np.asarray(factors, np.float32)
    keys = {
        "rope.scaling.type": Value.string("longrope"),
        "rope.scaling.original_context_length": Value.u32(original),
        "rope.scaling.attn_factor": Value.f32(magnitude),
    }
    return keys, tensors


def _original(config: Config, fields: dict[str, Any]) -> int:
    """Positions of the training before the context was stretched."""
    context = fields.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return context if type(context) is int and context > 0 else config.integer("max_position_embeddings")


def _fields(config: Config) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The fields for layers that see the whole text, and those for layers with a window where they differ."""
    fields = config.get("rope_parameters", config.get("rope_scaling", {}))
    if not isinstance(fields, dict):
        raise config.error("rope_scaling", fields, "an object")
    if "full_attention" in fields:
        local = fields.get("sliding_attention")
        return _object(config, fields["full_attention"]), None if local is None else _object(config, local)
    base = config.get("rope_local_base_freq")
    return fields, None if base is None else {"rope_theta": base}


def _object(config: Config, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise config.error("rope_parameters", value, "an object of objects")
    return value


def _kind(fields: dict[str, Any]) -> str:
    return str(fields.get("rope_type") or fields.get("type") or "default")


def _number(config: Config, fields: dict[str, Any], key: str, default: Any = None) -> float:
    value = fields.get(key)
    value = default if value is None else value
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise ModelFileError(
            f"{config.path}: {key!r} of the rope scaling is {value!r} and should be a positive number."
        )
    return float(value)


def _llama3(config: Config, fields: dict[str, Any], base: float, factor: float, head_dim: int) -> NDArray[np.float32]:
    """Divisors of the frequencies: 1 for short waves, `factor` for long ones, and a bend in between."""
    low = _number(config, fields, "low_freq_factor")
    high = _number(config, fields, "high_freq_factor")
    context = _number(config, fields, "original_max_position_embeddings")
    if not low < high:
        raise ModelFileError(f"{config.path}: low_freq_factor is {low} and must be below high_freq_factor = {high}.")
    wavelength = 2 * math.pi * base ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    share = np.clip((context / wavelength - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


def _yarn(config: Config, fields: dict[str, Any], factor: float) -> dict[str, Value]:
    keys = {
        "rope.scaling.type": Value.string("yarn"),
        "rope.scaling.factor": Value.f32(factor),
        "rope.scaling.original_context_length": Value.u32(_original(config, fields)),
    }
    for key, names in {
        "yarn_log_multiplier": ("mscale_all_dim",),
        "yarn_ext_factor": ("extrapolation_factor",),
        "yarn_attn_factor": ("attention_factor", "attn_factor"),
        "yarn_beta_fast": ("beta_fast",),
        "yarn_beta_slow": ("beta_slow",),
    }.items():
        for name in names:
            if fields.get(name) is not None:
                keys[f"rope.scaling.{key}"] = Value.f32(_number(config, fields, name))
                break
    return keys
