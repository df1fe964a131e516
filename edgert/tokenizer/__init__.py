"""Text to token ids and back, built from a GGUF file's vocabulary.

Byte-level BPE cuts a text into words with the expressions of `tokenizers` (Oniguruma) and merges each word
once: results are kept. SentencePiece merges by scores, as llama.cpp does. The merge loop is edgert's own:
building a model of `tokenizers` costs 30 ms for 49,152 tokens and 500 ms for 262,144 at every start, and its
ranks of pairs cannot express that pairs with one result are equal and the leftmost goes first.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from edgert.tokenizer.merging import merge
from edgert.tokenizer.pretokenizer import Rule, splitter
from edgert.tokenizer.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary

if TYPE_CHECKING:
    from edgert.quantize.gguf_file import Model

_SPACE = "▁"
_CACHED_WORDS = 1 << 16
_CACHED_LENGTH = 64  # characters; longer words are rare and not kept
_BUILT: WeakKeyDictionary[Model[Any], Tokenizer] = WeakKeyDictionary()
_MARKER = re.compile(r"<[|｜].*[|｜]>|</?(start|end)_of_\w+>|\[/?INST\]", re.DOTALL)


class Tokenizer:
    """Encodes and decodes; any number of threads may use it at once.

    bos_id, eos_id, eot_id:  begin, end, end of turn; None where the vocabulary has none
    end_ids:                 every token that ends an answer
    add_bos:                 whether a prompt begins with the begin token
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        v = self.vocabulary = vocabulary
        self.n_vocab = len(v.tokens)
        self.bos_id, self.eos_id, self.eot_id, self.unk_id = v.bos_id, v.eos_id, v.eot_id, v.unk_id
        self.end_ids = v.end_ids
        self.add_bos, self.add_space_prefix = v.add_bos, v.add_space_prefix
        self._pieces: list[bytes | None] = [None] * self.n_vocab
        self._texts: list[bytes | None] = [None] * self.n_vocab
        self._hidden = (v.types == CONTROL) | (v.types == UNKNOWN)
        self._ids = v.ids
        self._words: dict[str, tuple[int, ...]] = {}
        rule = v.rule
        self._escaped = rule is None or rule.raw
        if rule is None:
            self._rank: Callable[[bytes], int | None] = _score_ranks(v, self._ids).get
            self._joiner = b""
        else:
            assert v.merges is not None
            ranks = dict(zip(reversed(v.merges), range(len(v.merges) - 1, -1, -1), strict=True))
            self._rank = ranks.get
            self._joiner = b" "

    @classmethod
    def from_gguf(cls, file: Model[Any]) -> Tokenizer:
        """The tokenizer of a file, which may be closed afterwards; built once for each open file.

        Raises: ModelFileError that names the key; UnsupportedFormatError for other kinds of tokenizers.
        """
        built = _BUILT.get(file)
        if built is None:
            built = _BUILT[file] = cls(Vocabulary.from_gguf(file))
        return built

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of a text.

        add_special:    the begin token comes first if the file wants one; never twice
        parse_special:  names of control tokens in the text become these tokens; only for text that no user typed
        """
        return self._encode(text, (), add_special, parse_special)

    def encode_pieces(self, pieces: Iterable[str], *, add_special: bool = True) -> list[int]:
        """The ids of a rendered template: the pieces are one text, in which a control token's name counts
        only where it lies within one piece.
        """
        parts = list(pieces)
        borders, end = [], 0
        for part in parts[:-1]:
            end += len(part)
            borders.append(end)
        return self._encode("".join(parts), borders, add_special, True)

    def decode(self, ids: Iterable[int], *, special: bool = False, continues: bool = False) -> str:
        """The text of ids, U+FFFD for what is not UTF-8.

        special:    control tokens show as their names
        continues:  the text goes on from another one: a leading space that encode() put there stays
        Raises:     ValueError for an id outside the vocabulary.
        """
        get = self.piece if special else self._text
        data = b"".join([get(i) for i in ids])
        if self.add_space_prefix and not continues and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def stream_decoder(self, *, special: bool = False, continues: bool = True) -> StreamDecoder:
        """Decodes token by token; the parts together are what decode() with the same arguments gives."""
        return StreamDecoder(self, special=special, continues=continues)

    def piece(self, token: int) -> bytes:
        """The bytes of a token; a control token's are its name. Raises: ValueError for no such id."""
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"token {token} is outside the vocabulary of {self.n_vocab}")
        found = self._pieces[token]
        if found is None:
            found = self._pieces[token] = _piece(
                self.vocabulary.tokens[token], int(self.vocabulary.types[token]), self._escaped
            )
        return found

    def _text(self, token: int) -> bytes:
        """The bytes of a token, none for control tokens."""
        found = self._texts[token] if 0 <= token < self.n_vocab else None
        if found is None:
            piece = self.piece(token)
            found = self._texts[token] = b"" if self._hidden[token] else piece
        return found

    def token_text(self, token: int | None) -> str:
        """The name of a token as the file has it, "" for None."""
        return "" if token is None else self.vocabulary.tokens[token].decode("utf-8", "replace")

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        return frozenset(np.flatnonzero(self._hidden).tolist())

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """The names of all tokens that text typed by a user must not become."""
        return tuple(text for text, (_, control) in self._specials.names.items() if control)

    def _encode(self, text: str, borders: Sequence[int], add_special: bool, parse_special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:  # halves of surrogate pairs: join them, replace what stands alone
            borders = [len(_mended(text[:border])) for border in borders]
            text = _mended(text)
        out: list[int] = []
        prefix = self.add_space_prefix
        start = 0
        first = True  # of the text, or behind a special token
        for begin, end, token in self._specials.find(text, borders, parse_special):
            if begin > start:
                self._append(out, text[start:begin], prefix and first)
            out.append(token)
            first = True
            start = end
            if token in self.vocabulary.rstrip:
                while start < len(text) and text[start].isspace():
                    start += 1
        if start < len(text):
            self._append(out, text[start:], prefix and first)
        if add_special and self.add_bos and out[:1] != [self.bos_id]:
            assert self.bos_id is not None
            out.insert(0, self.bos_id)
        return out

    def _append(self, out: list[int], text: str, prefix: bool) -> None:
        """Encodes text that holds no special token."""
        if self._escaped:
            text = ((" " if prefix else "") + text).replace(" ", _SPACE)
        words = self._words
        for word in self._split(text):
            ids = words.get(word)
            if ids is None:
                ids = tuple(self._encode_word(word))
                if len(word) <= _CACHED_LENGTH:
                    if len(words) >= _CACHED_WORDS:
                        words.clear()
                    words[word] = ids
            out.extend(ids)

    @cached_property
    def _split(self) -> Callable[[str], Iterable[str]]:
        rule = self.vocabulary.rule
        if rule is None:
            return _word_pattern(self._ids).findall
        if rule.raw:
            return re.compile(rule.patterns[0]).findall
        pre_tokenize = splitter(rule).pre_tokenize_str
        return lambda text: [word for word, _ in pre_tokenize(text)]

    def _encode_word(self, word: str) -> Iterable[int]:
        rule, ids = self.vocabulary.rule, self._ids
        if self._escaped:
            symbols = [character.encode() for character in word]
            if rule is not None and not word.strip("\n") and word.encode() in ids:
                return [ids[word.encode()]]
        else:
            symbols = [_BYTE_SYMBOLS[b] for b in word.encode()]
        if rule is not None and rule.whole_words:
            whole = ids.get(b"".join(symbols))
            if whole is not None:
                return [whole]
        out: list[int] = []
        for symbol in merge(symbols, self._rank, self._joiner):
            found = ids.get(symbol)
            if found is not None:
                out.append(found)
            else:
                self._append_bytes(out, symbol)
        return out

    def _append_bytes(self, out: list[int], symbol: bytes) -> None:
        """What a symbol becomes that is no token: its bytes, or the unknown token."""
        if not self._escaped:
            symbols = [symbol[i : i + 2] if symbol[i] >= 0x80 else symbol[i : i + 1] for i in _starts(symbol)]
            out.extend(i for i in map(self._ids.get, symbols) if i is not None)
        elif self._byte_ids:
            out.extend(i for i in map(self._byte_ids.get, symbol) if i is not None)
        elif self.unk_id is not None:
            out.append(self.unk_id)

    @cached_property
    def _byte_ids(self) -> dict[int, int]:
        tokens = self.vocabulary.tokens
        return {_byte(tokens[i]): i for i in np.flatnonzero(self.vocabulary.types == BYTE).tolist()[::-1]}

    @cached_property
    def _specials(self) -> Specials:
        types, tokens = self.vocabulary.types, self.vocabulary.tokens
        names: dict[str, tuple[int, bool]] = {}
        for i in np.flatnonzero(np.isin(types, (CONTROL, UNKNOWN, USER_DEFINED))).tolist()[::-1]:
            text = tokens[i].decode("utf-8", "replace")
            if text:
                names[text] = (i, types[i] != USER_DEFINED or bool(_MARKER.fullmatch(text)))
        return Specials(names)


class Specials:
    """Finds tokens that are cut out of a text before words are merged.

    names:  text of the token -> (id, whether it is a control token: then only markup may contain it)
    """

    def __init__(self, names: dict[str, tuple[int, bool]]) -> None:
        self.names = names
        self._all = _Finder(names)
        self._plain = _Finder([text for text, (_, control) in names.items() if not control])

    def find(self, text: str, borders: Sequence[int], control: bool) -> Iterable[tuple[int, int, int]]:
        """(begin, end, id) from left to right, the longest at each place; control tokens cross no border."""
        finder = self._all if control else self._plain
        if finder.pattern is None:
            return
        end = 0
        for match in finder.pattern.finditer(text):
            begin = match.start()
            if begin < end:
                continue
            for length in finder.lengths(text, begin):
                found = self.names.get(text[begin : begin + length])
                if found is None or (found[1] and _crosses(borders, begin, begin + length)):
                    continue
                if found[1] and not control:
                    continue
                end = begin + length
                yield begin, end, found[0]
                break


class _Finder:
    """Where one of many texts may begin, and how long it may be."""

    def __init__(self, texts: Iterable[str]) -> None:
        lengths: dict[str, set[int]] = {}
        for text in texts:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        firsts = {start[0] for start in lengths}
        self.pattern = re.compile(f"[{re.escape(''.join(sorted(firsts)))}]") if firsts else None

    def lengths(self, text: str, begin: int) -> Sequence[int]:
        start = text[begin : begin + 2]
        return (*self._lengths.get(start, ()), *(self._lengths.get(start[0], ()) if len(start) == 2 else ()))


class StreamDecoder:
    """Text of tokens as they come; bytes wait until their character is complete."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False, continues: bool = True) -> None:
        self._get = tokenizer.piece if special else tokenizer._text
        self._strip = tokenizer.add_space_prefix and not continues
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        """What can be shown now, often the token's text. Raises: ValueError for an id outside the vocabulary."""
        data = self._get(token)
        if self._strip and data:
            self._strip = False
            if data[0] == 32:
                data = data[1:]
        return self._decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        return self._decode(b"", True)


def _score_ranks(v: Vocabulary, ids: dict[bytes, int]) -> dict[bytes, int]:
    """Place of each token in the order of scores, the highest first; equal scores have equal places."""
    if v.scores is None:
        return dict.fromkeys(ids, 0)
    order = np.fromiter(ids.values(), np.int64, len(ids))
    scores = v.scores[order]
    if np.all(scores[1:] < scores[:-1]) and np.all(order[1:] > order[:-1]):
        return ids  # as most files have it: the ids are the places
    _, places = np.unique(-scores, return_inverse=True)
    return dict(zip(ids, places.tolist(), strict=True))


def _word_pattern(ids: dict[bytes, int]) -> re.Pattern[str]:
    """Cuts before each space, where no token reaches across, so that words can be merged one by one."""
    across = set()
    for token in _with_inner_space(ids):
        for at in range(1, len(token)):
            if token[at] == _SPACE and token[:at].strip(_SPACE):
                across.add(f"(?<={re.escape(token[:at])})(?={re.escape(token[at:])}){_SPACE}")
    inner = "|".join([f"[^{_SPACE}]+", *sorted(across)])
    return re.compile(f"{_SPACE}*(?:{inner})+|{_SPACE}+")


def _with_inner_space(ids: dict[bytes, int]) -> set[str]:
    """Tokens in which a space stands behind another character; few vocabularies have any."""
    joined = b"\0" + b"\0".join(ids) + b"\0"
    data = np.frombuffer(joined, np.uint8)
    one, two, three = _SPACE.encode()
    space = (data[:-2] == one) & (data[1:-1] == two) & (data[2:] == three)
    at = np.flatnonzero(space)
    inner = at[(data[at - 1] != 0) & ~space[at - 3]]
    cuts = ((joined.rfind(b"\0", 0, i) + 1, joined.find(b"\0", i)) for i in inner.tolist())
    return {joined[begin:end].decode("utf-8", "replace") for begin, end in cuts}


def _crosses(borders: Sequence[int], begin: int, end: int) -> bool:
    at = bisect_right(borders, begin)
    return at < len(borders) and borders[at] < end


def _mended(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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


def _byte(token: bytes) -> int:
    """The value of <0xXX>; -1 for another text."""
    return int(token[3:5], 16) if re.fullmatch(rb"<0x[0-9A-Fa-f]{2}>", token) else -1


def _piece(token: bytes, kind: int, escaped: bool) -> bytes:
    if kind == BYTE and _byte(token) >= 0:
        return bytes([_byte(token)])
    if kind in (CONTROL, UNKNOWN, USER_DEFINED):
        return token
    if escaped:
        return token.replace(_SPACE.encode(), b" ")
    try:
        return bytes(map(_SYMBOL_BYTES.__getitem__, token.decode()))
    except (KeyError, UnicodeDecodeError):
        return token  # a word that was added in plain UTF-8


__all__ = ["Rule", "Specials", "StreamDecoder", "Tokenizer", "Vocabulary"]
