"""The families whose checkpoints are read, each as its difference from the common names and habits.

Source: the models' config classes in transformers (names, and defaults of absent keys); llama.cpp's tensor names.
"""

from __future__ import annotations

from edgert.errors import UnsupportedFormatError
from edgert.quantize.checkpoint.config import Config
from edgert.quantize.checkpoint.families.dense import DENSE
from edgert.quantize.checkpoint.families.encoders import ENCODERS
from edgert.quantize.checkpoint.families.family import Family
from edgert.quantize.checkpoint.families.gemma import GEMMAS
from edgert.quantize.checkpoint.families.layer_norms import WITH_LAYER_NORMS
from edgert.quantize.checkpoint.families.mixtures import MIXTURES

FAMILIES = (*DENSE, *MIXTURES, *GEMMAS, *WITH_LAYER_NORMS, *ENCODERS)


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
