"""How each family's checkpoint differs from the others: names of tensors, norms, the order of rows, defaults.

Source: the models' config classes in transformers (defaults of absent keys); the tensor names of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgert.errors import UnsupportedFormatError
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


@dataclass(frozen=True)
class Family:
    """A family as its difference from the common names and habits.

    name:         general.architecture
    classes:      `architectures` of config.json that are stored this way
    renamed:      further or other entries of LAYER_NAMES
    rotated:      rotates (i, i + n/2) in the checkpoint and neighbours in GGUF, so rows of q and k change places
    norm_shift:   what GGUF's norms have more than the checkpoint's
    qkv_bias:     None: when the checkpoint has them
    activations:  values of hidden_act that mean the family's activation
    head_size:    head_dim when config.json lacks it; None: hidden_size / num_attention_heads
    llama_keys:   whether vocab_size and rope.dimension_count are written
    llama3_rope:  the runtime takes the factors of rope_freqs.weight for it
    """

    name: str
    classes: tuple[str, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)
    rotated: bool = False
    norm_shift: float = 0.0
    qkv_bias: bool | None = False
    qk_norm: bool = False
    post_norm: bool = False
    tied_head: bool = False
    activations: tuple[str, ...] = ("silu", "swish")
    head_size: int | None = None
    llama_keys: bool = False
    llama3_rope: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layer_names(self) -> dict[str, str]:
        return {**LAYER_NAMES, **self.renamed}


FAMILIES = (
    Family(
        "llama",
        ("LlamaForCausalLM", "MistralForCausalLM"),
        rotated=True,
        qkv_bias=None,
        llama_keys=True,
        llama3_rope=True,
    ),
    Family("qwen2", ("Qwen2ForCausalLM",), qkv_bias=True),
    Family("qwen3", ("Qwen3ForCausalLM",), qk_norm=True, head_size=128),
    Family(
        "gemma3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        renamed={
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "pre_feedforward_layernorm.weight": "ffn_norm.weight",
            "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
        },
        norm_shift=1.0,
        qk_norm=True,
        post_norm=True,
        tied_head=True,
        activations=("gelu_pytorch_tanh",),
        head_size=256,
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
        },
    ),
)


def find_family(config: Config) -> Family:
    """The family that config.json names. Raises: UnsupportedFormatError with the list of those that edgert converts."""
    named = config.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    for family in FAMILIES:
        if set(names) & set(family.classes):
            return family
    if not names:
        by_type = [family for family in FAMILIES if family.name == config.get("model_type")]
        if by_type or config.get("model_type") == "mistral":
            return by_type[0] if by_type else FAMILIES[0]
    what = ", ".join(names) or config.get("model_type") or "a model without `architectures`"
    known = ", ".join(name for family in FAMILIES for name in family.classes)
    raise UnsupportedFormatError(f"{config.path} describes {what}; edgert converts {known}.")
