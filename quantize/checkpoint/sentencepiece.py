"""Reads a SentencePiece model (tokenizer.model), a protocol buffer of which four fields matter.

Source: sentencepiece's sentencepiece_model.proto; the wire format of protocol buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgert.errors import ModelFileError, UnsupportedFormatError
from edgert.quantize.checkpoint.rank_lists import is_rank_list, refused_rank_list

_MAX_BYTES = 1 << 28
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BPE = 2
_KINDS = {1: "unigram", 2: "BPE", 3: "word", 4: "character"}


@dataclass(frozen=True)
class Pieces:
    """What a SentencePiece model consists of.

    tokens, scores, types:  of each piece; types are GGUF's, which are the same numbers
    add_space_prefix:       whether text gets a space in front
    """

    tokens: list[bytes]
    scores: list[float]
    types: list[int]
    add_space_prefix: bool


def read_pieces(path: Path) -> Pieces:
    """Raises: ModelFileError when it is no such file; UnsupportedFormatError for models that do not merge by score."""
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise ModelFileError(f"{path} has {size:,} bytes, too many for a tokenizer.")
    tokens: list[bytes] = []
    scores: list[float] = []
    types: list[int] = []
    kind, prefix = 1, True
    data = path.read_bytes()
    if is_rank_list(data):
        raise refused_rank_list(path)
    try:
        for number, value in _fields(data):
            if number == 1:
                piece = dict(_fields(_message(value)))
                tokens.append(_message(piece[1]))
                tokens[-1].decode()
                scores.append(struct.unpack("<f", _message(piece.get(2, bytes(4))))[0])
                types.append(_integer(piece.get(3, 1)))
            elif number == 2:
                kind = _integer(dict(_fields(_message(value))).get(3, 1))
            elif number == 3:
                prefix = bool(dict(_fields(_message(value))).get(3, 1))
    except (ValueError, KeyError, struct.error):
        raise ModelFileError(f"{path} is not a SentencePiece model: download it again.") from None
    if not tokens or not set(types) <= set(range(1, 7)):
        raise ModelFileError(f"{path} is not a SentencePiece model: download it again.")
    if kind != _BPE:
        raise UnsupportedFormatError(
            f"{path} is a SentencePiece model of the kind {_KINDS.get(kind, kind)}; edgert converts BPE: make "
            "tokenizer.json of it with transformers (AutoTokenizer.from_pretrained(folder).save_pretrained(folder))."
        )
    return Pieces(tokens, scores, types, prefix)


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """The fields of a message: number, and a varint's value or the bytes of anything else."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == _VARINT:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            n, position = _varint(data, position)
        elif kind in (_FIXED32, _FIXED64):
            n = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind}")
        if n > len(data) - position:
            raise ValueError("a field reaches beyond the end")
        yield tag >> 3, data[position : position + n]
        position += n


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError("a number does not end")


def _message(value: bytes | int) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where bytes should be")
    return value


def _integer(value: bytes | int) -> int:
    if isinstance(value, bytes):
        raise ValueError("bytes where a number should be")
    return value
