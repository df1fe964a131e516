"""What a family's checkpoint may differ in: names of tensors and of settings, the order of rows, defaults."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from edgert.quantize.checkpoint.config import Config

# name in a layer of the checkpoint -> in a layer of the GGUF file
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
OUTER_NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
EXPERT = re.compile(r"experts\.(\d{1,5})\.")


@dataclass(frozen=True)
class Family:
    """A family as its difference from the common names and habits.

    name:         general.architecture
    classes:      `architectures` of config.json that are stored this way
    layer_names:  further or other entries of LAYER_NAMES
    outer_names:  further or other entries of OUTER_NAMES
    rotated:      rotates (i, i + n/2) in the checkpoint and neighbours in GGUF, so rows of q and k change places
    fused:        how the rows of its attn_qkv stand: "parts" all of q, all of k, all of v; "groups" of each head of k
                  the heads of q that go with it, then k and v
    apart:        GGUF has q, k and v of that product apart
    transposed:   matrices stand columns first
    expert_columns:  stacked experts stand columns first, in files of "either" kind as their shapes say
    in_turn:      of stacked experts the gate's rows and up's stand in turn
    quantized:    how its experts may be quantized in the checkpoint, which they then stay
    norm_shift:   what GGUF's norms have more than the checkpoint's
    tied_head:    the head is the embedding where config.json does not say
    activations:  values of hidden_act that mean the family's activation
    settings:     a common key of config.json -> the family's name of it
    eps:          config.json's key of the norms' epsilon; one that does not begin with "rms" is of layer norms
    numbers:      GGUF's key -> config.json's, of numbers that the family has besides
    counts:       GGUF's key -> config.json's, of integers
    demanded:     values of config.json that GGUF takes for granted
    windows:      of so many layers the last one sees the whole text, 1: none does, where config.json has a window
    partial:      the share of a head that is rotated where config.json does not say; None: always all of it
    head_size:    head_dim when config.json lacks it; None: hidden_size / num_attention_heads
    llama_keys:   whether vocab_size and rope.dimension_count are written
    encoder:      sees all of a text at once and writes none
    first_position:  row of the table of positions where a text begins
    scalings:     kinds of scaled rotation besides linear and yarn that the runtimes take for it
    defaults:     values of keys that config.json may lack
    derived:      values that follow from others in config.json
    """

    name: str
    classes: tuple[str, ...]
    layer_names: Mapping[str, str] = field(default_factory=dict)
    outer_names: Mapping[str, str] = field(default_factory=dict)
    rotated: bool = False
    fused: Literal["", "parts", "groups"] = ""
    apart: bool = False
    transposed: bool = False
    expert_columns: Literal["", "always", "either"] = ""
    in_turn: bool = False
    quantized: tuple[str, ...] = ()
    norm_shift: float = 0.0
    tied_head: bool = False
    activations: tuple[str, ...] = ("silu", "swish")
    settings: Mapping[str, str] = field(default_factory=dict)
    eps: str = "rms_norm_eps"
    numbers: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, str] = field(default_factory=dict)
    demanded: Mapping[str, Any] = field(default_factory=dict)
    windows: int = 0
    partial: float | None = None
    head_size: int | None = None
    llama_keys: bool = False
    scalings: tuple[str, ...] = ()
    encoder: bool = False
    first_position: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    derived: Callable[[Config], dict[str, Any]] | None = None

    def target(self, name: str, layer: int | None) -> str | None:
        """The GGUF name of what a checkpoint calls `name`, in a layer or outside; None where the family has none.

        Experts that stand apart have one name together.
        """
        if layer is None:
            return {**OUTER_NAMES, **self.outer_names}.get(name)
        found = {**LAYER_NAMES, **self.layer_names}.get(EXPERT.sub("experts.*.", name))
        return found and f"blk.{layer}.{found}"


def with_biases(names: Mapping[str, str]) -> dict[str, str]:
    """Names without their endings -> those of weights and of biases."""
    return {f"{old}.{end}": f"{new}.{end}" for old, new in names.items() for end in ("weight", "bias")}
