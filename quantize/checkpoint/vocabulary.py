"""The tokenizer's files as GGUF keys: tokens with types, scores or merges, special ids, chat templates.

Source: the layout of tokenizer.json (tokenizers) and tokenizer_config.json (transformers); llama.cpp's keys.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize.checkpoint.config import load_json
from edgert.quantize.checkpoint.pretokenizer import pre_tokenizer_name
from edgert.quantize.checkpoint.rank_lists import find_lists
from edgert.quantize.checkpoint.sentencepiece import read_pieces
from edgert.quantize.checkpoint.special_tokens import special_keys
from edgert.quantize.checkpoint.tokens import SPACE, Added, Tokens, Type
from edgert.quantize.checkpoint.word_kinds import read_word_list, unigrams, word_pieces
from edgert.quantize.gguf_value import Value

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_TABLES: dict[str, type] = {"BPE": dict, "WordPiece": dict, "Unigram": list}  # how each kind lists its tokens
_UNREACHABLE = -1e6  # below every token that merging makes


def vocabulary_keys(folder: Path, config: dict[str, Any], n_vocab: int, notices: list[str]) -> dict[str, Value]:
    """All `tokenizer.*` keys.

    config:   config.json
    n_vocab:  rows of the table of tokens
    notices:  sentences for the user are appended

    Raises: UnsupportedFormatError for kinds of tokenizers that GGUF's llama families do not have; ModelFileError.
    """
    path = folder / "tokenizer.json"
    tokenizer = load_json(path)
    settings = load_json(folder / "tokenizer_config.json")
    if not tokenizer and (folder / "vocab.txt").is_file():
        path = folder / "vocab.txt"
        tokenizer = read_word_list(path, settings)
    sentencepiece = (folder / "tokenizer.model").is_file()
    if not tokenizer and not sentencepiece:
        path, tokenizer = find_lists(folder, settings, n_vocab) or (path, tokenizer)
    added = _added(folder, tokenizer, settings)
    tokens = Tokens(n_vocab, notices)
    prefix = None
    kind = _kind(path, tokenizer)
    if kind == "WordPiece":
        _vocabulary(path, tokenizer, n_vocab)
        keys = word_pieces(path, tokenizer, tokens, added)
    elif kind == "Unigram":
        keys = unigrams(path, tokenizer, tokens, added)
    elif kind == "BPE" and not tokenizer["model"].get("byte_fallback"):
        keys = _byte_level(path, tokenizer, tokens, added)
        prefix = settings.get("add_prefix_space")
    elif sentencepiece:
        prefix = _sentencepiece(folder / "tokenizer.model", tokens, added)
        keys = tokens.keys("llama", "default")
    elif tokenizer:
        _scored_by_merges(path, tokenizer, tokens, added)
        keys = tokens.keys("llama", "default")
    else:
        raise UnsupportedFormatError(
            f"{folder} has neither tokenizer.json nor tokenizer.model: make the first with transformers "
            "(AutoTokenizer.from_pretrained(folder).save_pretrained(folder))."
        )
    if tokenizer and "tokenizer.ggml.scores" in keys:
        prefix = _adds_space(tokenizer)
    if type(config.get("type_vocab_size")) is int and kind in ("WordPiece", "Unigram"):
        keys["tokenizer.ggml.token_type_count"] = Value.u32(config["type_vocab_size"])
    if isinstance(prefix, bool):
        keys["tokenizer.ggml.add_space_prefix"] = Value.boolean(prefix)
    ids = {text.decode("utf-8", "replace"): i for i, text in reversed(list(enumerate(tokens.texts)))}
    ids |= {token.text: token.id for token in added if token.id < n_vocab}
    return keys | special_keys(folder, config, tokenizer, settings, ids, n_vocab, notices)


def _kind(path: Path, tokenizer: dict[str, Any]) -> str:
    """Which kind of model tokenizer.json has, "" without that file."""
    model = tokenizer.get("model")
    kind: Any = (model.get("type") or "BPE") if isinstance(model, dict) else None
    if tokenizer and kind in (*_TABLES, None):
        if not isinstance(model, dict) or not isinstance(model.get("vocab"), _TABLES[kind]):
            raise ModelFileError(f"{path} has no model with a vocabulary: download it again.")
    elif tokenizer:
        raise UnsupportedFormatError(f"{path} is a tokenizer of the kind {kind}; edgert converts {', '.join(_TABLES)}.")
    return str(kind) if tokenizer else ""


def _added(folder: Path, tokenizer: dict[str, Any], settings: dict[str, Any]) -> list[Added]:
    """Added tokens of all files that list them, the first list that knows an id wins."""
    entries: list[Any] = list(tokenizer.get("added_tokens") or [])
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        entries += [{**entry, "id": int(id)} for id, entry in decoder.items() if isinstance(entry, dict)]
    entries += [{"id": id, "content": text} for text, id in load_json(folder / "added_tokens.json").items()]
    found: dict[int, Added] = {}
    for entry in entries:
        id, text = entry.get("id"), entry.get("content")
        if type(id) is not int or id < 0 or not isinstance(text, str):
            raise ModelFileError(f"{folder}: the added token {entry!r} of its tokenizer has no id or no content.")
        found.setdefault(id, Added(id, text, bool(entry.get("special"))))
    return list(found.values())


def _vocabulary(path: Path, tokenizer: dict[str, Any], n_vocab: int) -> dict[str, int]:
    """The model's own tokens; all must have a row in the table of tokens."""
    vocab = tokenizer["model"]["vocab"]
    for text, id in vocab.items():
        if type(id) is not int or id < 0:
            raise ModelFileError(f"{path}: the token {text!r} has the id {id!r}.")
    last = max(vocab.values(), default=-1)
    if last >= n_vocab:
        raise ModelFileError(
            f"{path} has a token with the id {last}, and the table of tokens has {n_vocab:,} rows: "
            "tokenizer and weights belong to different models."
        )
    return dict(vocab)


