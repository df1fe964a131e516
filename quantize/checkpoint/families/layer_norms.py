"""Decoders with layer norms, most of them without a gate."""

from __future__ import annotations

from dataclasses import replace

from edgert.quantize.checkpoint.families import derived
from edgert.quantize.checkpoint.families.family import Family, with_biases
from edgert.quantize.checkpoint.families.names import LAYER_NORMS, OUTPUT_BIASES, TANH_GELU

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

WITH_LAYER_NORMS = (
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
        "stablelm",
        ("StableLmForCausalLM",),
        layer_names=LAYER_NORMS,
        outer_names={"norm.bias": "output_norm.bias"},
        eps="layer_norm_eps",
        demanded={"qk_layernorm": False},
        partial=0.25,
    ),
    Family(
        "starcoder2",
        ("Starcoder2ForCausalLM",),
        layer_names={**LAYER_NORMS, **OUTPUT_BIASES, **_GELU_MLP},
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
            **LAYER_NORMS,
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
        fused="groups",
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
        fused="groups",
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
        layer_names={**LAYER_NORMS, **OUTPUT_BIASES},
        outer_names={"norm.bias": "output_norm.bias"},
        norm_shift=1.0,
        activations=("relu2",),
        eps="norm_eps",
        partial=0.5,
    ),
    Family(
        "orion",
        ("OrionForCausalLM",),
        layer_names=LAYER_NORMS,
        outer_names={"norm.bias": "output_norm.bias"},
        settings={"layer_norm_eps": "rms_norm_eps", "max_position_embeddings": "max_sequence_length"},
        eps="layer_norm_eps",  # whatever its config.json calls it
    ),
    _COHERE,
    replace(_COHERE, name="cohere2", classes=("Cohere2ForCausalLM",), windows=4),
)
