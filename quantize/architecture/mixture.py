"""Mixtures of experts as GGUF has them: the keys that give their sizes, and the tensors of a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from edgert.errors import UnsupportedFormatError
from edgert.quantize.architecture.base import Experts, Shapes

if TYPE_CHECKING:
    from edgert.quantize.architecture.common import Keys

GATINGS: dict[int, Literal["softmax", "sigmoid", "chosen"]] = {
    1: "softmax",
    2: "sigmoid",
    3: "chosen",
}  # expert_gating_func


def read(keys: Keys, habits: Experts | None) -> Experts | None:
    """The experts of a file, None where it has none.

    habits:  how the family's experts are chosen when the file does not say; None: the family has none

    Raises: UnsupportedFormatError, ModelFileError.
    """
    n_expert = keys.integer("expert_count", default=0, least=0)
    if not n_expert:
        return None
    if habits is None:
        raise UnsupportedFormatError(
            f"{keys.file.path} is a mixture of experts, which edgert does not run in {keys.family} models."
        )
    n_used = keys.integer("expert_used_count")
    if n_used > n_expert:
        raise keys.error("expert_used_count", f"is {n_used}, more than expert_count = {n_expert}")
    if keys.integer("expert_group_count", default=1) > 1:
        raise UnsupportedFormatError(f"{keys.file.path} chooses experts by groups, which edgert does not run.")
    gating = keys.integer("expert_gating_func", default=0, least=0)
    if gating and gating not in GATINGS:
        raise UnsupportedFormatError(
            f"{keys.file.path}: {keys.name('expert_gating_func')} is {gating}; edgert runs "
            f"{', '.join(f'{number} ({name})' for number, name in GATINGS.items())}."
        )
    width = None if keys.raw("expert_feed_forward_length") is None else keys.integer("expert_feed_forward_length")
    return replace(
        habits,
        n_expert=n_expert,
        n_used=n_used,
        n_ff=width or keys.integer("feed_forward_length"),
        gating=GATINGS[gating] if gating else habits.gating,
        norm=keys.file.get(keys.name("expert_weights_norm"), bool, habits.norm),
        scale=keys.number("expert_weights_scale", default=0.0) or habits.scale,
    )


def of_layers(keys: Keys, n_layer: int, experts: Experts | None) -> list[Experts | None]:
    """Which layers are mixtures: not the leading dense ones, and of the others one of so many."""
    leading = keys.integer("leading_dense_block_count", default=0, least=0)
    step = keys.integer("interleave_moe_layer_step", default=1)
    return [experts if i >= leading and (i + 1) % step == 0 else None for i in range(n_layer)]


def shared_width(keys: Keys, stored: Shapes) -> int:
    """n_ff of the expert that sees every token, or of all of these together; 0: there is none."""
    if "ffn_up_shexp.weight" not in stored:
        return 0
    return keys.integer("expert_shared_feed_forward_length", default=stored["ffn_up_shexp.weight"][0])


def tensors(n_embd: int, n_shared: int, experts: Experts, stored: Shapes) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer's router and experts, in the order of the computation.

    stored:  what some layer of the file has: optional tensors are asked for where they are there
    """
    n, n_ff = experts.n_expert, experts.n_ff
    shapes: dict[str, tuple[int, ...]] = {"ffn_gate_inp": (n, n_embd)}
    if "ffn_gate_up_exps.weight" in stored:
        shapes["ffn_gate_up_exps"] = (n, 2 * n_ff, n_embd)
    else:
        shapes |= {"ffn_gate_exps": (n, n_ff, n_embd), "ffn_up_exps": (n, n_ff, n_embd)}
    shapes["ffn_down_exps"] = (n, n_embd, n_ff)
    if n_shared:
        if "ffn_gate_inp_shexp.weight" in stored:
            shapes["ffn_gate_inp_shexp"] = (n_embd,)
        shapes |= {"ffn_gate_shexp": (n_shared, n_embd), "ffn_up_shexp": (n_shared, n_embd)}
        shapes["ffn_down_shexp"] = (n_embd, n_shared)
    return shapes
