"""Mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from edgert.quantize.checkpoint.families.dense import GRANITE, LFM2, LLAMA
from edgert.quantize.checkpoint.families.family import Family, with_biases
from edgert.quantize.checkpoint.families.names import EXPERTS, N_EXPERT, OUTPUT_BIASES

EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}

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
            **{f"mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
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
        classes=("GraniteMoeForCausalLM",),
        layer_names={
            "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight",
            "block_sparse_moe.input_linear.weight": "ffn_gate_up_exps.weight",
            "block_sparse_moe.output_linear.weight": "ffn_down_exps.weight",
        },
        settings=N_EXPERT,
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
            "feed_forward.experts.*.w1.weight": "ffn_gate_exps.weight",
            "feed_forward.experts.*.w3.weight": "ffn_up_exps.weight",
            "feed_forward.experts.*.w2.weight": "ffn_down_exps.weight",
        },
        counts={**LFM2.counts, "leading_dense_block_count": "num_dense_layers", "expert_gating_func": "gating"},
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        demanded={"norm_topk_prob": True, "use_expert_bias": True, "conv_bias": False},
        defaults={**LFM2.defaults, "gating": 2},
        derived=None,
    ),
)
