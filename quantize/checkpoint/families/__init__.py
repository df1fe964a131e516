"""The families whose checkpoints are read, each as its difference from the common names and habits.

Source: the models' config classes in transformers (names, and defaults of absent keys); llama.cpp's tensor names.
"""

from __future__ import annotations

import re

from edgert.errors import UnsupportedFormatError
from edgert.quantize.checkpoint.config import Config
from edgert.quantize.checkpoint.families.dense import DENSE, LLAMA
from edgert.quantize.checkpoint.families.encoders import ENCODERS
from edgert.quantize.checkpoint.families.family import Family
from edgert.quantize.checkpoint.families.gemma import GEMMAS
from edgert.quantize.checkpoint.families.layer_norms import WITH_LAYER_NORMS
from edgert.quantize.checkpoint.families.mixtures import MIXTURES

FAMILIES = (*DENSE, *MIXTURES, *GEMMAS, *WITH_LAYER_NORMS, *ENCODERS)


def find_family(config: Config) -> Family:
    """The family that config.json names, of a model of several parts that of the text part.

    Raises: UnsupportedFormatError with the list of those that edgert converts.
    """
    by_class = [family for name in config.classes for family in FAMILIES if name in family.classes]
    by_kind = [family for family in FAMILIES if _stem(config.kind) in map(_stem, family.classes)]
    if by_class and by_class[0] is LLAMA and by_kind:
        return by_kind[0]  # transformers runs relatives by llama's class
    if by_class:
        return by_class[0]
    if "PaliGemmaForConditionalGeneration" in config.classes:
        raise UnsupportedFormatError(
            f"{config.path} describes PaliGemma, whose text model sees all of a prompt at once, which GGUF cannot say: "
            "take a Gemma 3, which sees pictures too and whose text part edgert converts."
        )
    if by_kind and (config.is_part or not config.classes):
        return by_kind[0]
    what = ", ".join(config.classes) or config.get("model_type") or "a model without `architectures`"
    known = ", ".join(name for family in FAMILIES for name in family.classes)
    raise UnsupportedFormatError(f"{config.path} describes {what}; edgert converts {known}.")


def _stem(name: str) -> str:
    """What the name of a class and its model_type have in common: Qwen2MoeForCausalLM, qwen2_moe_text -> qwen2moe."""
    stem = re.sub(r"(For\w+|LMHeadModel|Model)$|_text$", "", name)
    return re.sub(r"[^a-z0-9]", "", stem.lower())
