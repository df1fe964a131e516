"""WordPiece, BERT's kind: words are cut at spaces and punctuation and taken apart from the left, longest token first.

Source: Hugging Face `tokenizers`, whose normalizer and pre-tokenizer cut the words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from edgert.tokenizer.algorithm import SPACE, Algorithm, nothing
from edgert.tokenizer.vocabulary import Vocabulary

_LONGEST_WORD = 100  # characters; longer ones are unknown


class WordPiece(Algorithm):
    """Tokens that begin a word are stored with U+2581 before them, the others bare."""

    opens_with_space = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.longest = max(map(len, self.ids), default=0)

    def words(self, text: str, first: bool) -> Iterable[str]:
        normalize, pre_tokenize = self._cutters
        return [word for word, _ in pre_tokenize(normalize(text))]

    @cached_property
    def _cutters(self) -> tuple[Any, Any]:
        from tokenizers import normalizers, pre_tokenizers

        v = self.vocabulary
        normalizer = normalizers.BertNormalizer(lowercase=v.lowercase, strip_accents=v.strip_accents)
        return normalizer.normalize_str, pre_tokenizers.BertPreTokenizer().pre_tokenize_str

    def encode(self, word: str, beat: Callable[[], object] = nothing) -> Iterable[int]:
        unknown = [] if self.vocabulary.unk_id is None else [self.vocabulary.unk_id]
        if len(word) > _LONGEST_WORD:
            return unknown
        data = (SPACE + word).encode()
        mark = len(SPACE.encode())
        out: list[int] = []
        begin, shortest, longest = 0, mark + 1, self.longest
        while begin < len(data):
            for end in range(min(len(data), begin + longest), begin + shortest - 1, -1):
                found = self.ids.get(data[begin:end])
                if found is not None:
                    break
            else:
                return unknown
            out.append(found)
            begin, shortest = end, 1
            # A mark within the word is a character of its own: what begins with it here begins words elsewhere.
            longest = mark if data.startswith(SPACE.encode(), begin) else self.longest
        return out
