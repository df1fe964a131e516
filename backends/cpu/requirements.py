"""What the cpu backend's kernels take for granted of a model."""

from __future__ import annotations

from typing import Any

from edgert.backends.cpu.layouts import BLOCK
from edgert.errors import RequestError, UnsupportedFormatError
from edgert.quantize.architecture import Architecture
from edgert.quantize.gguf_file import Model


def check_runs(file: Model[Any], a: Architecture, n_ctx: int) -> None:
    """Refuses what the kernels cannot run.

    n_ctx:  positions that a sequence may have

    Raises: RequestError for a context beyond the model's table of positions; UnsupportedFormatError for sizes.
    """
    n_positions = a.outer.get("position_embd.weight", (n_ctx,))[0]
    if n_ctx > n_positions:
        raise RequestError("n_ctx", f"is {n_ctx}, and the model's table of positions ends after {n_positions}")
    reasons = []
    if a.head_dim % 16:
        reasons.append(f"heads of {a.head_dim} (not a multiple of 16)")
    if any(layer.head_dim % BLOCK for layer in a.layers if layer.head_dim != a.head_dim):
        reasons.append(f"smaller heads in some layers that are not multiples of {BLOCK}")
    sizes = sorted({a.n_embd, *(size for layer in a.layers for size in (layer.n_ff, layer.n_head * layer.head_dim))})
    sizes += [a.n_embd_per_layer] * (a.n_embd_per_layer > 0)
    sizes += sorted({layer.experts.n_ff for layer in a.layers if layer.experts})
    if any(size % BLOCK for size in sizes):
        reasons.append(f"sizes {', '.join(map(str, sizes))} that are not multiples of {BLOCK}")
    for layer in a.layers:
        row = layer.tensors.get("attn_k_norm.weight", (0,))[-1]
        if row > layer.head_dim and row % BLOCK:
            reasons.append(f"norms of {row} keys (not a multiple of {BLOCK})")
            break
    if reasons:
        raise UnsupportedFormatError(f"{file.path} needs {' and '.join(reasons)}, which the cpu backend lacks.")


def sees_shifts(a: Architecture) -> bool:
    """Whether adding the same to all scores of a query changes its attention."""
    return bool(a.attn_logit_softcapping) or any(layer.has("attn_sinks") for layer in a.layers)
