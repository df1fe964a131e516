"""Model families: one short file for each difference, registered by general.architecture and imported on use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from edgert.errors import UnsupportedFormatError
from edgert.quantize.architecture.base import Architecture, Experts, Layer, Rope, is_matrix
from edgert.quantize.architecture.checks import check

if TYPE_CHECKING:
    from edgert.quantize.gguf_file import Model

__all__ = ["FAMILIES", "Architecture", "Experts", "Layer", "Rope", "describe", "expected", "is_matrix"]

# general.architecture -> the module that describes it
FAMILIES = {
    name: name.replace("-", "_")
    for name in (
        *("arcee", "baichuan", "bert", "cohere2", "command-r", "deepseek", "exaone", "exaone4", "falcon", "gemma"),
        *("gemma2", "gemma3", "gemma4", "glm4", "glm4moe", "gpt-oss", "gpt2", "gptneox", "granite", "hunyuan-dense"),
        *("lfm2", "llama", "minicpm", "mistral3", "nemotron", "nomic-bert", "olmo2", "olmoe", "orion", "phi2", "phi3"),
        *("qwen2", "qwen2moe", "qwen3", "qwen3moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    )
} | {
    "bailingmoe": "deepseek",
    "chatglm": "llama",  # its tensors are fused
    "ernie4_5": "llama",
    "ernie4_5-moe": "llama",
    "granitemoe": "granite",
    "hunyuan-moe": "hunyuan_dense",
    "internlm2": "llama",
    "lfm2moe": "lfm2",
    "qwen2vl": "qwen2",  # of text all axes of its rotation have the same position
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3moe",
    "starcoder": "gpt2",
    "xverse": "llama",
}


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
        raise UnsupportedFormatError(f"{file.path} {named}; edgert runs {', '.join(sorted(FAMILIES))}.")
    module = import_module(f"{__name__}.{FAMILIES[family]}")
    architecture: Architecture = module.describe(file)
    return architecture
