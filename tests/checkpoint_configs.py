"""Configurations of tiny transformers models: what each family's config.json says beside SIZES."""

from __future__ import annotations

from typing import Any

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 384,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA3 = {
    "head_dim": 32,
    "num_hidden_layers": 7,
    "sliding_window": 13,
    "query_pre_attn_scalar": 32,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": ROPE,
    },
}
# name -> class in transformers, what its config has besides SIZES
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"rope_parameters": ROPE}),
    "llama-head": ("LlamaForCausalLM", {"rope_parameters": ROPE, "head_dim": 32}),
    "llama-bias": ("LlamaForCausalLM", {"rope_parameters": ROPE, "head_dim": 32, "attention_bias": True}),
    "llama-linear": ("LlamaForCausalLM", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}),
    "llama-3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("MistralForCausalLM", {"rope_parameters": ROPE, "sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2ForCausalLM", {"rope_parameters": {**ROPE, "rope_theta": 1e6}}),
    "qwen3": ("Qwen3ForCausalLM", {"rope_parameters": {**ROPE, "rope_theta": 1e6}, "head_dim": 32}),
    "gemma3": ("Gemma3ForCausalLM", GEMMA3),
    "gemma3-linear": (
        "Gemma3ForCausalLM",
        {
            **GEMMA3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": ROPE,
            },
        },
    ),
}
GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 3],
    "sliding_window": 13,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": ROPE,
    },
}
NORMS = (
    "norm.weight",
    "layernorm.weight",
    "ln_1.weight",
    "ln_2.weight",
    "ln_f.weight",
    "ln_attn.weight",
    "ln_mlp.weight",
)
PARTIAL = {**ROPE, "partial_rotary_factor": 0.5}
HEADS = {"head_dim": 32}
NO_PAD = {"pad_token_id": 0}
WIDE = {"hidden_size": 192}  # as six heads of 32: llama.cpp takes it for granted for some families
TIED = (
    "gemma",
    "gemma2",
    "gemma4",
    "gemma4-shared",
    "command-r",
    "command-r-plus",
    "cohere2",
)  # llama.cpp knows no head of their own
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG_ROPE = {
    **ROPE,
    "rope_type": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [1.0 + 0.5 * i for i in range(16)],
}
CONFIGS |= {
    "gemma": ("GemmaForCausalLM", {**HEADS, "rope_parameters": ROPE}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **HEADS,
            "num_hidden_layers": 4,
            "sliding_window": 13,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "rope_parameters": ROPE,
        },
    ),
    "phi2": ("PhiForCausalLM", {**WIDE, "rope_parameters": PARTIAL, "hidden_act": "gelu_new"}),
    "phi3": ("Phi3ForCausalLM", {**NO_PAD, **WIDE, "rope_parameters": ROPE, "sliding_window": 13}),
    "phi3-long": ("Phi3ForCausalLM", {**NO_PAD, **WIDE, "rope_parameters": LONG_ROPE}),
    "smollm3": ("SmolLM3ForCausalLM", {**NO_PAD, **HEADS, "num_hidden_layers": 5, "rope_parameters": ROPE}),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 0.5,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": ROPE,
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", {**WIDE, "rope_parameters": ROPE}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {
            **WIDE,
            "num_hidden_layers": 5,
            "sliding_window": 13,
            "rope_parameters": {"sliding_attention": ROPE, "full_attention": YARN},
        },
    ),
    "stablelm": ("StableLmForCausalLM", {**WIDE, "use_qkv_bias": True, "rope_parameters": PARTIAL}),
    "stablelm-parallel": (
        "StableLmForCausalLM",
        {**WIDE, "use_parallel_residual": True, "rope_parameters": PARTIAL},
    ),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        {**WIDE, "use_bias": True, "sliding_window": 13, "rope_parameters": ROPE},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 192, "n_head": 6, "n_layer": 3, "n_inner": 160},
    ),
    "starcoder": (
        "GPTBigCodeForCausalLM",
        {"n_embd": 192, "n_head": 6, "n_layer": 3, "n_inner": 160},
    ),
    "arcee": ("ArceeForCausalLM", {**WIDE, "hidden_act": "relu2", "rope_parameters": ROPE}),
    "gptneox": ("GPTNeoXForCausalLM", {**WIDE, "rope_parameters": PARTIAL}),
    "gptneox-serial": (
        "GPTNeoXForCausalLM",
        {**WIDE, "use_parallel_residual": False, "rope_parameters": PARTIAL},
    ),
    "falcon": (
        "FalconForCausalLM",
        {**WIDE, "multi_query": True, "new_decoder_architecture": False, "rope_parameters": ROPE,
         "ffn_hidden_size": 160},
    ),
    "falcon-40b": (
        "FalconForCausalLM",
        {**WIDE, "num_kv_heads": 2, "new_decoder_architecture": True, "rope_parameters": ROPE,
         "ffn_hidden_size": 160},
    ),
    "nemotron": ("NemotronForCausalLM", {**WIDE, **HEADS, "hidden_act": "relu2", "rope_parameters": PARTIAL}),
    "glm4": ("Glm4ForCausalLM", {**NO_PAD, **HEADS, "attention_bias": True, "rope_parameters": PARTIAL}),
    "command-r": ("CohereForCausalLM", {**WIDE, "logit_scale": 0.5, "rope_parameters": ROPE}),
    "command-r-plus": (
        "CohereForCausalLM",
        {**WIDE, "logit_scale": 0.5, "use_qk_norm": True, "rope_parameters": ROPE},
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        {**WIDE, **HEADS, "num_hidden_layers": 5, "logit_scale": 0.5, "sliding_window": 13, "rope_parameters": ROPE},
    ),
    "qwen2-yarn": ("Qwen2ForCausalLM", {"rope_parameters": YARN}),
    "exaone4": (
        "Exaone4ForCausalLM",
        {**WIDE, "sliding_window": None, "layer_types": ["full_attention"] * 3, "rope_parameters": LLAMA3_ROPE},
    ),
    "exaone4-windows": (
        "Exaone4ForCausalLM",
        {**WIDE, "num_hidden_layers": 5, "sliding_window": 13, "sliding_window_pattern": 4, "rope_parameters": ROPE},
    ),
    "seed-oss": ("SeedOssForCausalLM", {**HEADS, "rope_parameters": ROPE}),
    "ernie4.5": ("Ernie4_5ForCausalLM", {**HEADS, "rope_parameters": ROPE}),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", {**HEADS, "rope_parameters": ROPE}),
    "ministral3": (
        "Ministral3ForCausalLM",
        {
            **HEADS,
            "sliding_window": None,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {
            **WIDE,
            "num_hidden_layers": 5,
            "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
            "block_multiple_of": 32,
            "rope_parameters": ROPE,
        },
    ),
    "gemma4": ("Gemma4ForCausalLM", GEMMA4),
    "gemma4-shared": (
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 384,
            "use_double_wide_mlp": True,
            "attention_k_eq_v": False,
        },
    ),
    "glm": ("GlmForCausalLM", {**NO_PAD, **WIDE, **HEADS, "attention_bias": True, "rope_parameters": PARTIAL}),
}  # fmt: skip
EXPERTS = {**WIDE, "num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "rope_parameters": ROPE}
SMALL = {"intermediate_size": 96}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {**EXPERTS, **SMALL, **HEADS}),
    "qwen2moe": (
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 64},
    ),
    "qwen3moe": ("Qwen3MoeForCausalLM", {**EXPERTS, **HEADS, "moe_intermediate_size": 96, "norm_topk_prob": True}),
    "olmoe": ("OlmoeForCausalLM", {**EXPERTS, **SMALL, **NO_PAD, "eos_token_id": 0, "num_key_value_heads": 6}),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        {
            **EXPERTS,
            **SMALL,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 0.5,
        },
    ),
    "granitemoe-shared": (
        "GraniteMoeSharedForCausalLM",
        {**EXPERTS, **SMALL, "shared_intermediate_size": 64, "residual_multiplier": 0.3, "attention_multiplier": 0.2},
    ),
    "lfm2moe": (
        "Lfm2MoeForCausalLM",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 96,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            **EXPERTS,
            **SMALL,
            **HEADS,
            "num_hidden_layers": 4,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {**YARN, "truncate": True},
        },
    ),
    "glm4moe": (
        "Glm4MoeForCausalLM",
        {
            **EXPERTS,
            **HEADS,
            **NO_PAD,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "moe_intermediate_size": 96,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": PARTIAL,
        },
    ),
    "ernie4.5-moe": (
        "Ernie4_5_MoeForCausalLM",
        {
            **EXPERTS,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 96,
        },
    ),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", {**EXPERTS, **SMALL, **HEADS, "num_experts": 6, "moe_topk": 2}),
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "num_heads": 2,
    "patch_size": 4,
    "intermediate_size": 32,
    "out_hidden_size": 192,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
AXES = {**ROPE, "mrope_section": [6, 5, 5]}
SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2vl": ("Qwen2VLForConditionalGeneration", {**WIDE, "rope_parameters": AXES, "vision_config": VISION}),
    "qwen2.5vl": ("Qwen2_5_VLForConditionalGeneration", {**WIDE, "rope_parameters": AXES, "vision_config": VISION}),
    "qwen3vl": ("Qwen3VLForConditionalGeneration", {**HEADS, "rope_parameters": AXES, "vision_config": VISION}),
}
MIXTURES["qwen3vlmoe"] = (
    "Qwen3VLMoeForConditionalGeneration",
    {**EXPERTS, **HEADS, "moe_intermediate_size": 96, "rope_parameters": AXES, "vision_config": VISION},
)
