"""Settings of a family that follow from others in its config.json.

Source: the models' config classes in transformers.
"""

from __future__ import annotations

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
