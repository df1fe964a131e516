"""Mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from edgert.quantize.checkpoint.families import derived
from edgert.quantize.checkpoint.families.dense import GRANITE, LFM2, LLAMA
from edgert.quantize.checkpoint.families.family import Family, with_biases
from edgert.quantize.checkpoint.families.names import (
    ALL_BIASES,
    DEEPSTACK,
    EXPERTS,
    N_EXPERT,
    OUTPUT_BIASES,
    shared,
)

EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}
N_ROUTED = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
LEADING_AND_SHARED = {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "num_shared_experts",
}

MIXTURES = (
    replace(
        LLAMA,
        classes=("MixtralForCausalLM",),
        layer_names={
            "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
            "block_sparse_moe.experts.*.w1.weight": "ffn_gate_exps.weight",
            "block_sparse_moe.experts.*.w3.weight": "ffn_up_exps.weight",
            "block_sparse_moe.experts.*.w2.weight": "ffn_down_exps.weight",
        },
        settings=N_EXPERT,
    ),
    Family(
        "qwen2moe",
        ("Qwen2MoeForCausalLM",),
        layer_names={
            **EXPERTS,
            **shared("shared_expert"),
            "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
        },
        demanded={"norm_topk_prob": False, **EVERY_LAYER},
    ),
    Family(
        "qwen3moe",
        ("Qwen3MoeForCausalLM",),
        layer_names=EXPERTS,
        settings=N_EXPERT,
        demanded={"norm_topk_prob": True, **EVERY_LAYER},
        head_size=128,
    ),
    Family("olmoe", ("OlmoeForCausalLM",), layer_names=EXPERTS, demanded={"norm_topk_prob": False, "clip_qkv": None}),
    replace(
        GRANITE,
        name="granitemoe",
        classes=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
        layer_names={
            "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight",
            "block_sparse_moe.input_linear.weight": "ffn_gate_up_exps.weight",
            "block_sparse_moe.output_linear.weight": "ffn_down_exps.weight",
            "shared_mlp.input_linear.weight": "ffn_gate_up_shexp.weight",
            "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
        },
        settings={**N_EXPERT, "shared_expert_intermediate_size": "shared_intermediate_size"},
    ),
    Family(
        "gpt-oss",
        ("GptOssForCausalLM",),
        layer_names={
            "self_attn.sinks": "attn_sinks.weight",
            **OUTPUT_BIASES,
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            **with_biases({"mlp.router": "ffn_gate_inp"}),
            "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
            "mlp.experts.gate_up_proj_bias": "ffn_gate_up_exps.bias",
            "mlp.experts.down_proj": "ffn_down_exps.weight",
            "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
            **{
                f"mlp.experts.{old}_proj_{end}": f"ffn_{new}_exps.{part}"
                for old, new in (("gate_up", "gate_up"), ("down", "down"))
                for end, part in (("blocks", "codes"), ("scales", "scales"))
            },
        },
        expert_columns="always",
        in_turn=True,
        quantized=("mxfp4",),
        settings={**N_EXPERT, "moe_intermediate_size": "intermediate_size"},
        eps="rms_norm_eps",
        demanded={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        windows=2,
        head_size=64,
        defaults={"rms_norm_eps": 1e-5},
    ),
    replace(
        LFM2,
        name="lfm2moe",
        classes=("Lfm2MoeForCausalLM",),
        layer_names={
            **LFM2.layer_names,
            "feed_forward.gate.weight": "ffn_gate_inp.weight",
            "feed_forward.expert_bias": "exp_probs_b.bias",
            **{
                f"feed_forward.experts.*.w{i}.weight": f"ffn_{part}_exps.weight"
                for i, part in ((1, "gate"), (3, "up"), (2, "down"))
            },
        },
        counts={**LFM2.counts, "leading_dense_block_count": "num_dense_layers", "expert_gating_func": "gating"},
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        demanded={"norm_topk_prob": True, "use_expert_bias": True, "conv_bias": False},
        defaults={**LFM2.defaults, "gating": 2},
        derived=None,
    ),
    Family(
        "deepseek",
        ("DeepseekForCausalLM",),
        layer_names={**EXPERTS, **shared("shared_experts")},
        rotated=True,
        settings=N_ROUTED,
        counts=LEADING_AND_SHARED,
        demanded={
            "moe_layer_freq": 1,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "routed_scaling_factor": 1.0,
        },
        defaults={"first_k_dense_replace": 0},
        derived=derived.of_shared_experts,
    ),
    Family(
        "bailingmoe",
        ("BailingMoeForCausalLM",),
        layer_names={
            **EXPERTS,
            **shared("shared_experts"),
            **with_biases({"attention.query_key_value": "attn_qkv", "attention.dense": "attn_output"}),
        },
        outer_names={"word_embeddings.weight": "token_embd.weight"},
        rotated=True,
        fused="parts",
        apart=True,
        numbers={"expert_weights_norm": "norm_topk_prob"},
        counts=LEADING_AND_SHARED,
        demanded={"multi_gate": False},
        defaults={"first_k_dense_replace": 0, "norm_topk_prob": True},
        derived=derived.of_bailingmoe,
    ),
    Family(
        "glm4moe",
        ("Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration"),
        layer_names={
            **EXPERTS,
            **shared("shared_experts"),
            "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
            "post_attention_layernorm.weight": "post_attention_norm.weight",
        },
        settings=N_ROUTED,
        numbers={"expert_weights_norm": "norm_topk_prob", "expert_weights_scale": "routed_scaling_factor"},
        counts={**LEADING_AND_SHARED, "expert_gating_func": "gating"},
        demanded={"n_group": 1, "topk_group": 1},
        partial=0.5,
        defaults={"first_k_dense_replace": 1, "gating": 2, "norm_topk_prob": True},
        derived=derived.of_shared_experts,
    ),
    Family(
        "ernie4_5-moe",
        ("Ernie4_5_MoeForCausalLM",),
        layer_names={
            **ALL_BIASES,
            **EXPERTS,
            **shared("shared_experts"),
            "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
        },
        settings={
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
            "num_shared_experts": "moe_num_shared_experts",
        },
        counts={
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
            "expert_shared_count": "num_shared_experts",
        },
        defaults={"moe_layer_start_index": 1, "moe_layer_interval": 1, "tie_word_embeddings": True},
        derived=derived.of_ernie4_5_moe,
    ),
    Family(
        "hunyuan-moe",
        ("HunYuanMoEV1ForCausalLM",),
        layer_names={
            **EXPERTS,
            **shared("shared_mlp"),
            "mlp.gate.wg.weight": "ffn_gate_inp.weight",
            "self_attn.query_layernorm.weight": "attn_q_norm.weight",
            "self_attn.key_layernorm.weight": "attn_k_norm.weight",
        },
        settings={"num_experts_per_tok": "moe_topk"},
        counts={"expert_shared_count": "num_shared_experts"},
        demanded={"use_cla": False, "moe_layer_num_skipped": 0, "use_qk_norm": True},
        scalings=("alpha",),
        derived=derived.of_hunyuan_moe,
    ),
    Family(
        "qwen3vlmoe",
        ("Qwen3VLMoeForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"),
        layer_names={
            **EXPERTS,
            "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
            "mlp.experts.down_proj": "ffn_down_exps.weight",
        },
        expert_columns="either",
        settings=N_EXPERT,
        counts=DEEPSTACK,
        demanded={"norm_topk_prob": True, **EVERY_LAYER},
        head_size=128,
        scalings=("mrope",),
        derived=derived.of_qwen3vl,
    ),
)
