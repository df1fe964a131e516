"""Byte-level tokenizers that are not in tokenizer.json, as the tokenizer.json that they stand for.

Source: the formats of tiktoken's files, of Mistral's tekken.json, of GPT-2's vocab.json and merges.txt; HunYuan's
tokenization_hy.py.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize.checkpoint.config import load_json

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# file -> how it cuts words, and the tokens behind its ranks, which only its Python code lists
_TIKTOKEN = {
    "hy.tiktoken": (
        _QWEN2,
        ("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *(f"<|extra_{i}|>" for i in range(205))),
    )
}
# tokenizer_class -> how its vocab.json and merges.txt cut words; "" as GPT-2 does
_PAIRS = {"GPT2Tokenizer": "", "GPT2TokenizerFast": "", "Qwen2Tokenizer": _QWEN2, "Qwen2TokenizerFast": _QWEN2}
_MAX_BYTES = 1 << 28
_BY_HAND = (
    "make tokenizer.json of it with transformers (convert_slow_tokenizer.TikTokenConverter, with the pattern and the "
    "special tokens of that code, then converted().save('tokenizer.json'))"
)


def find_lists(folder: Path, settings: Mapping[str, Any], n_vocab: int) -> tuple[Path, dict[str, Any]] | None:
    """The file and what it stands for, None where the folder has no such one.

    settings:  tokenizer_config.json
    n_vocab:   rows of the table of tokens

    Raises: ModelFileError; UnsupportedFormatError for ranks whose rules are in no file that edgert reads.
    """
    for path in sorted(folder.glob("*.tiktoken")):
        if path.name not in _TIKTOKEN:
            raise UnsupportedFormatError(
                f"{path} holds a tokenizer whose rules are in Python code beside it: {_BY_HAND}."
            )
        pattern, special = _TIKTOKEN[path.name]
        ranks = _read_ranks(path)
        ids = range(len(ranks), n_vocab)
        added = [{"id": id, "content": text, "special": True} for id, text in zip(ids, special, strict=False)]
        return path, _of_ranks(ranks, 0, pattern, added)
    if (folder / "tekken.json").is_file():
        return folder / "tekken.json", _of_tekken(folder / "tekken.json")
    path, merges = folder / "vocab.json", folder / "merges.txt"
    cuts = _PAIRS.get(str(settings.get("tokenizer_class")))
    if path.is_file() and merges.is_file() and cuts is not None:
        lines = [line for line in _text(merges).split("\n") if line and not line.startswith("#version")]
        return path, _document(load_json(path), lines, cuts, [])
    return None


def is_rank_list(data: bytes) -> bool:
    """Whether a file that should be SentencePiece's is tiktoken's: lines of Base64 and a number."""
    try:
        text, number = data.split(b"\n", 1)[0].split()
        return bool(base64.b64decode(text, validate=True)) and number.isdigit()
    except (ValueError, binascii.Error):
        return False


def refused_rank_list(path: Path) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"{path} is tiktoken's list of ranks and no SentencePiece model; its rules are in Python code: {_BY_HAND}."
    )


def _text(path: Path) -> str:
    if path.stat().st_size > _MAX_BYTES:
        raise ModelFileError(f"{path} has {path.stat().st_size:,} bytes, too many for a tokenizer.")
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path} is not UTF-8 at byte {error.start}: download it again.") from None


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Tokens by their bytes; the rank is the number of the line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            token, _ = line.split()
            ranks.setdefault(base64.b64decode(token, validate=True), len(ranks))
        except (ValueError, binascii.Error):
            raise ModelFileError(f"{path}: line {number} is no token and rank: download it again.") from None
    return _whole(path, ranks)


def _of_tekken(path: Path) -> dict[str, Any]:
    """Special tokens come first; of the others those that the model was trained with count."""
    document = load_json(path)
    config, entries, special = document.get("config"), document.get("vocab"), document.get("special_tokens") or []
    try:
        n_special = config["default_num_special_tokens"]  # type: ignore[index]  # what is no object raises TypeError
        n_ranks = config["default_vocab_size"] - n_special  # type: ignore[index]
        pattern = str(config["pattern"])  # type: ignore[index]
        ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in entries[:n_ranks]}  # type: ignore[index]
        added = [{"id": entry["rank"], "content": str(entry["token_str"]), "special": True} for entry in special]
    except (TypeError, KeyError, ValueError, binascii.Error):
        raise ModelFileError(f"{path} is no tekken.json of a known form: download it again.") from None
    if sorted(map(str, ranks.values())) != sorted(map(str, range(len(ranks)))):
        raise ModelFileError(f"{path}: its ranks are not those from 0 to {len(ranks) - 1}: download it again.")
    found = _of_ranks(_whole(path, ranks), n_special, pattern, added)
    found["model"]["ignore_merges"] = True
    return found


def _whole(path: Path, ranks: dict[bytes, int]) -> dict[bytes, int]:
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelFileError(f"{path} lacks tokens of single bytes: download it again.")
    return ranks


def _of_ranks(ranks: Mapping[bytes, int], first: int, pattern: str, added: list[dict[str, Any]]) -> dict[str, Any]:
    """first:  the id of rank 0"""
    signs = _signs()

    def written(token: bytes) -> str:
        return "".join(signs[byte] for byte in token)

    vocab = {written(token): first + rank for token, rank in ranks.items()}
    pairs = (_last_merge(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1)
    merges = [[written(left), written(right)] for left, right in filter(None, pairs)]
    return _document(vocab, merges, pattern, added)


def _last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts that merging by rank joins to the token at last, None where it does not come to that."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right) for left, right in itertools.pairwise(parts)]
        known = [(rank, i) for i, rank in enumerate(joined) if rank is not None and rank < ranks[token]]
        if not known:
            return None
        i = min(known)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def _document(vocab: dict[str, Any], merges: list[Any], pattern: str, added: list[dict[str, Any]]) -> dict[str, Any]:
    """What tokenizer.json would hold. pattern: of words, "" for GPT-2's."""
    cutter: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if pattern:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        cutter = {"type": "Sequence", "pretokenizers": [split, {**cutter, "use_regex": False}]}
    return {
        "added_tokens": added,
        "pre_tokenizer": cutter,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def _signs() -> list[str]:
    """The character that byte-level vocabularies write for each byte: itself where it can be seen."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(256)]
