"""Model families: one short file for each, registered by general.architecture and imported on use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from edgert.errors import UnsupportedFormatError
from edgert.quantize.architecture.base import Architecture, Experts, Layer, Rope, is_matrix
from edgert.quantize.architecture.checks import check

if TYPE_CHECKING:
    from edgert.quantize.gguf_file import Model

__all__ = ["FAMILIES", "Architecture", "Experts", "Layer", "Rope", "describe", "expected", "is_matrix"]

FAMILIES = (
    *("arcee", "bert", "cohere2", "command-r", "falcon", "gemma", "gemma2", "gemma3", "glm4", "gpt-oss", "gpt2"),
    *("gptneox", "granite", "granitemoe", "llama", "minicpm", "nemotron", "nomic-bert", "olmo2", "olmoe", "phi2"),
    *("phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "smollm3", "stablelm", "starcoder", "starcoder2"),
)


def describe(file: Model[Any]) -> Architecture:
    """What the file's model computes, with every size and needed tensor checked.

    Raises: UnsupportedFormatError for a family or a part of it that edgert does not know; ModelFileError for
        keys and tensors that are missing or contradict each other.
    """
    architecture = expected(file)
    check(file, architecture)
    return architecture


def expected(file: Model[Any]) -> Architecture:
    """What a model of the file's metadata computes; of its tensors only some names and shapes are looked at.

    Raises: as describe(), but for tensors.
    """
    family = file.get("general.architecture", str, "")
    if family not in FAMILIES:
        named = f"is a {family!r} model" if family else "does not name its general.architecture"
        raise UnsupportedFormatError(f"{file.path} {named}; edgert runs {', '.join(FAMILIES)}.")
    module = import_module(f"{__name__}.{family.replace('-', '_')}")
    architecture: Architecture = module.describe(file)
    return architecture
