"""The kinds that merge pairs: byte-level BPE, SentencePiece's BPE by scores, and BPE with byte fallback."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from edgert.tokenizer.algorithm import SPACE, Algorithm, byte_value, nothing
from edgert.tokenizer.merging import merge
from edgert.tokenizer.pretokenizer import Rule, in_parts, splitter
from edgert.tokenizer.vocabulary import BYTE, Vocabulary


class ByteLevel(Algorithm):
    """Each byte is a character of its own, words are cut by a rule, pairs are merged by their rank."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.rank = _merge_ranks(vocabulary)

    @cached_property
    def rule(self) -> Rule:
        assert self.vocabulary.rule is not None
        return self.vocabulary.rule

    def words(self, text: str, first: bool) -> Iterable[str]:
        for part in in_parts(text, self.rule):
            for word, _ in self._split(part):
                yield word

    @cached_property
    def _split(self) -> Callable[[str], Iterable[tuple[str, tuple[int, int]]]]:
        split: Callable[[str], Iterable[tuple[str, tuple[int, int]]]] = splitter(self.rule).pre_tokenize_str
        return split

    def fewest(self, word: str) -> int:
        return len(word.encode().translate(None, self._lost)) // self._longest

    @cached_property
    def _longest(self) -> int:
        """Bytes of a text that a token stands for at most."""
        return max(len(token.decode("utf-8", "replace")) for token in self.ids)

    @cached_property
    def _lost(self) -> bytes:
        """Bytes that are no tokens."""
        return bytes(b for b, symbol in enumerate(_BYTE_SYMBOLS) if symbol not in self.ids)

    def encode(self, word: str, beat: Callable[[], object] = nothing) -> Iterable[int]:
        symbols = [_BYTE_SYMBOLS[b] for b in word.encode()]
        if self.rule.whole_words and (whole := self.ids.get(b"".join(symbols))) is not None:
            return [whole]
        out: list[int] = []
        for symbol in merge(symbols, self.rank, b" ", beat):
            found = self.ids.get(symbol)
            if found is not None:
                out.append(found)
            else:
                parts = [symbol[i : i + 2] if symbol[i] >= 0x80 else symbol[i : i + 1] for i in _starts(symbol)]
                out.extend(i for i in map(self.ids.get, parts) if i is not None)
        return out

    def text(self, token: bytes) -> bytes:
        try:
            return bytes(map(_SYMBOL_BYTES.__getitem__, token.decode()))
        except (KeyError, UnicodeDecodeError):
            return token  # a word that was added in plain UTF-8


class SentencePiece(Algorithm):
    """Words begin with U+2581, pairs are merged by the score of what they become; unknown characters are bytes."""

    joiner = b""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.opens_with_space = vocabulary.add_space_prefix
        self.rank = self._ranks()

    def _ranks(self) -> Callable[[bytes], int | None]:
        return _score_ranks(self.vocabulary).get

    def words(self, text: str, first: bool) -> Iterable[str]:
        prefix = SPACE if first and self.opens_with_space else ""
        return self._split(prefix + text.replace(" ", SPACE))

    @cached_property
    def _split(self) -> Callable[[str], Iterable[str]]:
        return word_pattern(self.ids).findall

    def fewest(self, word: str) -> int:
        return len(word.encode()) // self._longest

    @cached_property
    def _longest(self) -> int:
        """Bytes of a word that a token stands for at most."""
        return max(map(len, self.ids)) if len(self.byte_ids) == 256 else sys.maxsize

    def encode(self, word: str, beat: Callable[[], object] = nothing) -> Iterable[int]:
        out: list[int] = []
        for symbol in merge([character.encode() for character in word], self.rank, self.joiner, beat):
            found = self.ids.get(symbol)
            if found is not None:
                out.append(found)
            elif self.byte_ids:
                out.extend(i for i in map(self.byte_ids.get, symbol) if i is not None)
            elif self.vocabulary.unk_id is not None:
                out.append(self.vocabulary.unk_id)
        return out

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        tokens, types = self.vocabulary.tokens, self.vocabulary.types
        return {byte_value(tokens[i]): i for i in np.flatnonzero(types == BYTE).tolist()[::-1]}


