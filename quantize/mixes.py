"""llama.cpp's named mixes of formats (Q4_K_M and the like), fall-backs included, so that sizes compare.

Source: llama.cpp's llama-quant.cpp, llama_tensor_get_type_impl and tensor_type_fallback.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from edgert.errors import RequestError
from edgert.quantize.formats import FLOATS, FORMATS, Format

# The type that a mix starts from.
MIXES: dict[str, str] = {
    name: name.removesuffix("_S").removesuffix("_M").removesuffix("_L")
    for name in (
        "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q2_K_S", "Q3_K_S", "Q3_K_M", "Q3_K_L",
        "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS",
    )
}  # fmt: skip
# Where rows are no multiple of 256.
_FALLBACKS = {
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL",
}  # fmt: skip


@dataclass(frozen=True)
class ModelFacts:
    """What the mixes depend on: layers, queries per key head, experts, importance weights, the tensor family."""

    n_layer: int
    n_gqa: int = 1
    n_expert: int = 0
    has_importance: bool = True
    is_70b: bool = False


_NEVER = ("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "token_types.weight", "shortconv.conv.weight")


def is_quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp would quantize the tensor: matrices, but for norms, routers, tables of positions and types."""
    return len(shape) > 1 and name.endswith("weight") and not name.endswith(_NEVER)


def mix(name: str, shapes: Mapping[str, tuple[int, ...]], facts: ModelFacts) -> dict[str, Format]:
    """The format of every tensor that is quantized, in any order of `shapes` (rows before columns).

    Raises: RequestError for a name that is no mix.
    """
    name = name.upper()
    if name not in MIXES:
        raise RequestError("type", f"{name!r} is none of {', '.join(MIXES)}")
    tied = "output.weight" not in shapes
    types: dict[str, Format] = {}
    n_values = 0
    for tensor in sorted((n for n in shapes if is_quantizable(n, shapes[n])), key=_layer_first):
        chosen = MIXES[name]
        if chosen not in FLOATS:
            chosen = _chosen(name, tensor, shapes[tensor][-1], facts, tied, n_values)
        n_values += _is_value(tensor)
        types[tensor] = fallback(FORMATS[chosen], shapes[tensor][-1])
    return types


def fallback(format: Format, n_cols: int) -> Format:
    """What llama.cpp takes where a format's blocks do not divide the rows."""
    if n_cols % format.block_size:
        format = FORMATS[_FALLBACKS.get(format.name, format.name)]
        if n_cols % format.block_size:
            return FORMATS["F16"]
    return format


def _layer_first(name: str) -> tuple[int, str]:
    found = re.match(r"blk\.(\d+)\.", name)
    return (int(found[1]) if found else -1, name)


def _is_value(name: str) -> bool:
    return any(part in name for part in ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight"))


def _chosen(mix: str, name: str, n_cols: int, facts: ModelFacts, tied: bool, i_value: int) -> str:
    base, n_layer, layer = MIXES[mix], facts.n_layer, _layer_first(name)[0]
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        if n_cols % FORMATS[base].block_size or base == "Q8_0":
            return "Q8_0"
        return "Q6_K"
    if _is_value(name):
        return _value(mix, base, facts, i_value)
    if "attn_k.weight" in name:
        return "Q8_0" if facts.n_expert == 8 else base
    if "ffn_down" in name:
        return _down(mix, base, layer, n_layer, facts.has_importance)
    if "attn_output.weight" in name:
        if facts.n_expert == 8:
            return "Q5_K" if mix in ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ4_XS") else base
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(mix, base)
    return base


def _more(layer: int, n_layer: int) -> bool:
    """Whether a layer is one of those that get more bits: the first and last eighth, and a third of the others."""
    return layer < n_layer // 8 or layer >= 7 * n_layer // 8 or (layer - n_layer // 8) % 3 == 2


def _value(mix: str, base: str, facts: ModelFacts, i_value: int) -> str:
    chosen, wide = base, facts.n_gqa >= 4
    if mix == "Q2_K":
        chosen = "Q4_K" if wide else "Q3_K"
    elif mix == "Q2_K_S" and wide:
        chosen = "Q4_K"
    elif mix == "Q3_K_M":
        chosen = "Q5_K" if i_value < 2 else "Q4_K"
    elif mix == "Q3_K_L" or (mix in ("IQ4_NL", "IQ4_XS") and wide) or (mix == "Q4_K_S" and i_value < 4):
        chosen = "Q5_K"
    elif mix in ("Q4_K_M", "Q5_K_M") and _more(i_value, facts.n_layer):
        chosen = "Q6_K"
    if facts.is_70b and chosen in ("Q3_K", "Q4_K"):
        chosen = "Q5_K"
    return "Q8_0" if facts.n_expert == 8 else chosen


def _down(mix: str, base: str, layer: int, n_layer: int, has_importance: bool) -> str:
    early = layer < n_layer // 8
    if mix == "Q2_K":
        return "Q3_K"
    if mix == "Q2_K_S" and early:
        return "Q4_K"
    if mix == "Q3_K_M":
        return "Q5_K" if layer < n_layer // 16 else "Q4_K"
    if mix == "Q3_K_L" or (mix == "Q4_K_S" and early):
        return "Q5_K"
    if mix in ("Q4_K_M", "Q5_K_M") and _more(layer, n_layer):
        return "Q6_K"
    if mix in ("IQ4_NL", "IQ4_XS") and early and not has_importance:
        return "Q5_K"
    if mix in ("Q4_0", "Q5_0") and early and has_importance:
        return {"Q4_0": "Q4_1", "Q5_0": "Q5_1"}[mix]
    return base
