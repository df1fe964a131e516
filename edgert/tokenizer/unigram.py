"""Unigram, T5's and XLM-R's kind: of all ways to cut a word into tokens the most probable one.

Source: sentencepiece, whose models these are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from edgert.tokenizer.algorithm import SPACE, Algorithm, nothing
from edgert.tokenizer.bytepairs import word_pattern
from edgert.tokenizer.vocabulary import NORMAL, Vocabulary

_UNKNOWN_PENALTY = 10.0  # below the least probable token


class Unigram(Algorithm):
    """Words begin with U+2581; the text is normalized by the rules that the file brings."""

    fuses_unknown = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.opens_with_space = vocabulary.add_space_prefix or vocabulary.merge_spaces

    def words(self, text: str, first: bool) -> Iterable[str]:
        text = self.vocabulary.charsmap.normalize(text)
        if self.vocabulary.merge_spaces:
            text = "".join(" " + word for word in text.split(" ") if word)
        elif self.opens_with_space:
            text = re.sub(r"(?=[^ ])", " ", text, count=1)  # before the first word; spaces alone get none
        return self._word_pattern.findall(text.replace(" ", SPACE))

    def encode(self, word: str, beat: Callable[[], object] = nothing) -> Iterable[int]:
        tokens, lengths, unknown = self._table
        n, no_id = len(word), -1
        scores, starts, ids = [0.0] + [-np.inf] * n, [0] * (n + 1), [no_id] * (n + 1)
        for begin in range(n):
            score, has_single = scores[begin], False
            for length in lengths.get(word[begin], ()):
                end = begin + length
                if end > n:
                    break
                found = tokens.get(word[begin:end])
                if found is None:
                    continue
                has_single |= length == 1
                if score + found[0] > scores[end]:
                    scores[end], starts[end], ids[end] = score + found[0], begin, found[1]
            if not has_single and score + unknown > scores[begin + 1]:
                scores[begin + 1], starts[begin + 1], ids[begin + 1] = score + unknown, begin, no_id
        out: list[int] = []
        unk_id = self.vocabulary.unk_id
        while n:
            if ids[n] != no_id:
                out.append(ids[n])
            elif unk_id is not None and out[-1:] != [unk_id]:
                out.append(unk_id)
            n = starts[n]
        return out[::-1]

    @cached_property
    def _word_pattern(self) -> re.Pattern[str]:
        return word_pattern(self.ids)

    @cached_property
    def _table(self) -> tuple[dict[str, tuple[float, int]], dict[str, list[int]], float]:
        """Token -> (score, id); first character -> lengths of tokens; the score of an unknown character."""
        v = self.vocabulary
        scores = np.zeros(len(v.tokens), np.float32) if v.scores is None else v.scores
        values = scores.tolist()
        tokens = {token.decode("utf-8", "replace"): (values[i], i) for token, i in self.ids.items()}
        lengths: dict[str, set[int]] = {}
        for token in tokens:
            lengths.setdefault(token[0], set()).add(len(token))
        least = float(scores[v.types == NORMAL].min(initial=0.0))
        return tokens, {first: sorted(found) for first, found in lengths.items()}, least - _UNKNOWN_PENALTY
