"""How much memory the cpu backend takes for a model: the one estimate behind `show`, `plan` and the check at load.

Measured against: the peak of a process that fills the context, by `tests/bench/plan.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import prod
from typing import Any

from edgert.backends.cpu.cache import cache_bytes, cache_type, kept_by_layers
from edgert.backends.cpu.layouts import BLOCK, CACHE_TYPES, CODEC_OF, CODECS, TILE_TOKENS, WINDOW
from edgert.devices import fitting
from edgert.errors import DoesNotFitError
from edgert.quantize.architecture import Architecture, Experts, describe, is_matrix
from edgert.quantize.gguf_file import Model

N_BATCH = 512  # tokens of one prefill step
LANES = 16  # rows of a panel; with 8 the padding is less

# Python with Numba's compiler and the tokenizer: resident memory of a loaded model less its weights, cache and
# buffers. Measured on x86-64 Linux with vocabularies of 49,152 and of 262,144 tokens: 77 MB and 105 MB.
PROGRAM = 71_000_000
PROGRAM_PER_TOKEN = 128


@dataclass(frozen=True)
class Footprint:
    """Bytes.

    weights:  packed for the kernels
    kv:       keys and values of every layer: of all positions, or of those that a window keeps
    buffers:  activations of one prefill step, and the logits of one token
    program:  what runs the model
    """

    weights: int
    kv: int
    kv_per_token: int
    buffers: int
    program: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.buffers + self.program


def footprint(
    file: Model[Any],
    a: Architecture,
    n_ctx: int,
    *,
    n_full: float = 1,
    types: tuple[str | None, str | None] = (None, None),
    weights_as: str | None = None,
    with_program: bool = True,
) -> Footprint:
    """What a model takes with n_full contexts full of tokens.

    types:       of cached keys and values; None: the backend's choice
    weights_as:  the float type that holds all matrices; None: the file's own types

    Raises: RequestError for a type of cache that is not there.
    """
    type_k, type_v = (cache_type(side, name, a.head_dim) for side, name in zip("kv", types, strict=True))
    kv, per_token = cache_bytes(kept_by_layers(a), n_ctx, N_BATCH, type_k, type_v)
    program = PROGRAM + PROGRAM_PER_TOKEN * a.n_vocab if with_program else 0
    return Footprint(_weights(file, a, weights_as), round(kv * n_full), per_token, _buffers(a, n_ctx), program)


def _weights(file: Model[Any], a: Architecture, weights_as: str | None) -> int:
    """Bytes of the matrices in panels, and of the vectors."""
    total = 0
    for name, shape in a.tensors().items():
        if not is_matrix(name, shape):
            total += 4 * prod(shape)
            continue
        codec = weights_as or CODEC_OF.get(file.tensor(name).format.name)
        if codec:
            total += -(-prod(shape[:-1]) // LANES) * CODECS[codec].panel_bytes(shape[-1], LANES)
        else:  # what the backend will refuse
            total += file.tensor(name).n_bytes
    return total


def _buffers(a: Architecture, n_ctx: int) -> int:
    n_attn = a.n_head * a.head_dim
    most = max(a.n_embd, a.n_ff, n_attn)
    mixed = max((a.n_head + 2 * a.n_head_kv) * a.head_dim, *(3 * a.n_embd * (layer.n_taps > 0) for layer in a.layers))
    floats = a.n_embd * (1 + a.post_norm) + mixed + n_attn + a.n_ff + (a.n_layer + 1) * a.n_embd_per_layer
    # Prepared rows: int8 with their words, bf16 tiles, and the gated product's tiles.
    row = 4 * floats + most * 7 // 2 + 2 * a.n_ff
    rows = min(N_BATCH, -(-n_ctx // WINDOW) * WINDOW)
    return rows * row + max(_slots(a, layer.experts, rows) for layer in a.layers) + 9 * 4 * a.n_vocab


def _slots(a: Architecture, experts: Experts | None, rows: int) -> int:
    """Rows once for each of their experts, as a step of so many rows spreads them: bf16 tiles, the gated ones' too."""
    if experts is None:
        return 0
    slots = rows * experts.n_used + (TILE_TOKENS - 1) * min(experts.n_expert, rows * experts.n_used)
    return 4 * rows * a.n_embd + slots * 2 * (max(a.n_embd, experts.n_ff) + experts.n_ff)


def check_fit(
    file: Model[Any],
    a: Architecture,
    n_positions: int,
    n_ctx: int,
    types: tuple[str, str],
    weights_as: str | None,
    available: int,
) -> None:
    """Refuses a cache that could not be filled, before any work.

    n_positions:  that all sequences together may have

    Raises: DoesNotFitError that says what is missing, and the nearest remedy.
    """

    def needed(n: int, kinds: tuple[str, str] = types) -> int:
        found = footprint(
            file, a, n, n_full=n_positions / n_ctx, types=kinds, weights_as=weights_as, with_program=False
        )
        return found.total

    if needed(n_ctx) <= available:
        return
    what = f"{file.path} with {n_positions} cached positions {fitting.missing(needed(n_ctx), available)}"
    smaller = {name: functools.partial(needed, kinds=(name, name)) for name in smaller_types(a, types)}
    raise DoesNotFitError(f"{what}; {fitting.remedy(needed, smaller, n_ctx, available)}.")


def smaller_types(a: Architecture, types: tuple[str | None, str | None]) -> list[str]:
    """Types of cache that take less than these, the mildest first."""
    if a.head_dim % BLOCK:
        return []
    bits = min(CACHE_TYPES[cache_type(side, name, a.head_dim)].bits for side, name in zip("kv", types, strict=True))
    return [name for name, kind in CACHE_TYPES.items() if kind.bits < bits]


def draft_bytes(draft: Model[Any], n_ctx: int, n_full: float = 1) -> int:
    """What a draft adds to its model's footprint: weights, cache and buffers; the program is there already."""
    a = describe(draft)
    return footprint(draft, a, min(n_ctx, a.n_ctx_train), n_full=n_full, with_program=False).total
