"""Answers that need not be computed again: of requests whose answers are always the same. Off unless asked for."""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from edgert.options import Options

if TYPE_CHECKING:
    from edgert.model import Model
    from edgert.reply import Reply


class Results:
    """Replies of late by what determines them, the least used going first.

    most:  replies kept; 0: none
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[bytes, list[Reply]] = OrderedDict()
        self._numbers: WeakKeyDictionary[Model, int] = WeakKeyDictionary()  # an id may be that of a model which went
        self._next = itertools.count()
        self.hits = 0

    def key(
        self, model: Model, prompts: Sequence[Sequence[int]], n: int, params: Mapping[str, Any], user: str
    ) -> bytes | None:
        """What an answer is kept under: tokens, model, settings and whose it is; None for one that chance decides."""
        if not self._most:
            return None
        options = Options.of(model.defaults, **params)
        if options.sampling.temperature != 0 and options.sampling.seed is None:
            return None
        told = [self._number(model), [list(map(int, prompt)) for prompt in prompts], n, user, repr(options)]
        return hashlib.sha256(msgspec.json.encode(told)).digest()

    def _number(self, model: Model) -> int:
        if model not in self._numbers:
            self._numbers[model] = next(self._next)
        return self._numbers[model]

    def get(self, key: bytes | None) -> list[Reply] | None:
        """The replies, None where there are none."""
        found = self._found.get(key) if key else None
        if key and found is not None:
            self._found.move_to_end(key)
            self.hits += 1
        return found

    def put(self, key: bytes | None, replies: list[Reply]) -> None:
        """Keeps whole replies that ended by themselves."""
        if key and all(reply.finish_reason in ("stop", "length") for reply in replies):
            self._found[key] = replies
            if len(self._found) > self._most:
                self._found.popitem(last=False)