def _merges(path: Path, tokenizer: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs, the most important first; files have them as lists or as `left right`."""
    pairs = []
    for merge in tokenizer["model"].get("merges") or []:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise ModelFileError(f"{path}: the merge {merge!r} is no pair.")
        pairs.append((parts[0], parts[1]))
    return pairs


def _byte_level(path: Path, tokenizer: dict[str, Any], tokens: Tokens, added: list[Added]) -> dict[str, Value]:
    for text, id in _vocabulary(path, tokenizer, len(tokens.texts)).items():
        tokens.put(id, text, Type.NORMAL)
    tokens.put_added(added)
    merges = _merges(path, tokenizer)
    if any(" " in part for pair in merges for part in pair):
        raise UnsupportedFormatError(f"{path} merges spaces, which byte-level tokenizers write as other characters.")
    keys = tokens.keys("gpt2", pre_tokenizer_name(path, tokenizer))
    return keys | {"tokenizer.ggml.merges": Value.strings(f"{left} {right}" for left, right in merges)}


def _sentencepiece(path: Path, tokens: Tokens, added: list[Added]) -> bool:
    """Fills the tokens from tokenizer.model; returns whether it puts a space before a text."""
    pieces = read_pieces(path)
    if len(pieces.tokens) > len(tokens.texts):
        raise ModelFileError(
            f"{path} has {len(pieces.tokens):,} tokens, and the table of tokens {len(tokens.texts):,} rows: "
            "tokenizer and weights belong to different models."
        )
    for id, (text, score, type) in enumerate(zip(pieces.tokens, pieces.scores, pieces.types, strict=True)):
        if type == Type.USER_DEFINED:
            text = text.replace(SPACE.encode(), b" ")
        tokens.put(id, text, type, score)
    unknown = set(np.flatnonzero(tokens.types == Type.UNKNOWN).tolist())
    tokens.put_added([token for token in added if token.id not in unknown])
    return pieces.add_space_prefix


def _scored_by_merges(path: Path, tokenizer: dict[str, Any], tokens: Tokens, added: list[Added]) -> None:
    """SentencePiece's scores from the ranks of merges: the earlier a token is made, the higher it scores."""
    vocab = _vocabulary(path, tokenizer, len(tokens.texts))
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(_merges(path, tokenizer)):
        scores.setdefault(left + right, -float(rank))
    for text, id in vocab.items():
        is_byte = _BYTE.fullmatch(text) is not None
        score = 0.0 if is_byte or len(text) == 1 else scores.get(text, _UNREACHABLE)
        tokens.put(id, text, Type.BYTE if is_byte else Type.NORMAL, score)
    unknown = vocab.get(tokenizer["model"].get("unk_token") or "<unk>")
    tokens.put_added([token for token in added if token.id != unknown])
    if unknown is not None:
        tokens.types[unknown] = Type.UNKNOWN


def _adds_space(tokenizer: dict[str, Any]) -> bool:
    """Whether tokenizer.json puts a space before a text, in any of the ways to say so."""
    normalizer = tokenizer.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    if any(step.get("type") == "Prepend" and step.get("prepend") == SPACE for step in steps):
        return True
    cutter = tokenizer.get("pre_tokenizer") or {}
    for step in cutter.get("pretokenizers", [cutter]):
        if step.get("type") == "Metaspace":
            return step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
    return False
