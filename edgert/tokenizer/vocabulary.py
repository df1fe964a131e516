"""The tokens of a model as GGUF stores them, checked once and frozen."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.tokenizer.pretokenizer import RULES, Rule

if TYPE_CHECKING:
    from edgert.quantize.gguf_file import Model

logger = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MODELS = {
    "gpt2": "byte-level BPE",
    "llama": "SentencePiece with scores",
    "gemma4": "BPE with byte fallback",
}
# A token with one of these texts ends the answer whatever its type; converters often forget the type.
END_MARKERS = frozenset(
    [
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|EOT|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
    ]
)
# These are ordinary words of some vocabularies, so the type must say control.
END_WORDS = frozenset(
    [
        "</s>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "[e~[",
        "<|fim_pad|>",
        "<fim_pad>",
        "<|repo_name|>",
        "<|file_sep|>",
    ]
)


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer is made of.

    tokens:    n_vocab byte strings, UTF-8 as in the file; in byte-level BPE each character is a byte
    ids:       token -> id of those that text may become by merging: no names of special tokens
    types:     int32 (n_vocab,), GGUF's token types
    scores:    float32 (n_vocab,), SentencePiece only
    merges:    `left right`, the most important first, BPE only
    rule:      how text is cut into words, BPE only
    end_ids:   tokens after which the model has nothing more to say
    rstrip:    special tokens that swallow the white space behind them (Phi-3's)
    """

    model: str
    tokens: list[bytes]
    ids: dict[bytes, int]
    types: NDArray[np.int32]
    scores: NDArray[np.float32] | None
    merges: list[bytes] | None
    rule: Rule | None
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    unk_id: int | None
    end_ids: frozenset[int]
    add_bos: bool
    add_space_prefix: bool
    rstrip: frozenset[int]

    @classmethod
    def from_gguf(cls, file: Model[Any]) -> Vocabulary:
        """Reads and checks the tokenizer.* keys.

        Raises: ModelFileError that names the key; UnsupportedFormatError for other kinds of tokenizers.
        """
        model = file.get("tokenizer.ggml.model", str)
        if model not in MODELS:
            raise UnsupportedFormatError(
                f"{file.path} has a tokenizer of the kind {model!r} (tokenizer.ggml.model), "
                f"and edgert knows {', '.join(f'{name} ({kind})' for name, kind in MODELS.items())}."
            )
        spm = model == "llama"
        tokens = _strings(file, "tokenizer.ggml.tokens")
        n = len(tokens)
        if not n:
            raise ModelFileError(f"{file.path}: tokenizer.ggml.tokens is empty; convert the model anew.")
        types = _numbers(file, "tokenizer.ggml.token_type", n, np.int32)
        types = np.full(n, NORMAL, np.int32) if types is None else types
        rule = None if spm else _rule(file, "gemma4" if model == "gemma4" else None)
        named = _named_ids(file, n, spm)
        ids = _first_ids(tokens)
        _warn_of_oddities(file, tokens, ids)
        end_ids, eot_id = _end_ids(named, ids, types)
        rstrip = _rstrip(file, ids, types)
        return cls(
            model=model,
            tokens=tokens,
            ids=_ordinary(tokens, ids, types, model == "gpt2"),
            types=types,
            scores=_numbers(file, "tokenizer.ggml.scores", n, np.float32) if spm else None,
            merges=None if spm else _strings(file, "tokenizer.ggml.merges"),
            rule=rule,
            bos_id=named["bos"],
            eos_id=named["eos"],
            eot_id=eot_id,
            unk_id=named["unknown"],
            end_ids=end_ids,
            add_bos=named["bos"] is not None
            and file.get("tokenizer.ggml.add_bos_token", bool, spm or bool(rule and rule.add_bos)),
            add_space_prefix=spm and file.get("tokenizer.ggml.add_space_prefix", bool, True),
            rstrip=rstrip,
        )


def _named_ids(file: Model[Any], n: int, spm: bool) -> dict[str, int | None]:
    ids = {
        name: _token_id(file, f"tokenizer.ggml.{name}_token_id", n) for name in ("bos", "eos", "eot", "eom", "unknown")
    }
    if ids["bos"] is None and ids["eos"] is None:  # what the oldest files meant without saying it
        if spm and n > 2:
            ids |= {"unknown": 0, "bos": 1, "eos": 2}
        elif not spm and n > 11:
            ids |= {"bos": 11, "eos": 11}
    return ids


