"""Tokenizers that do not merge pairs: WordPiece (BERT's) and Unigram (T5's, XLM-R's), as GGUF stores them.

Source: the layout of tokenizer.json (tokenizers) and vocab.txt (transformers); llama.cpp's keys.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize.checkpoint.tokens import SPACE, Added, Tokens, Type
from edgert.quantize.gguf_value import Value

_CONTINUES = "##"
_LONGEST_WORD = 100  # what every runtime takes for granted


def read_word_list(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """vocab.txt as the tokenizer.json that it stands for. Raises: ModelFileError when it is not UTF-8."""
    try:
        words = path.read_bytes().decode().splitlines()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path} is not UTF-8 at byte {error.start}: download it again.") from None
    normalizer = {
        "type": "BertNormalizer",
        "lowercase": settings.get("do_lower_case", True),
        "strip_accents": settings.get("strip_accents"),
    }
    special = [
        {"id": i, "content": word, "special": True}
        for i, word in enumerate(words)
        if word in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    ]
    return {
        "added_tokens": special,
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {"type": "WordPiece", "vocab": {word: i for i, word in enumerate(words)}},
    }


def word_pieces(path: Path, tokenizer: dict[str, Any], tokens: Tokens, added: list[Added]) -> dict[str, Value]:
    """Tokens and normalizer; words begin with U+2581 in GGUF, and the others lose their ##.

    Raises: UnsupportedFormatError naming what GGUF cannot say.
    """
    model, normalizer = tokenizer["model"], tokenizer.get("normalizer") or {}
    stated = (
        ("model.continuing_subword_prefix", model.get("continuing_subword_prefix", _CONTINUES), _CONTINUES),
        ("model.max_input_chars_per_word", model.get("max_input_chars_per_word", _LONGEST_WORD), _LONGEST_WORD),
        ("normalizer.type", normalizer.get("type"), "BertNormalizer"),
        ("normalizer.clean_text", normalizer.get("clean_text", True), True),
        ("normalizer.handle_chinese_chars", normalizer.get("handle_chinese_chars", True), True),
        ("pre_tokenizer.type", (tokenizer.get("pre_tokenizer") or {}).get("type"), "BertPreTokenizer"),
    )
    for name, value, needed in stated:
        if value != needed:
            raise UnsupportedFormatError(f"{path}: {name} is {value!r}, and GGUF's WordPiece means {needed!r}.")
    special = {token.id for token in added if token.type == Type.CONTROL}
    for text, id in model["vocab"].items():
        if id not in special:
            tokens.put(id, text[2:] if text.startswith(_CONTINUES) else SPACE + text, Type.NORMAL)
    tokens.put_added([token for token in added if token.id in special or token.id not in model["vocab"].values()])
    lowercase = bool(normalizer.get("lowercase", True))
    strips = normalizer.get("strip_accents")
    return tokens.keys("bert", "default") | {
        "tokenizer.ggml.normalizer.lowercase": Value.boolean(lowercase),
        "tokenizer.ggml.normalizer.strip_accents": Value.boolean(lowercase if strips is None else bool(strips)),
    }


def unigrams(path: Path, tokenizer: dict[str, Any], tokens: Tokens, added: list[Added]) -> dict[str, Value]:
    """Tokens, scores and the rules that normalize a text.

    Raises: UnsupportedFormatError naming what GGUF cannot say; ModelFileError.
    """
    model = tokenizer["model"]
    if model.get("byte_fallback"):
        raise UnsupportedFormatError(f"{path}: model.byte_fallback is true, which GGUF's Unigram does not have.")
    unknown = model.get("unk_id")
    if len(model["vocab"]) > len(tokens.texts):
        raise ModelFileError(
            f"{path} has {len(model['vocab']):,} tokens, and the table of tokens {len(tokens.texts):,} rows: "
            "tokenizer and weights belong to different models."
        )
    for id, entry in enumerate(model["vocab"]):
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ModelFileError(f"{path}: the token {entry!r} is no pair of text and score.")
        tokens.put(id, entry[0], Type.UNKNOWN if id == unknown else Type.NORMAL, float(entry[1]))
    tokens.put_added([token for token in added if token.id != unknown])
    keys = tokens.keys("t5", "default")
    merges = _cuts_at_spaces(tokenizer)
    for step in _steps(tokenizer.get("normalizer"), "normalizers"):
        kind = step.get("type")
        if kind == "Precompiled":
            try:
                blob = base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
            except (binascii.Error, ValueError, TypeError):
                raise ModelFileError(f"{path}: its precompiled_charsmap is no Base64: download it again.") from None
            if blob:
                keys["tokenizer.ggml.precompiled_charsmap"] = Value.array(np.frombuffer(blob, np.uint8))
        elif kind == "Replace" and step.get("pattern") == {"Regex": " {2,}"}:
            merges = True
        elif kind not in ("Strip", "Prepend"):
            raise UnsupportedFormatError(f"{path}: its normalizer has the step {kind}, which GGUF's Unigram has not.")
    return keys | {"tokenizer.ggml.remove_extra_whitespaces": Value.boolean(merges)}


def _cuts_at_spaces(tokenizer: dict[str, Any]) -> bool:
    steps = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    return any(step.get("type") == "WhitespaceSplit" for step in steps)


def _steps(value: Any, name: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, those of sequences in their place."""
    if not isinstance(value, dict):
        return
    if value.get("type") != "Sequence":
        yield value
        return
    for step in value.get(name) or []:
        yield from _steps(step, name)
