"""The families whose checkpoints are read, each as its difference from the common names and habits.

Source: the models' config classes in transformers (names, and defaults of absent keys); llama.cpp's tensor names.
"""

from __future__ import annotations

from dataclasses import replace

from edgert.errors import UnsupportedFormatError
from edgert.quantize.checkpoint import derived
from edgert.quantize.checkpoint.config import Config
from edgert.quantize.checkpoint.encoders import ENCODERS
from edgert.quantize.checkpoint.family import Family, with_biases

TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


_GEMMA_NORMS = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
_LAYER_NORMS = with_biases({"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"})
_FUSED_GATE = {"mlp.gate_up_proj.weight": "ffn_up.weight"}
_OUTPUT_BIASES = {"self_attn.o_proj.bias": "attn_output.bias"}
_GELU_MLP = with_biases({"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"})
_GPT2 = Family(
    "gpt2",
    ("GPT2LMHeadModel",),
    layer_names={
        **_GELU_MLP,
        **with_biases(
            {"ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output"}
        ),
    },
    outer_names={
        "wte.weight": "token_embd.weight",
        "wpe.weight": "position_embd.weight",
        **with_biases({"ln_f": "output_norm"}),
    },
    transposed=True,
    tied_head=True,
    activations=TANH_GELU,
    settings={
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
    },
    eps="layer_norm_epsilon",
    demanded={"scale_attn_by_inverse_layer_idx": False},
    defaults={"activation_function": "gelu_new"},
    derived=derived.of_gpt2,
)
_COHERE = Family(
    "command-r",
    ("CohereForCausalLM",),
    tied_head=True,
    eps="layer_norm_eps",
    numbers={"logit_scale": "logit_scale"},
    defaults={"logit_scale": 0.0625, "tie_word_embeddings": True, "layer_norm_eps": 1e-5},
)

