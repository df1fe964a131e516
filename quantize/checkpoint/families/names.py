"""Names of tensors and of settings that several families share."""

from __future__ import annotations

from edgert.quantize.checkpoint.families.family import with_biases

TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")

GEMMA_NORMS = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
LAYER_NORMS = with_biases({"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"})
FUSED_GATE = {"mlp.gate_up_proj.weight": "ffn_up.weight"}
OUTPUT_BIASES = {"self_attn.o_proj.bias": "attn_output.bias"}
ALL_BIASES = {
    **OUTPUT_BIASES,
    **with_biases({f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}),
}
POST_NORMS = {name: GEMMA_NORMS[name] for name in GEMMA_NORMS if name.startswith("post")}
EXPERTS = {
    "mlp.gate.weight": "ffn_gate_inp.weight",
    **{f"mlp.experts.*.{part}_proj.weight": f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")},
}
FEED_FORWARD = {f"feed_forward.w{i}.weight": f"ffn_{part}.weight" for i, part in ((1, "gate"), (3, "up"), (2, "down"))}
DEEPSTACK = {"n_deepstack_layers": "n_deepstack_layers"}
N_EXPERT = {"num_experts": "num_local_experts"}


def shared(module: str) -> dict[str, str]:
    """Names of the expert that sees every token, by what the checkpoint calls it."""
    return {f"mlp.{module}.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")}
