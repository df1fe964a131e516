"""Holds a description against its file: every needed tensor, nothing that would change the result, sound token ids."""

from __future__ import annotations

import logging
import re
from typing import Any

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize.architecture.base import Architecture
from edgert.quantize.gguf_file import Model

log = logging.getLogger("edgert")

ESSENTIAL_TOKENS = ("bos", "eos", "unknown", "eot", "eom")
OUTER = ("output", "rope_f", "position_embd", "token_embd", "token_types", "per_layer_")  # beginnings of names
SCALES = (".scale", ".input_scale")  # of tensors whose blocks' own are relative, as NVFP4's
UNUSED = ("attn_rot_embd.weight",)  # of layers, by name: in old files, and read by nobody


def check(file: Model[Any], architecture: Architecture) -> None:
    """Holds one against the other.

    Raises: ModelFileError for tensors and token ids that cannot be right; UnsupportedFormatError for surplus tensors,
        and for decoders whose attention looks ahead.
    """
    if not architecture.encoder and not file.get(f"{architecture.name}.attention.causal", bool, True):
        raise UnsupportedFormatError(
            f"{file.path}: {architecture.name}.attention.causal is false, so that its tokens see those behind them, "
            f"which edgert does not run in {architecture.name} models."
        )
    _check_tensors(file, architecture)
    _check_token_ids(file, architecture.n_vocab)


def _check_tensors(file: Model[Any], architecture: Architecture) -> None:
    """Needed tensors are there, in their shapes; surplus ones that would change the result are refused."""
    needed = architecture.tensors()
    for name, shape in needed.items():
        found = file.tensor(name).shape
        if found != shape:
            raise _wrong_shape(file, name, found, shape)
    extra = [name for name in file.tensors if name not in needed]
    for name in extra:
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        in_layer = layer is not None and int(layer[1]) < architecture.n_layer and layer[2] not in UNUSED
        if in_layer and layer and architecture.layers[int(layer[1])].kv_layer is not None:
            in_layer = not layer[2].startswith(("attn_k", "attn_v"))  # those of another layer are read
        if in_layer or name.startswith(OUTER) or name.endswith(SCALES):
            raise UnsupportedFormatError(
                f"{file.path} has the tensor {name!r}, which edgert's {architecture.name} does not know: "
                "without it the answers would be wrong."
            )
    if extra:
        shown = ", ".join(extra[:5]) + (" ..." if len(extra) > 5 else "")
        log.warning("%s holds more than the model needs: %d not used, %s", file.path, len(extra), shown)


def _wrong_shape(file: Model[Any], name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> ModelFileError:
    return ModelFileError(
        f"{file.path}: the tensor {name!r} has the shape {found} and should have {expected} by the metadata; "
        "convert the model anew."
    )


def _check_token_ids(file: Model[Any], n_vocab: int) -> None:
    """Special token ids lie within the vocabulary."""
    for key in file.metadata:
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            token = file.get(key, int)
            if 0 <= token < n_vocab:
                continue
            if key.removeprefix("tokenizer.ggml.").removesuffix("_token_id") in ESSENTIAL_TOKENS:
                raise ModelFileError(
                    f"{file.path}: {key} is {token}, outside the vocabulary of {n_vocab} tokens; "
                    "convert the model anew."
                )
            log.warning("%s: %s is %d, outside the vocabulary of %d: ignored", file.path, key, token, n_vocab)
