"""Decoders with rms norms, whose tokens pass every weight."""

from __future__ import annotations

from edgert.quantize.checkpoint.families import derived
from edgert.quantize.checkpoint.families.family import Family
from edgert.quantize.checkpoint.families.names import ALL_BIASES, FUSED_GATE, OUTPUT_BIASES, POST_NORMS

LLAMA = Family(
    "llama",
    ("LlamaForCausalLM", "MistralForCausalLM"),
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
        **{f"feed_forward.w{i}.weight": f"ffn_{part}.weight" for i, part in ((1, "gate"), (3, "up"), (2, "down"))},
    },
    outer_names={"embedding_norm.weight": "token_embd_norm.weight"},
    tied_head=True,
    settings={"rms_norm_eps": "norm_eps"},
    counts={"shortconv.l_cache": "conv_L_cache"},
    demanded={"conv_bias": False},
    defaults={"tie_word_embeddings": True, "norm_eps": 1e-5, "conv_L_cache": 3},
    derived=derived.of_lfm2,
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
    Family("qwen2", ("Qwen2ForCausalLM",)),
    Family("qwen3", ("Qwen3ForCausalLM",), head_size=128),
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
        ("Glm4ForCausalLM",),
        layer_names={
            "post_self_attn_layernorm.weight": "post_attention_norm.weight",
            "post_mlp_layernorm.weight": "post_ffw_norm.weight",
            **FUSED_GATE,
        },
        partial=0.5,
    ),
)
