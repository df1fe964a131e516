"""The tokens of a model as GGUF stores them, checked once and frozen."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.tokenizer.charsmap import Charsmap
from edgert.tokenizer.pretokenizer import RULES, Rule

if TYPE_CHECKING:
    from edgert.quantize.gguf_file import Model

logger = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True)
class Kind:
    """What one value of tokenizer.ggml.model means where the file does not say.

    has_scores, has_merges:  which of the two arrays it reads
    add_bos, add_eos:        whether a text gets the begin and the end token
    end:                     which token the end is
    oldest:                  special ids that files meant before they named them
    """

    title: str
    has_scores: bool = False
    has_merges: bool = False
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    end: str = "eos"
    oldest: Mapping[str, int] = field(default_factory=dict)


KINDS = {
    "gpt2": Kind("byte-level BPE", has_merges=True, oldest={"bos": 11, "eos": 11}),
    "llama": Kind(
        "SentencePiece with scores",
        has_scores=True,
        add_bos=True,
        add_space_prefix=True,
        oldest={"unknown": 0, "bos": 1, "eos": 2},
    ),
    "gemma4": Kind("BPE with byte fallback", has_merges=True),
    "bert": Kind(
        "WordPiece",
        add_bos=True,
        add_eos=True,
        end="seperator",
        oldest={"unknown": 100, "bos": 101, "seperator": 102},
    ),
    "t5": Kind("Unigram", has_scores=True, add_eos=True, oldest={"unknown": 2, "eos": 1}),
}
_NAMED = ("bos", "eos", "eot", "eom", "unknown", "cls", "seperator")  # the last in GGUF's own spelling
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
    scores:    float32 (n_vocab,), SentencePiece and Unigram only
    merges:    `left right`, the most important first, BPE only
    rule:      how text is cut into words, BPE only
    end_ids:   tokens after which the model has nothing more to say
    suffix_id: ends a text to which nothing is added; None: nothing does
    rstrip:    special tokens that swallow the white space behind them (Phi-3's)
    lowercase, strip_accents:  WordPiece's normalizer
    charsmap:  Unigram's normalizer
    merge_spaces:  whether Unigram takes any number of spaces as one, and none at the ends
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
    suffix_id: int | None = None
    lowercase: bool = True
    strip_accents: bool = True
    charsmap: Charsmap = field(default_factory=Charsmap)
    merge_spaces: bool = False

    @classmethod
    def from_gguf(cls, file: Model[Any]) -> Vocabulary:
        """Reads and checks the tokenizer.* keys.

        Raises: ModelFileError that names the key; UnsupportedFormatError for other kinds of tokenizers.
        """
        model = file.get("tokenizer.ggml.model", str)
        if model not in KINDS:
            raise UnsupportedFormatError(
                f"{file.path} has a tokenizer of the kind {model!r} (tokenizer.ggml.model), "
                f"and edgert knows {', '.join(f'{name} ({kind.title})' for name, kind in KINDS.items())}."
            )
        kind = KINDS[model]
        tokens = _strings(file, "tokenizer.ggml.tokens")
        n = len(tokens)
        if not n:
            raise ModelFileError(f"{file.path}: tokenizer.ggml.tokens is empty; convert the model anew.")
        types = _numbers(file, "tokenizer.ggml.token_type", n, np.int32)
        types = np.full(n, NORMAL, np.int32) if types is None else types
        rule = _rule(file, "gemma4" if model == "gemma4" else None) if kind.has_merges else None
        named = _named_ids(file, n, kind)
        ids = _first_ids(tokens)
        _warn_of_oddities(file, tokens, ids)
        end_ids, eot_id = _end_ids(named, ids, types)
        rstrip = _rstrip(file, ids, types)
        lowercase = file.get("tokenizer.ggml.normalizer.lowercase", bool, True)
        return cls(
            model=model,
            tokens=tokens,
            ids=_ordinary(tokens, ids, types, model == "gpt2"),
            types=types,
            scores=_scores(file, n, model == "t5") if kind.has_scores else None,
            merges=_strings(file, "tokenizer.ggml.merges") if kind.has_merges else None,
            rule=rule,
            bos_id=named["bos"],
            eos_id=named["eos"],
            eot_id=eot_id,
            unk_id=named["unknown"],
            end_ids=end_ids,
            add_bos=named["bos"] is not None
            and file.get("tokenizer.ggml.add_bos_token", bool, kind.add_bos or bool(rule and rule.add_bos)),
            add_space_prefix=not kind.has_merges
            and file.get("tokenizer.ggml.add_space_prefix", bool, kind.add_space_prefix),
            rstrip=rstrip,
            suffix_id=named[kind.end] if file.get("tokenizer.ggml.add_eos_token", bool, kind.add_eos) else None,
            lowercase=lowercase,
            strip_accents=file.get("tokenizer.ggml.normalizer.strip_accents", bool, lowercase),
            charsmap=_charsmap(file),
            merge_spaces=file.get("tokenizer.ggml.remove_extra_whitespaces", bool, False),
        )


def _named_ids(file: Model[Any], n: int, kind: Kind) -> dict[str, int | None]:
    ids = {name: _token_id(file, f"tokenizer.ggml.{name}_token_id", n) for name in _NAMED}
    if ids["bos"] is None:
        ids["bos"] = ids["cls"]
    if ids["bos"] is None and ids["eos"] is None and n > max(kind.oldest.values(), default=0):
        ids |= {name: id for name, id in kind.oldest.items() if ids[name] is None or name in ("bos", "eos")}
    return ids


def _charsmap(file: Model[Any]) -> Charsmap:
    key = "tokenizer.ggml.precompiled_charsmap"
    if key not in file.metadata:
        return Charsmap()
    try:
        return Charsmap(file.get(key, np.ndarray).astype(np.uint8).tobytes())
    except ValueError as error:
        raise ModelFileError(f"{file.path}: {key} is damaged: {error}; convert the model anew.") from None


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


def _scores(file: Model[Any], n: int, needed: bool) -> NDArray[np.float32] | None:
    if needed:
        file.get("tokenizer.ggml.scores", np.ndarray)
    return _numbers(file, "tokenizer.ggml.scores", n, np.float32)


def _numbers(file: Model[Any], key: str, n: int, dtype: Any) -> NDArray[Any] | None:
    if key not in file.metadata:
        return None
    values = file.get(key, np.ndarray)
    if len(values) < n:
        raise ModelFileError(f"{file.path}: {key} has {len(values):,} values for {n:,} tokens; convert the model anew.")
    values = values[:n].astype(dtype)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        i = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ModelFileError(
            f"{file.path}: {key} of token {i} is {values[i]}, no finite number; convert the model anew."
        )
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
