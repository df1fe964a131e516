"""Decoders with rms norms, whose tokens pass every weight."""

from __future__ import annotations

from edgert.quantize.checkpoint.families import derived
from edgert.quantize.checkpoint.families.family import Family, with_biases
from edgert.quantize.checkpoint.families.names import (
    ALL_BIASES,
    DEEPSTACK,
    FEED_FORWARD,
    FUSED_GATE,
    OUTPUT_BIASES,
    POST_NORMS,
)

LLAMA = Family(
    "llama",
    (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "InternLM3ForCausalLM",
        "IQuestCoderForCausalLM",
        "LlamaModel",
        "MistralModel",
    ),
    rotated=True,
    llama_keys=True,
    scalings=("llama3",),
)
GRANITE = Family(
    "granite",
    ("GraniteForCausalLM",),
    layer_names=ALL_BIASES,
    rotated=True,
    numbers={
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
        "logit_scale": "logits_scaling",
    },
    llama_keys=True,
    defaults=dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
    ),
)
LFM2 = Family(
    "lfm2",
    ("Lfm2ForCausalLM",),
    layer_names={
        "operator_norm.weight": "attn_norm.weight",
        "ffn_norm.weight": "ffn_norm.weight",
        "self_attn.out_proj.weight": "attn_output.weight",
        "self_attn.q_layernorm.weight": "attn_q_norm.weight",
        "self_attn.k_layernorm.weight": "attn_k_norm.weight",
        **{f"conv.{part}.weight": f"shortconv.{part}.weight" for part in ("in_proj", "conv", "out_proj")},
        **FEED_FORWARD,
    },
    outer_names={"embedding_norm.weight": "token_embd_norm.weight"},
    tied_head=True,
    settings={"rms_norm_eps": "norm_eps"},
    counts={"shortconv.l_cache": "conv_L_cache"},
    demanded={"conv_bias": False},
    defaults={"tie_word_embeddings": True, "norm_eps": 1e-5, "conv_L_cache": 3},
    derived=derived.of_lfm2,
)

# Families that are llama but for what a checkpoint calls things, and how its rows stand.
RELATIVES = (
    Family(
        "baichuan",
        ("BaichuanForCausalLM", "BaiChuanForCausalLM"),
        layer_names={"self_attn.W_pack.weight": "attn_qkv.weight"},
        rotated=True,
        fused="parts",
        apart=True,
        settings={"max_position_embeddings": "model_max_length"},
        derived=derived.of_baichuan,
    ),
    Family(
        "exaone",
        ("ExaoneForCausalLM",),
        layer_names={
            "ln_1.weight": "attn_norm.weight",
            "ln_2.weight": "ffn_norm.weight",
            **{f"attn.attention.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
            "attn.attention.out_proj.weight": "attn_output.weight",
            "mlp.c_fc_0.weight": "ffn_gate.weight",
            "mlp.c_fc_1.weight": "ffn_up.weight",
            "mlp.c_proj.weight": "ffn_down.weight",
        },
        outer_names={"wte.weight": "token_embd.weight", "ln_f.weight": "output_norm.weight"},
        settings={
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        scalings=("llama3",),
        defaults={"layer_norm_epsilon": 1e-5},
    ),
    Family(
        "internlm2",
        ("InternLM2ForCausalLM",),
        layer_names={
            "attention_norm.weight": "attn_norm.weight",
            "ffn_norm.weight": "ffn_norm.weight",
            **with_biases({"attention.wqkv": "attn_qkv", "attention.wo": "attn_output"}),
            **FEED_FORWARD,
        },
        outer_names={"tok_embeddings.weight": "token_embd.weight", "output.weight": "output.weight"},
        rotated=True,
        fused="groups",
        apart=True,
        scalings=("dynamic",),
    ),
    Family(
        "minicpm",
        ("MiniCPMForCausalLM",),
        rotated=True,
        tied_head=True,
        numbers={key: key for key in ("embedding_scale", "residual_scale", "logit_scale")},
        demanded={"num_experts": 0, "sparse_config": None},
        scalings=("longrope",),
        derived=derived.of_minicpm,
    ),
    Family("xverse", ("XverseForCausalLM",), rotated=True),
    Family(
        "qwen2vl",
        (
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen2_5OmniModel",
            "Qwen2_5OmniForConditionalGeneration",
        ),
        scalings=("mrope",),
    ),
    Family(
        "qwen3vl",
        ("Qwen3VLForConditionalGeneration",),
        head_size=128,
        counts=DEEPSTACK,
        scalings=("mrope",),
        derived=derived.of_qwen3vl,
    ),
)

DENSE = (
    LLAMA,
    GRANITE,
    Family(
        "arcee",
        ("ArceeForCausalLM",),
        rotated=True,
        activations=("relu2",),
        llama_keys=True,
        scalings=("llama3",),
    ),
    Family("qwen2", ("Qwen2ForCausalLM", "Qwen2Model")),
    Family("qwen3", ("Qwen3ForCausalLM", "Qwen3Model"), head_size=128),
    Family(
        "phi3",
        ("Phi3ForCausalLM",),
        layer_names={"self_attn.qkv_proj.weight": "attn_qkv.weight", **FUSED_GATE},
        windows=1,
        partial=1.0,
        scalings=("longrope", "su"),
    ),
    Family("smollm3", ("SmolLM3ForCausalLM",), rotated=True, derived=derived.of_smollm3),
    Family(
        "olmo2",
        ("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
        layer_names=POST_NORMS,
        windows=4,
    ),
    Family("exaone4", ("Exaone4ForCausalLM",), layer_names=POST_NORMS, windows=4, scalings=("llama3",)),
    Family(
        "seed_oss",
        ("SeedOssForCausalLM",),
        layer_names={**OUTPUT_BIASES, "post_attention_layernorm.weight": "post_attention_norm.weight"},
        head_size=128,
    ),
    Family("ernie4_5", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), layer_names=ALL_BIASES, head_size=128),
    Family(
        "hunyuan-dense",
        ("HunYuanDenseV1ForCausalLM",),
        layer_names={
            "self_attn.query_layernorm.weight": "attn_q_norm.weight",
            "self_attn.key_layernorm.weight": "attn_k_norm.weight",
        },
    ),
    Family(
        "mistral3",
        ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
        rotated=True,
        numbers={"attention.temperature_scale": "llama_4_scaling_beta"},
        llama_keys=True,
        derived=derived.of_mistral3,
    ),
    LFM2,
    Family("chatglm", ("GlmForCausalLM",), layer_names=FUSED_GATE, partial=0.5),
    Family(
        "glm4",
        ("Glm4ForCausalLM", "Glm4vForConditionalGeneration"),
        layer_names={
            "post_self_attn_layernorm.weight": "post_attention_norm.weight",
            "post_mlp_layernorm.weight": "post_ffw_norm.weight",
            **FUSED_GATE,
        },
        partial=0.5,
    ),
    *RELATIVES,
)
