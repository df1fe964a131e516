"""Tiny random checkpoints of families that transformers has no class for, each beside a relative that computes it.

The relative is a model of transformers; its weights are written as the family's own files have them, by rules that
are said here anew, not by the converter's: names, products of q, k and v in one, heads that are divided on use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_configs import EXPERTS, ROPE
from checkpoints import make_model, write_tokenizer

Weights = dict[str, np.ndarray]
_LLAMA_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
               "vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")  # fmt: skip


@dataclass(frozen=True)
class Relative:
    """A family's difference from a model that transformers has.

    base:     of CONFIGS or MIXTURES
    options:  values of the base's config
    config:   what config.json has beside the sizes that it shares with llama's; a value replaces one
    names:    patterns of the base's names -> the family's
    changed:  what the weights become, by the base's names, before they are named; it may change the base model's
    """

    base: str
    config: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    changed: Callable[[Weights, Any], Weights] | None = None


def _together(weights: Weights, name: str, *, groups: int = 0) -> Weights:
    """q, k and v of each layer in one tensor: one below the other, or of each of so many groups q's, k's and v's."""
    found: Weights = {}
    for key, value in weights.items():
        match = re.fullmatch(r"(.*\.self_attn\.)([qkv])_proj\.(weight|bias)", key)
        if not match:
            found[key] = value
        elif match[2] == "q":
            parts = [weights[f"{match[1]}{part}_proj.{match[3]}"] for part in "qkv"]
            split = [np.split(part, groups or 1) for part in parts]
            found[f"{match[1]}{name}.{match[3]}"] = np.concatenate(
                [x for group in zip(*split, strict=True) for x in group]
            )
    return found


def _divided_on_use(model: Any, axis: int) -> np.ndarray:
    """The base gets a head whose rows or columns have the length 1; the checkpoint one whose have others."""
    import torch

    head = model.lm_head.weight.detach().double()
    normed = (head / head.norm(dim=axis, keepdim=True)).numpy()
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.from_numpy(normed))
    lengths = np.random.default_rng(4).uniform(0.5, 3.0, (len(head), 1) if axis else (1, head.shape[1]))
    return (normed * lengths).astype(np.float32)


def _of_qwen2moe(weights: Weights, model: Any) -> Weights:
    """Qwen's shared expert has a gate, which these lack: closed half, so that theirs is half of it."""
    import torch

    found: Weights = {}
    for key, value in weights.items():
        if key.endswith("shared_expert_gate.weight"):
            with torch.no_grad():
                model.get_parameter(key).zero_()
        elif key.endswith("shared_expert.down_proj.weight"):
            found[key] = value / 2
        else:
            found[key] = value
    return found