_LLAMA = Family(
    "llama",
    ("LlamaForCausalLM", "MistralForCausalLM"),
    rotated=True,
    llama_keys=True,
    scalings=("llama3",),
)
_ALL_BIASES = {
    **_OUTPUT_BIASES,
    **with_biases({f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}),
}
_GRANITE = Family(
    "granite",
    ("GraniteForCausalLM",),
    layer_names=_ALL_BIASES,
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
_POST_NORMS = {name: _GEMMA_NORMS[name] for name in _GEMMA_NORMS if name.startswith("post")}
_EXPERTS = {
    "mlp.gate.weight": "ffn_gate_inp.weight",
    **{f"mlp.experts.*.{part}_proj.weight": f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")},
}
_EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_N_EXPERT = {"num_experts": "num_local_experts"}
_LFM2 = Family(
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

FAMILIES = (
    _LLAMA,
    replace(
        _LLAMA,
        classes=("MixtralForCausalLM",),
        layer_names={
            "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
            "block_sparse_moe.experts.*.w1.weight": "ffn_gate_exps.weight",
            "block_sparse_moe.experts.*.w3.weight": "ffn_up_exps.weight",
            "block_sparse_moe.experts.*.w2.weight": "ffn_down_exps.weight",
        },
        settings=_N_EXPERT,
    ),
    *ENCODERS,
    Family(
        "qwen2moe",
        ("Qwen2MoeForCausalLM",),
        layer_names={
            **_EXPERTS,
            **{f"mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
            "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
        },
        demanded={"norm_topk_prob": False, **_EVERY_LAYER},
    ),
    Family(
        "qwen3moe",
        ("Qwen3MoeForCausalLM",),
        layer_names=_EXPERTS,
        settings=_N_EXPERT,
        demanded={"norm_topk_prob": True, **_EVERY_LAYER},
        head_size=128,
    ),
    Family("olmoe", ("OlmoeForCausalLM",), layer_names=_EXPERTS, demanded={"norm_topk_prob": False, "clip_qkv": None}),
    _GRANITE,
    replace(
        _GRANITE,
        name="granitemoe",
        classes=("GraniteMoeForCausalLM",),
        layer_names={
            "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight",
            "block_sparse_moe.input_linear.weight": "ffn_gate_up_exps.weight",
            "block_sparse_moe.output_linear.weight": "ffn_down_exps.weight",
        },
        settings=_N_EXPERT,
    ),
    Family(
        "gpt-oss",
        ("GptOssForCausalLM",),
        layer_names={
            "self_attn.sinks": "attn_sinks.weight",
            **_OUTPUT_BIASES,
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
        settings={**_N_EXPERT, "moe_intermediate_size": "intermediate_size"},
        eps="rms_norm_eps",
        demanded={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        windows=2,
        head_size=64,
        defaults={"rms_norm_eps": 1e-5},
    ),
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
        "gemma",
        ("GemmaForCausalLM",),
        norm_shift=1.0,
        tied_head=True,
        activations=(*TANH_GELU, "gelu"),
        head_size=256,
    ),
    Family(
        "gemma2",
        ("Gemma2ForCausalLM",),
        layer_names=_GEMMA_NORMS,
        norm_shift=1.0,
        tied_head=True,
        activations=TANH_GELU,
        numbers={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        windows=2,
        head_size=256,
        defaults={"sliding_window": 4096},
    ),
    Family(
        "gemma3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        layer_names=_GEMMA_NORMS,
        norm_shift=1.0,
        tied_head=True,
        activations=("gelu_pytorch_tanh",),
        numbers={"final_logit_softcapping": "final_logit_softcapping"},
        windows=6,
        head_size=256,
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "sliding_window": 4096,
        },
    ),
    Family(
        "gemma4",
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        layer_names={
            **_GEMMA_NORMS,
            "per_layer_input_gate.weight": "inp_gate.weight",
            "per_layer_projection.weight": "proj.weight",
            "post_per_layer_input_norm.weight": "post_norm.weight",
            "layer_scalar": "layer_output_scale.weight",
        },
        outer_names={
            "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
            "per_layer_model_projection.weight": "per_layer_model_proj.weight",
            "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
        },
        tied_head=True,
        activations=("gelu_pytorch_tanh",),
        numbers={"final_logit_softcapping": "final_logit_softcapping"},
        counts={
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "attention.key_length_swa": "local_head_dim",
            "attention.value_length_swa": "local_head_dim",
            "rope.dimension_count": "head_dim",
            "rope.dimension_count_swa": "local_head_dim",
        },
        demanded={"enable_moe_block": False, "use_bidirectional_attention": None},
        windows=6,
        scalings=("proportional",),
        defaults={
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "max_position_embeddings": 131_072,
            "sliding_window": 512,
        },
        derived=derived.of_gemma4,
    ),
    Family(
        "phi2",
        ("PhiForCausalLM",),
        layer_names=with_biases(
            {
                "input_layernorm": "attn_norm",
                "self_attn.dense": "attn_output",
                "mlp.fc1": "ffn_up",
                "mlp.fc2": "ffn_down",
            }
        ),
        outer_names={**with_biases({"final_layernorm": "output_norm"}), "lm_head.bias": "output.bias"},
        activations=TANH_GELU,
        eps="layer_norm_eps",
        demanded={"qk_layernorm": False},
        partial=0.5,
    ),
    Family(
        "phi3",
        ("Phi3ForCausalLM",),
        layer_names={"self_attn.qkv_proj.weight": "attn_qkv.weight", **_FUSED_GATE},
        windows=1,
        partial=1.0,
        scalings=("longrope", "su"),
    ),
    Family("smollm3", ("SmolLM3ForCausalLM",), rotated=True, derived=derived.of_smollm3),
    Family(
        "olmo2",
        ("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
        layer_names=_POST_NORMS,
        windows=4,
    ),
    Family("exaone4", ("Exaone4ForCausalLM",), layer_names=_POST_NORMS, windows=4, scalings=("llama3",)),
    Family(
        "seed_oss",
        ("SeedOssForCausalLM",),
        layer_names={**_OUTPUT_BIASES, "post_attention_layernorm.weight": "post_attention_norm.weight"},
        head_size=128,
    ),
    Family("ernie4_5", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), layer_names=_ALL_BIASES, head_size=128),
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
    _LFM2,
    replace(
        _LFM2,
        name="lfm2moe",
        classes=("Lfm2MoeForCausalLM",),
        layer_names={
            **_LFM2.layer_names,
            "feed_forward.gate.weight": "ffn_gate_inp.weight",
            "feed_forward.expert_bias": "exp_probs_b.bias",
            "feed_forward.experts.*.w1.weight": "ffn_gate_exps.weight",
            "feed_forward.experts.*.w3.weight": "ffn_up_exps.weight",
            "feed_forward.experts.*.w2.weight": "ffn_down_exps.weight",
        },
        counts={**_LFM2.counts, "leading_dense_block_count": "num_dense_layers", "expert_gating_func": "gating"},
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        demanded={"norm_topk_prob": True, "use_expert_bias": True, "conv_bias": False},
        defaults={**_LFM2.defaults, "gating": 2},
        derived=None,
    ),
    Family("chatglm", ("GlmForCausalLM",), layer_names=_FUSED_GATE, partial=0.5),
    Family(
        "stablelm",
        ("StableLmForCausalLM",),
        layer_names=_LAYER_NORMS,
        outer_names={"norm.bias": "output_norm.bias"},
        eps="layer_norm_eps",
        demanded={"qk_layernorm": False},
        partial=0.25,
    ),
    Family(
        "starcoder2",
        ("Starcoder2ForCausalLM",),
        layer_names={**_LAYER_NORMS, **_OUTPUT_BIASES, **_GELU_MLP},
        outer_names={"norm.bias": "output_norm.bias"},
        tied_head=True,
        activations=TANH_GELU,
        eps="norm_epsilon",
        windows=1,
    ),
    _GPT2,
    replace(
        _GPT2,
        name="starcoder",
        classes=("GPTBigCodeForCausalLM",),
        transposed=False,
        demanded={"multi_query": True},
        derived=derived.of_starcoder,
    ),
    Family(
        "gptneox",
        ("GPTNeoXForCausalLM",),
        layer_names={
            **_LAYER_NORMS,
            **with_biases(
                {
                    "attention.query_key_value": "attn_qkv",
                    "attention.dense": "attn_output",
                    "mlp.dense_h_to_4h": "ffn_up",
                    "mlp.dense_4h_to_h": "ffn_down",
                }
            ),
        },
        outer_names={
            "embed_in.weight": "token_embd.weight",
            **with_biases({"final_layer_norm": "output_norm"}),
            "embed_out.weight": "output.weight",
        },
        fused=True,
        activations=("gelu",),
        settings={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        eps="layer_norm_eps",
        numbers={"use_parallel_residual": "use_parallel_residual"},
        partial=0.25,
        defaults={"use_parallel_residual": True, "hidden_act": "gelu"},
        derived=derived.of_gptneox,
    ),
    Family(
        "falcon",
        ("FalconForCausalLM", "RWForCausalLM"),
        layer_names={
            **with_biases({"input_layernorm": "attn_norm", "ln_mlp": "attn_norm", "ln_attn": "attn_norm_2"}),
            "self_attention.query_key_value.weight": "attn_qkv.weight",
            "self_attention.dense.weight": "attn_output.weight",
            "mlp.dense_h_to_4h.weight": "ffn_up.weight",
            "mlp.dense_4h_to_h.weight": "ffn_down.weight",
        },
        outer_names={"word_embeddings.weight": "token_embd.weight", **with_biases({"ln_f": "output_norm"})},
        fused=True,
        tied_head=True,
        activations=("gelu",),
        eps="layer_norm_epsilon",
        demanded={"alibi": False, "parallel_attn": True},
        defaults={"hidden_act": "gelu", "max_position_embeddings": 2048},
        derived=derived.of_falcon,
    ),
    Family(
        "nemotron",
        ("NemotronForCausalLM",),
        layer_names={**_LAYER_NORMS, **_OUTPUT_BIASES},
        outer_names={"norm.bias": "output_norm.bias"},
        norm_shift=1.0,
        activations=("relu2",),
        eps="norm_eps",
        partial=0.5,
    ),
    Family(
        "glm4",
        ("Glm4ForCausalLM",),
        layer_names={
            "post_self_attn_layernorm.weight": "post_attention_norm.weight",
            "post_mlp_layernorm.weight": "post_ffw_norm.weight",
            **_FUSED_GATE,
        },
        partial=0.5,
    ),
    _COHERE,
    replace(_COHERE, name="cohere2", classes=("Cohere2ForCausalLM",), windows=4),
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
