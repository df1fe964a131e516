"""What a file says of rotation: base, part of a head, and how it is stretched for contexts beyond the training's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize.architecture.base import Rope
from edgert.quantize.gguf_file import Model

if TYPE_CHECKING:
    from edgert.quantize.architecture.common import Keys

KINDS = ("none", "linear", "yarn", "longrope")
FACTORS = "rope_freqs.weight"  # of llama-3 scaling
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
TENSORS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)


def read_rope(keys: Keys, style: Literal["norm", "neox"], base: float, head_dim: int) -> Rope:
    """The rotation of a model's layers.

    Raises: UnsupportedFormatError for kinds of scaling that edgert does not know; ModelFileError for bad values.
    Source: YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753; transformers' modeling_rope_utils.py.
    """
    file = keys.file
    n_dims = keys.integer("rope.dimension_count", default=head_dim)
    if n_dims % 2 or n_dims > head_dim:
        raise UnsupportedFormatError(
            f"{file.path}: {keys.name('rope.dimension_count')} is {n_dims} and a head has {head_dim} elements; "
            "edgert rotates an even part of them."
        )
    kind = file.get(keys.name("rope.scaling.type"), str, "linear")
    if kind not in KINDS:
        raise UnsupportedFormatError(
            f"{file.path}: {keys.name('rope.scaling.type')} is {kind!r}; edgert runs {', '.join(KINDS)} "
            "and the factors of rope_freqs.weight."
        )
    magnitude = keys.number("rope.scaling.attn_factor", default=1.0)
    old_key = "rope.scale_linear"  # the name before 2023-11
    key = "rope.scaling.factor" if keys.raw(old_key) is None else old_key
    factor = keys.number(key) if keys.raw(key) else 1.0  # 0 means none, as llama.cpp reads it
    rope = Rope(n_dims, base, style, factors=_tensor(file, FACTORS, n_dims), magnitude=magnitude)
    if kind == "none":
        return rope
    if kind == "yarn":
        return _yarn(keys, rope, factor)
    long, short = (_tensor(file, name, n_dims) for name in (LONG_FACTORS, SHORT_FACTORS))
    if kind == "longrope":
        for name in (LONG_FACTORS, SHORT_FACTORS):
            file.tensor(name)
    if long is None or short is None:
        return replace(rope, scale=1 / factor)
    return replace(rope, scale=1 / factor, factors=short, long_factors=long, n_ctx_original=original_context(keys))


def original_context(keys: Keys) -> int:
    """Positions that the model was trained on before its context was stretched."""
    return keys.integer("rope.scaling.original_context_length", default=keys.integer("context_length"))


def _yarn(keys: Keys, rope: Rope, factor: float) -> Rope:
    """Long waves are stretched by the factor, short ones are not, with a ramp between."""
    extrapolation = keys.file.get(keys.name("rope.scaling.yarn_ext_factor"), float, -1.0)
    mix = 1.0 if extrapolation < 0 else extrapolation
    n_ctx, n = original_context(keys), rope.n_dims

    def dimension(turns: float) -> float:
        """Which wave turns so often in the original context."""
        return n * math.log(n_ctx / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low = max(0, math.floor(dimension(keys.number("rope.scaling.yarn_beta_fast", default=32.0))))
    high = min(n - 1, math.ceil(dimension(keys.number("rope.scaling.yarn_beta_slow", default=1.0))))
    ramp = np.clip((np.arange(n // 2) - low) / max(0.001, high - low), 0, 1)
    kept = (1 - ramp) * mix
    stretched: NDArray[np.float64] = 1 / (kept + (1 - kept) / factor)
    magnitude = rope.magnitude * _yarn_magnitude(keys, factor)
    own = 1.0 if rope.factors is None else np.asarray(rope.factors)
    return replace(rope, factors=tuple((stretched * own).tolist()), magnitude=magnitude)


def _yarn_magnitude(keys: Keys, factor: float) -> float:
    """As transformers' attention_factor; llama.cpp derives the same."""
    if keys.raw("rope.scaling.yarn_attn_factor") is not None:
        return keys.number("rope.scaling.yarn_attn_factor")

    def growth(share: float) -> float:
        return 1 + 0.1 * share * math.log(max(1.0, factor))

    return growth(1.0) / growth(keys.number("rope.scaling.yarn_log_multiplier", default=0.0))


def _tensor(file: Model[Any], name: str, n_dims: int) -> tuple[float, ...] | None:
    """Divisors of the frequencies, or None where the file has none."""
    if name not in file.tensors:
        return None
    tensor = file.tensors[name]
    if tensor.shape != (n_dims // 2,):
        raise ModelFileError(
            f"{file.path}: the tensor {name!r} has the shape {tensor.shape} and should have {(n_dims // 2,)} by the "
            "metadata; convert the model anew."
        )
    factors = tensor.dequantize()
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFileError(f"{file.path}: {name} holds factors that are not positive numbers.")
    return tuple(factors.tolist())