_SHARED = {"mlp.shared_expert.": "mlp.shared_experts."}
_MIXTURE = {
    **EXPERTS,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
    "qkv_bias": False,
    "mlp_only_layers": [0],
}
RELATIVES: dict[str, Relative] = {
    "internlm2": Relative(
        "llama",
        {"architectures": ["InternLM2ForCausalLM"], "bias": False, "rope_theta": 10_000.0,
         "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        names={
            "embed_tokens": "tok_embeddings",
            "self_attn.o_proj": "attention.wo",
            "self_attn.wqkv": "attention.wqkv",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "lm_head": "output",
        },
        changed=lambda weights, _: _together(weights, "wqkv", groups=2),
    ),
    "baichuan": Relative(
        "llama",
        {"architectures": ["BaiChuanForCausalLM"], "num_key_value_heads": None},
        options={"num_key_value_heads": 6, "num_hidden_layers": 32},  # the one without slopes is known by its layers
        changed=lambda weights, _: _together(weights, "W_pack"),
    ),
    "exaone": Relative(
        "llama-3",
        {"architectures": ["ExaoneForCausalLM"], "rms_norm_eps": None, "layer_norm_epsilon": 1e-5, "num_layers": 3,
         "num_hidden_layers": None, "activation_function": "silu"},
        names={
            "model.embed_tokens": "transformer.wte",
            "model.norm": "transformer.ln_f",
            "model.layers": "transformer.h",
            "self_attn.o_proj": "attn.attention.out_proj",
            "self_attn": "attn.attention",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "mlp.gate_proj": "mlp.c_fc_0",
            "mlp.up_proj": "mlp.c_fc_1",
            "mlp.down_proj": "mlp.c_proj",
        },
    ),
    "minicpm": Relative(
        "granite",
        {"architectures": ["MiniCPMForCausalLM"], "scale_emb": 3.0, "scale_depth": 0.7, "dim_model_base": 60},
        options={"embedding_multiplier": 3.0, "residual_multiplier": 0.7 / 3**0.5, "logits_scaling": 96 / 60,
                 "attention_multiplier": 16**-0.5, "attention_bias": False, "mlp_bias": False},
    ),
    "orion": Relative(
        "stablelm",
        {"architectures": ["OrionForCausalLM"]},
        options={"use_qkv_bias": False, "layer_norm_eps": 1e-5,
                 "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
    ),
    "xverse": Relative("llama", {"architectures": ["XverseForCausalLM"]}),
    "deepseek": Relative(
        "qwen2moe",
        {"architectures": ["DeepseekForCausalLM"], "n_routed_experts": 6, "n_shared_experts": 2,
         "num_experts_per_tok": 2, "moe_intermediate_size": 96, "first_k_dense_replace": 1, "moe_layer_freq": 1,
         "norm_topk_prob": False, "scoring_func": "softmax"},
        options={**_MIXTURE, "shared_expert_intermediate_size": 192},
        names=_SHARED,
        changed=_of_qwen2moe,
    ),
    "bailingmoe": Relative(
        "qwen2moe",
        {"architectures": ["BailingMoeForCausalLM"], "num_experts": 6, "num_shared_experts": 1,
         "num_experts_per_tok": 2, "moe_intermediate_size": 96, "first_k_dense_replace": 0, "norm_topk_prob": True,
         "use_bias": False, "use_qkv_bias": False, "norm_head": False},
        options={**_MIXTURE, "norm_topk_prob": True, "mlp_only_layers": []},
        names={
            **_SHARED,
            "embed_tokens": "word_embeddings",
            "self_attn.query_key_value": "attention.query_key_value",
            "self_attn.o_proj": "attention.dense",
        },
        changed=lambda weights, model: _together(_of_qwen2moe(weights, model), "query_key_value"),
    ),
}  # fmt: skip


def write_relative(
    folder: Path, name: str, *, base: Mapping[str, Any] | None = None, head_axis: int | None = None, **config: Any
) -> Any:
    """Writes a checkpoint of RELATIVES, and returns the model of transformers that computes the same.

    base:       further values of the base's config
    head_axis:  the head is divided on use by the lengths of its columns (0) or rows (1)
    config:     further values of config.json
    """
    from safetensors.numpy import save_file

    relative = RELATIVES[name]
    model = make_model(relative.base, **{**relative.options, **(base or {})})
    weights = {key: value.numpy().copy() for key, value in model.state_dict().items()}
    if relative.changed:
        weights = relative.changed(weights, model)
    if head_axis is not None:
        weights["lm_head.weight"] = _divided_on_use(model, head_axis)
    named = {_named(key, relative.names): np.ascontiguousarray(value) for key, value in _apart(weights).items()}
    found = model.config.to_dict()
    shared = {key: found[key] for key in _LLAMA_KEYS if key in found}
    rope = found["rope_parameters"]
    document = {**shared, "rope_theta": rope["rope_theta"], "hidden_act": "silu"}
    if rope["rope_type"] != "default":
        document["rope_scaling"] = {**rope, "type": rope["rope_type"]}
    if "layer_norm_eps" in found:
        document["rms_norm_eps"] = found["layer_norm_eps"]
    document = {key: value for key, value in {**document, **relative.config, **config}.items() if value is not None}
    folder.mkdir(exist_ok=True)
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(document))
    write_tokenizer(folder, "qwen2")
    return model


def _named(key: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if old in key:
            key = key.replace(old, new)
    return key


def _apart(weights: Weights) -> Weights:
    """Experts one by one, which transformers' models hold as stacks."""
    found: Weights = {}
    for key, value in weights.items():
        match = re.fullmatch(r"(.*\.experts\.)(gate_up|down)_proj", key)
        if not match:
            found[key] = value
            continue
        for number, expert in enumerate(value):
            halves = np.split(expert, 2) if match[2] == "gate_up" else [expert]
            for part, own in zip(match[2].split("_"), halves, strict=True):
                found[f"{match[1]}{number}.{part}_proj.weight"] = own
    return found
