"""The families that see all of a text at once and write none, as `families.py` has the others."""

from __future__ import annotations

from dataclasses import replace

from edgert.quantize.checkpoint.families import derived
from edgert.quantize.checkpoint.families.family import Family, with_biases

_BERT = Family(
    "bert",
    ("BertModel", "BertForMaskedLM", "BertForPreTraining"),
    layer_names=with_biases(
        {
            **{f"attention.self.{part}": f"attn_{part[0]}" for part in ("query", "key", "value")},
            "attention.output.dense": "attn_output",
            "attention.output.LayerNorm": "attn_output_norm",
            "intermediate.dense": "ffn_up",
            "output.dense": "ffn_down",
            "output.LayerNorm": "layer_output_norm",
        }
    ),
    outer_names={
        "embeddings.word_embeddings.weight": "token_embd.weight",
        "embeddings.position_embeddings.weight": "position_embd.weight",
        "embeddings.token_type_embeddings.weight": "token_types.weight",
        **with_biases({"embeddings.LayerNorm": "token_embd_norm"}),
    },
    tied_head=True,
    activations=("gelu",),
    eps="layer_norm_eps",
    demanded={"position_embedding_type": "absolute", "is_decoder": False},
    encoder=True,
    defaults={"layer_norm_eps": 1e-12, "hidden_act": "gelu"},
)
_NOMIC_BERT = Family(
    "nomic-bert",
    ("NomicBertModel", "NomicBertForMaskedLM"),
    layer_names={
        "attn.Wqkv.weight": "attn_qkv.weight",
        "attn.out_proj.weight": "attn_output.weight",
        **{f"mlp.fc{i}.weight": f"ffn_{part}.weight" for i, part in ((11, "up"), (12, "gate"), (2, "down"))},
        **with_biases({"norm1": "attn_output_norm", "norm2": "layer_output_norm"}),
        # as transformers calls them
        **with_biases(
            {"post_attention_layernorm": "attn_output_norm", "post_mlp_layernorm": "layer_output_norm"},
        ),
    },
    outer_names={
        **{name: _BERT.outer_names[name] for name in _BERT.outer_names if "position" not in name},
        **with_biases({"emb_ln": "token_embd_norm"}),
    },
    tied_head=True,
    activations=("silu", "swiglu"),
    settings={
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
        "layer_norm_eps": "layer_norm_epsilon",
        "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_emb_fraction",
    },
    eps="layer_norm_eps",
    demanded={
        "causal": False,
        "prenorm": False,
        "parallel_block": False,
        "use_rms_norm": False,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "moe_every_n_layers": 0,
    },
    encoder=True,
    defaults={"layer_norm_eps": 1e-12, "rope_theta": 1000.0},
    derived=derived.of_nomic_bert,
)

ENCODERS = (_BERT, replace(_BERT, classes=("XLMRobertaModel",), first_position=2), _NOMIC_BERT)
