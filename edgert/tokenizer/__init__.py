"""Text to token ids and back, built from a GGUF file's vocabulary.

A text is cut at special tokens, what lies between into words, and each word is encoded once: results are kept.
Words are cut with the expressions of `tokenizers` (Oniguruma); what makes tokens of them is edgert's own:
building a model of `tokenizers` costs 30 ms for 49,152 tokens and 500 ms for 262,144 at every start, and its
ranks of pairs cannot express that pairs with one result are equal and the leftmost goes first.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from edgert.tokenizer import limit as limits
from edgert.tokenizer.algorithm import Algorithm
from edgert.tokenizer.bytepairs import ByteFallback, ByteLevel, SentencePiece
from edgert.tokenizer.merging import STEPS
from edgert.tokenizer.pretokenizer import Rule
from edgert.tokenizer.specials import Specials
from edgert.tokenizer.unigram import Unigram
from edgert.tokenizer.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary
from edgert.tokenizer.wordpiece import WordPiece

if TYPE_CHECKING:
    from edgert.quantize.gguf_file import Model
    from edgert.tokenizer.limit import Limit

_ALGORITHMS: dict[str, type[Algorithm]] = {
    "gpt2": ByteLevel,
    "llama": SentencePiece,
    "gemma4": ByteFallback,
    "bert": WordPiece,
    "t5": Unigram,
}
_CACHED_WORDS = 1 << 16
_CACHED_LENGTH = 64  # characters; longer words are rare and not kept
_AT_ONCE = 1 << 12  # words
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
        self.add_bos = v.add_bos
        self._pieces: list[bytes | None] = [None] * self.n_vocab
        self._texts: list[bytes | None] = [None] * self.n_vocab
        self._hidden = (v.types == CONTROL) | (v.types == UNKNOWN)
        self._words: dict[str, tuple[int, ...]] = {}
        self._algorithm = _algorithm(v)(v)

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
        if self._algorithm.opens_with_space and not continues and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def stream_decoder(self, *, special: bool | Collection[int] = False, continues: bool = True) -> StreamDecoder:
        """Decodes token by token; the parts together are what decode() with the same arguments gives.

        special:  whether control tokens show as their names, or which of them do
        """
        return StreamDecoder(self, special=special, continues=continues)

    def piece(self, token: int) -> bytes:
        """The bytes of a token; a control token's are its name. Raises: ValueError for no such id."""
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"token {token} is outside the vocabulary of {self.n_vocab}")
        found = self._pieces[token]
        if found is None:
            v = self.vocabulary
            found = self._pieces[token] = self._algorithm.piece(v.tokens[token], int(v.types[token]))
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
    def control_names(self) -> dict[str, int]:
        """Control tokens by their names."""
        return {self.token_text(token): token for token in sorted(self.control_ids, reverse=True)}

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
        start = 0
        first = True  # of the text, or behind a special token
        limit = limits.current()
        for begin, end, token in self._specials.find(text, borders, parse_special):
            if begin > start:
                self._append(out, text[start:begin], first)
            out.append(token)
            if limit:
                limit.check(1, len(out))
            first = True
            start = end
            if token in self.vocabulary.rstrip:
                while start < len(text) and text[start].isspace():
                    start += 1
        if start < len(text):
            self._append(out, text[start:], first)
        if add_special and self.add_bos and out[:1] != [self.bos_id]:
            assert self.bos_id is not None
            out.insert(0, self.bos_id)
        return out

    def encode_whole(self, text: str) -> list[int]:
        """The ids of a text to which nothing will be added: the end token comes last if the file wants one."""
        end = self.vocabulary.suffix_id
        return [*self.encode(text), *(() if end is None else (end,))]

    def _append(self, out: list[int], text: str, first: bool) -> None:
        """Encodes text that holds no special token."""
        words, algorithm, limit = self._words, self._algorithm, limits.current()
        if limit and len(text) > limits.LONG:
            limit.refuse(len(out) + algorithm.fewest(text))
        coming = iter(algorithm.words(text, first))
        while some := list(islice(coming, _AT_ONCE)):
            if limit:
                limit.check(len(some), len(out))
            for word in some:
                ids = words.get(word)
                if ids is None:
                    if len(word) > _CACHED_LENGTH:
                        ids = tuple(self._encode_long(word, limit, len(out)))
                    else:
                        if len(words) >= _CACHED_WORDS:
                            words.clear()
                        ids = words[word] = tuple(algorithm.encode(word))
                if algorithm.fuses_unknown and out and ids and out[-1] == ids[0] == self.unk_id:
                    ids = ids[1:]
                out.extend(ids)

    def _encode_long(self, word: str, limit: Limit | None, n_before: int) -> Iterable[int]:
        if limit is None:
            return self._algorithm.encode(word)
        work, least = min(STEPS, len(word)), n_before + self._algorithm.fewest(word)
        return self._algorithm.encode(word, partial(limit.check, work, least))

    @cached_property
    def _specials(self) -> Specials:
        types, tokens = self.vocabulary.types, self.vocabulary.tokens
        names: dict[str, tuple[int, bool]] = {}
        for i in np.flatnonzero(np.isin(types, (CONTROL, UNKNOWN, USER_DEFINED))).tolist()[::-1]:
            text = tokens[i].decode("utf-8", "replace")
            if text:
                names[text] = (i, types[i] != USER_DEFINED or bool(_MARKER.fullmatch(text)))
        return Specials(names)


class StreamDecoder:
    """Text of tokens as they come; bytes wait until their character is complete."""

    def __init__(
        self, tokenizer: Tokenizer, *, special: bool | Collection[int] = False, continues: bool = True
    ) -> None:
        self._get = tokenizer.piece if special is True else tokenizer._text
        if not isinstance(special, bool) and special:
            self._get = lambda token: (tokenizer.piece if token in special else tokenizer._text)(token)
        self._strip = tokenizer._algorithm.opens_with_space and not continues
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


def _algorithm(v: Vocabulary) -> type[Algorithm]:
    return ByteFallback if v.rule is not None and v.rule.raw else _ALGORITHMS[v.model]


def _mended(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


__all__ = ["Rule", "Specials", "StreamDecoder", "Tokenizer", "Vocabulary"]
