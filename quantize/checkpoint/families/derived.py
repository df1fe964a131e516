"""Settings of a family that follow from others in its config.json.

Source: the models' config classes in transformers.
"""

from __future__ import annotations

import math
from typing import Any

from edgert.errors import UnsupportedFormatError
from edgert.quantize.checkpoint.config import Config


def of_gptneox(config: Config) -> dict[str, Any]:
    return {"num_key_value_heads": config.integer("num_attention_heads")}


def of_gpt2(config: Config) -> dict[str, Any]:
    return of_gptneox(config) | {"intermediate_size": config.get("n_inner", 4 * config.integer("hidden_size"))}


def of_starcoder(config: Config) -> dict[str, Any]:
    return of_gpt2(config) | {"num_key_value_heads": 1}


def of_falcon(config: Config) -> dict[str, Any]:
    n_head = config.get("num_attention_heads", config.get("n_head"))
    few = config.get("num_kv_heads", n_head) if config.get("new_decoder_architecture") else 1
    return {
        "num_key_value_heads": few if config.get("new_decoder_architecture") or config.get("multi_query") else n_head,
        "intermediate_size": config.get("ffn_hidden_size", 4 * config.integer("hidden_size")),
    }


def of_smollm3(config: Config) -> dict[str, Any]:
    rotated = config.get("no_rope_layers")
    if rotated is not None and rotated != [(i + 1) % 4 != 0 for i in range(len(rotated))]:
        raise UnsupportedFormatError(f"{config.path}: no_rope_layers are others than GGUF's smollm3 leaves unrotated.")
    return {}


def of_mistral3(config: Config) -> dict[str, Any]:
    fields = config.get("rope_parameters", {})
    scale = fields.get("llama_4_scaling_beta") if isinstance(fields, dict) else None
    return {} if scale is None else {"llama_4_scaling_beta": scale}


def of_gemma4(config: Config) -> dict[str, Any]:
    """Sizes of the layers that see the whole text, which differ from those of the others."""
    n_layer, n_ff = config.integer("num_hidden_layers"), config.integer("intermediate_size")
    kinds, changed = config.get("layer_types"), config.get("per_layer_config", {})
    if kinds is None:
        kinds = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(n_layer)]
    if not isinstance(kinds, list) or len(kinds) != n_layer:
        raise config.error("layer_types", kinds, f"{n_layer} times sliding_attention or full_attention")
    if not isinstance(changed, dict) or not all(isinstance(own, dict) for own in changed.values()):
        raise config.error("per_layer_config", changed, "an object of objects")
    wide = [changed[str(i)] for i in range(n_layer) if kinds[i] == "full_attention" and str(i) in changed]
    full: dict[str, Any] = wide[0] if wide else {}
    n_kv = config.integer("num_key_value_heads")
    n_full = config.integer("num_global_key_value_heads", full.get("num_key_value_heads", n_kv))
    if not config.get("attention_k_eq_v"):
        n_full = n_kv
    first = n_layer - config.integer("num_kv_shared_layers", 0, least=0)
    wider = 1 + bool(config.get("use_double_wide_mlp"))
    return {
        "head_dim": config.integer("global_head_dim", full.get("head_dim", 512)),
        "local_head_dim": config.integer("head_dim", 256),
        "feed_forward_lengths": [n_ff * (1 if i < first else wider) for i in range(n_layer)],
        "key_value_heads": [n_full if kind == "full_attention" else n_kv for kind in kinds],
    }


def of_nomic_bert(config: Config) -> dict[str, Any]:
    """Beyond the positions that it was trained on, its rotation would have to be stretched."""
    trained = config.get("max_trained_positions")
    return {} if trained is None else {"n_positions": min(config.integer("n_positions", trained), trained)}


def of_lfm2(config: Config) -> dict[str, Any]:
    """Its width follows from the one that config.json states."""
    width = config.integer("block_ff_dim", config.get("intermediate_size"))
    if config.get("block_auto_adjust_ff_dim", True):
        width = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        multiple = config.integer("block_multiple_of", 256)
        width = -(-width // multiple) * multiple
    return {"intermediate_size": width}


def of_baichuan(config: Config) -> dict[str, Any]:
    """Baichuan 2, which is known by its vocabulary, divides each row of its head by its length."""
    return {"head_lengths": "rows"} if config.get("vocab_size") == 125_696 else {}


def of_minicpm(config: Config) -> dict[str, Any]:
    n_layer = config.integer("num_hidden_layers")
    return {
        "embedding_scale": config.number("scale_emb", 1.0),
        "residual_scale": config.number("scale_depth", 1.0) / math.sqrt(n_layer),
        "logit_scale": config.integer("hidden_size") / config.number("dim_model_base", 1.0),
    }


def of_shared_experts(config: Config) -> dict[str, Any]:
    """Those that see every token are one, which is as wide as all of them."""
    n_shared = config.integer("num_shared_experts", 0, least=0)
    return {
        "num_shared_experts": n_shared,
        "shared_expert_intermediate_size": n_shared * config.integer("moe_intermediate_size") or None,
    }


def of_bailingmoe(config: Config) -> dict[str, Any]:
    return of_shared_experts(config) | ({"head_lengths": "columns"} if config.get("norm_head") else {})


def of_ernie4_5_moe(config: Config) -> dict[str, Any]:
    last = config.integer("num_hidden_layers") - 1
    if config.get("moe_layer_end_index", -1) not in (-1, last):
        raise UnsupportedFormatError(
            f"{config.path}: the last of its layers are dense (moe_layer_end_index), which GGUF cannot say."
        )
    return of_shared_experts(config)


def of_hunyuan_moe(config: Config) -> dict[str, Any]:
    """Its sizes may stand there for each layer."""
    found = {key: _of_all_layers(config, key) for key in ("num_experts", "moe_topk", "moe_intermediate_size")}
    n_shared = _of_all_layers(config, "num_shared_expert") or 1
    width = config.integer("intermediate_size")
    return found | {
        "moe_intermediate_size": found["moe_intermediate_size"] or width,
        "num_shared_experts": n_shared,
        "shared_expert_intermediate_size": n_shared * width,
    }


def _of_all_layers(config: Config, key: str) -> Any:
    """A number of which config.json has one, or one for each layer that are all alike."""
    value = config.get(key)
    if not isinstance(value, list):
        return value
    if len(set(map(str, value))) != 1:
        raise UnsupportedFormatError(f"{config.path}: {key} differs from layer to layer, which GGUF cannot say.")
    return value[0]


def of_qwen3vl(config: Config) -> dict[str, Any]:
    """How many layers would add what the part that sees pictures gives them."""
    vision = config.get("vision_config")
    found = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    return {"n_deepstack_layers": len(found) if isinstance(found, list) else 0}
