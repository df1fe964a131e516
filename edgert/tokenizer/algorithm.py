"""What the kinds of tokenizers have in common: text is cut into words, and each word is encoded by itself."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from edgert.tokenizer.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary

SPACE = "▁"


def nothing() -> None:
    """What is done where nothing is to be done."""


class Algorithm(ABC):
    """One kind of tokenizer, between the special tokens.

    opens_with_space:  a text's first token begins with a space that the text has not
    fuses_unknown:     unknown tokens side by side are one
    """

    opens_with_space = False
    fuses_unknown = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.ids = vocabulary.ids

    @abstractmethod
    def words(self, text: str, first: bool) -> Iterable[str]:
        """The words of a text, each of which is encoded by itself.

        first:  nothing stands before the text, or a special token
        """

    @abstractmethod
    def encode(self, word: str, beat: Callable[[], object] = nothing) -> Iterable[int]:
        """The ids of one word.

        beat:  called now and then while a long word is encoded; what it raises ends that
        """

    def fewest(self, word: str) -> int:
        """So many tokens a word has at least."""
        return 0

    def piece(self, token: bytes, kind: int) -> bytes:
        """The bytes that a token stands for; `kind` is GGUF's type of it."""
        if kind == BYTE and (byte := byte_value(token)) >= 0:
            return bytes([byte])
        return token if kind in (CONTROL, UNKNOWN, USER_DEFINED) else self.text(token)

    def text(self, token: bytes) -> bytes:
        """The bytes of an ordinary token."""
        return token.replace(SPACE.encode(), b" ")


def byte_value(token: bytes) -> int:
    """The value of <0xXX>; -1 for another text."""
    return int(token[3:5], 16) if re.fullmatch(rb"<0x[0-9A-Fa-f]{2}>", token) else -1