def _end_ids(
    named: dict[str, int | None], ids: dict[bytes, int], types: NDArray[np.int32]
) -> tuple[frozenset[int], int | None]:
    """All tokens that end an answer, and the one that ends a turn; marks them as control tokens in `types`."""
    end = {i for i in (named["eos"], named["eot"], named["eom"]) if i is not None}
    markers = {text: ids[text.encode()] for text in END_MARKERS if text.encode() in ids}
    words = {text: ids[text.encode()] for text in END_WORDS if text.encode() in ids}
    types[list(markers.values())] = CONTROL
    if "</s>" in words and b"<s>" in ids and types[ids[b"<s>"]] == CONTROL:
        types[words["</s>"]] = CONTROL  # Phi-3 says user-defined; where <s> is text as well, both are HTML
    end.update(markers.values(), (i for i in words.values() if types[i] == CONTROL))
    if {"<|return|>", "<|call|>"} <= markers.keys() or {"<|calls|>", "<|flush|>"} <= markers.keys():
        end.discard(markers.get("<|end|>", -1))  # there it only ends a part of the answer
    turns = [i for text, i in markers.items() if text != "<|endoftext|>"]
    return frozenset(end), named["eot"] if named["eot"] is not None else min(turns, default=None)


def _rstrip(file: Model[Any], ids: dict[bytes, int], types: NDArray[np.int32]) -> frozenset[int]:
    """Phi-3's special tokens swallow white space; its files do not say so, but by their name."""
    name = str(file.metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    plain = {ids.get(text) for text in (b"<unk>", b"<s>", b"<|endoftext|>")}
    special = np.flatnonzero(np.isin(types, (UNKNOWN, CONTROL, USER_DEFINED)))
    return frozenset(special.tolist()) - plain


def _first_ids(tokens: list[bytes]) -> dict[bytes, int]:
    """Token -> id, the lowest where several are equal."""
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        ids = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))
    return ids


def _ordinary(
    tokens: list[bytes], ids: dict[bytes, int], types: NDArray[np.int32], byte_level: bool
) -> dict[bytes, int]:
    """Takes the special tokens out of `ids`; one whose text an ordinary token has as well leaves it that one."""
    kinds = (NORMAL, UNUSED, 0, BYTE) if byte_level else (NORMAL, UNUSED, 0)
    for i in np.flatnonzero(~np.isin(types, kinds)).tolist():
        if ids.get(tokens[i]) == i:
            del ids[tokens[i]]
    ids.pop(b"", None)
    return ids


def _strings(file: Model[Any], key: str) -> list[bytes]:
    try:
        return file.metadata.strings(key)
    except (KeyError, TypeError):
        raise ModelFileError(
            f"{file.path}: the metadata key {key!r} should be an array of strings; convert the model anew."
        ) from None


def _numbers(file: Model[Any], key: str, n: int, dtype: Any) -> NDArray[Any] | None:
    if key not in file.metadata:
        return None
    values = file.get(key, np.ndarray)
    if len(values) < n:
        raise ModelFileError(f"{file.path}: {key} has {len(values):,} values for {n:,} tokens; convert the model anew.")
    values = values[:n].astype(dtype)
    if values.dtype.kind == "f" and np.isnan(values).any():
        raise ModelFileError(f"{file.path}: {key} of token {int(np.flatnonzero(np.isnan(values))[0])} is not a number.")
    return values


def _token_id(file: Model[Any], key: str, n: int) -> int | None:
    if key not in file.metadata:
        return None
    value = file.get(key, int)
    if not 0 <= value < n:
        raise ModelFileError(
            f"{file.path}: {key} is {value}, and the vocabulary has {n:,} tokens; convert the model anew."
        )
    return value


def _rule(file: Model[Any], name: str | None) -> Rule:
    name = name or file.get("tokenizer.ggml.pre", str, "")
    if not name:
        logger.warning(
            "%s does not say how its tokenizer cuts words (tokenizer.ggml.pre): "
            "the default is used, and answers may be worse; convert the model anew.",
            file.path,
        )
        name = "default"
    if name not in RULES:
        raise UnsupportedFormatError(
            f"{file.path} cuts words by the rule {name!r} (tokenizer.ggml.pre), and edgert knows "
            f"{', '.join(sorted(RULES))}."
        )
    return RULES[name]


def _warn_of_oddities(file: Model[Any], tokens: list[bytes], ids: dict[bytes, int]) -> None:
    if b"" in ids:
        logger.warning("%s: token %d of the vocabulary is empty.", file.path, ids[b""])
    if len(ids) != len(tokens):
        i, token = next((i, token) for i, token in enumerate(tokens) if ids[token] != i)
        logger.warning(
            "%s has tokens twice (%d): %d and %d are both %r; text gives the first.",
            file.path,
            len(tokens) - len(ids),
            ids[token],
            i,
            token.decode("utf-8", "replace"),
        )