class ByteFallback(SentencePiece):
    """SentencePiece's characters with merges in place of scores; words are lines, or as the rule says."""

    joiner = b" "

    def _ranks(self) -> Callable[[bytes], int | None]:
        return _merge_ranks(self.vocabulary)

    @cached_property
    def _split(self) -> Callable[[str], Iterable[str]]:
        assert self.vocabulary.rule is not None
        return re.compile(self.vocabulary.rule.patterns[0]).findall

    def encode(self, word: str, beat: Callable[[], object] = nothing) -> Iterable[int]:
        if not word.strip("\n") and (whole := self.ids.get(word.encode())) is not None:
            return [whole]  # a run of newlines that is a token
        return super().encode(word, beat)


def _merge_ranks(v: Vocabulary) -> Callable[[bytes], int | None]:
    assert v.merges is not None
    return dict(zip(reversed(v.merges), range(len(v.merges) - 1, -1, -1), strict=True)).get


def _score_ranks(v: Vocabulary) -> dict[bytes, int]:
    """Place of each token in the order of scores, the highest first; equal scores have equal places."""
    ids = v.ids
    if v.scores is None:
        return dict.fromkeys(ids, 0)
    order = np.fromiter(ids.values(), np.int64, len(ids))
    scores = v.scores[order]
    if np.all(scores[1:] < scores[:-1]) and np.all(order[1:] > order[:-1]):
        return ids  # as most files have it: the ids are the places
    _, places = np.unique(-scores, return_inverse=True)
    return dict(zip(ids, places.tolist(), strict=True))


def word_pattern(ids: dict[bytes, int]) -> re.Pattern[str]:
    """Cuts before each space, where no token reaches across, so that words can be merged one by one."""
    across = set()
    for token in _with_inner_space(ids):
        for at in range(1, len(token)):
            if token[at] == SPACE and token[:at].strip(SPACE):
                across.add(f"(?<={re.escape(token[:at])})(?={re.escape(token[at:])}){SPACE}")
    inner = "|".join([f"[^{SPACE}]+", *sorted(across)])
    return re.compile(f"{SPACE}*(?:{inner})+|{SPACE}+")


def _with_inner_space(ids: dict[bytes, int]) -> set[str]:
    """Tokens in which a space stands behind another character; few vocabularies have any."""
    joined = b"\0" + b"\0".join(ids) + b"\0"
    data = np.frombuffer(joined, np.uint8)
    one, two, three = SPACE.encode()
    space = (data[:-2] == one) & (data[1:-1] == two) & (data[2:] == three)
    at = np.flatnonzero(space)
    inner = at[(data[at - 1] != 0) & ~space[at - 3]]
    cuts = ((joined.rfind(b"\0", 0, i) + 1, joined.find(b"\0", i)) for i in inner.tolist())
    return {joined[begin:end].decode("utf-8", "replace") for begin, end in cuts}


def _byte_symbols() -> list[bytes]:
    """GPT-2's printable character for each byte, in UTF-8."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return [(chr(b) if b in printable else chr(256 + others.index(b))).encode() for b in range(256)]


_BYTE_SYMBOLS = _byte_symbols()
_SYMBOL_BYTES = {symbol.decode(): b for b, symbol in enumerate(_BYTE_SYMBOLS)}


def _starts(symbol: bytes) -> Iterable[int]:
    """Where the characters of UTF-8 begin."""
    return (i for i, b in enumerate(symbol) if b & 0xC0 != 0x80)


__all__ = ["ByteFallback", "ByteLevel", "SentencePiece", "word_pattern"]
