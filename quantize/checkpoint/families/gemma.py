"""The Gemmas: norms with a shift, tied heads, windows."""

from __future__ import annotations

from edgert.quantize.checkpoint.families import derived
from edgert.quantize.checkpoint.families.family import Family
from edgert.quantize.checkpoint.families.names import GEMMA_NORMS, TANH_GELU

GEMMAS = (
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
        layer_names=GEMMA_NORMS,
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
        layer_names=GEMMA_NORMS,
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
            **GEMMA_NORMS,
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
)
