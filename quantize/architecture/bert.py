"""bert (BGE, MiniLM, E5, ...): an encoder with a table of positions and layer norms behind each sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from edgert.errors import UnsupportedFormatError
from edgert.quantize.architecture import common
from edgert.quantize.architecture.base import Activation, Architecture
from edgert.quantize.gguf_file import Model


def describe(file: Model[Any]) -> Architecture:
    """An encoder without rotation and gate.

    Source: transformers' modeling_bert.py; llama.cpp's src/models/bert.cpp (its gelu is the tanh form).
    """
    return describe_encoder(file, rope_style=None, gated=False, activation="gelu_erf")


def describe_encoder(
    file: Model[Any], *, rope_style: Literal["neox"] | None, gated: bool, activation: Activation
) -> Architecture:
    """What encoders of BERT's kind share. Raises: as common.describe()."""
    a = common.describe(
        file,
        rope_style=rope_style,
        norm="layer",
        norms=("attn_output_norm", "layer_output_norm"),
        gated=gated,
        activation=activation,
    )
    if file.get(f"{a.name}.attention.causal", bool, False):
        raise UnsupportedFormatError(
            f"{file.path}: {a.name}.attention.causal is true; edgert runs {a.name} as encoder."
        )
    outer = {name: shape for name, shape in a.outer.items() if not name.startswith("output")}
    if "token_types.weight" in file.tensors:
        outer["token_types.weight"] = (file.tensor("token_types.weight").shape[0], a.n_embd)
    outer |= {"token_embd_norm.weight": (a.n_embd,), "token_embd_norm.bias": (a.n_embd,)}
    return replace(a, outer=outer, encoder=True)
