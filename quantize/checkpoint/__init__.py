"""A folder in Hugging Face's format: safetensors, config.json and a tokenizer, seen as the GGUF file it becomes."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

from edgert.quantize.checkpoint.config import Config
from edgert.quantize.checkpoint.families import find_family
from edgert.quantize.checkpoint.hyperparameters import architecture_keys, general_keys, read_sizes
from edgert.quantize.checkpoint.tensors import Mapping
from edgert.quantize.checkpoint.vocabulary import vocabulary_keys
from edgert.quantize.checkpoint.weights import open_weights
from edgert.quantize.source import Source


def open_checkpoint(folder: Path) -> Source:
    """Opens a checkpoint; everything but the weights' values is checked before this returns.

    Raises: ModelFileError, UnsupportedFormatError; each names the file and what is wrong in it.
    """
    config = Config(folder / "config.json")
    family = find_family(config)
    config.settings = family.settings
    config.defaults = dict(family.defaults)
    if family.derived:
        config.values |= family.derived(config)
    with contextlib.ExitStack() as stack:
        entries, files = open_weights(folder, stack)
        mapping = Mapping(folder, config, family, entries)
        notices = mapping.notices
        sizes = read_sizes(config, family, mapping.n_vocab)
        own_keys, rope = architecture_keys(config, family, sizes, notices)
        mapping.settle_head(config)
        vocabulary = vocabulary_keys(folder, config.values, sizes.n_vocab, notices)
        tensors = mapping.tensors(sizes, rope.tensors, own_keys)
        n_parameters = sum(math.prod(tensor.shape) for tensor in tensors)
        metadata = general_keys(folder, config, family, n_parameters)
        metadata |= own_keys
        metadata |= vocabulary
        beside = sorted({path.name for path in folder.glob("*.safetensors")} - {path.name for path in files})
        return Source(
            folder,
            metadata,
            tensors,
            files=[folder / "config.json", *files],
            skipped=[*mapping.skipped, *((name, "is beside the checkpoint and no part of it") for name in beside)],
            notices=notices,
            close=stack.pop_all(),
        )
    raise AssertionError  # the stack suppresses nothing
