"""The tokens of a model while its tokenizer's files are read, by id, with GGUF's types."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from edgert.quantize.gguf_value import Value

SPACE = "▁"
_ADDED = -1000.0
# Texts that steer the model although their files do not mark them as special.
_STEERING = re.compile(r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<｜.*｜>|<unused.*>", re.DOTALL)


class Type(IntEnum):
    """GGUF's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Added:
    """A token that text becomes before any merging."""

    id: int
    text: str
    special: bool

    @property
    def type(self) -> Type:
        return Type.CONTROL if self.special or _STEERING.fullmatch(self.text) else Type.USER_DEFINED

    @property
    def stored(self) -> str:
        return self.text if self.type == Type.CONTROL else self.text.replace(SPACE, " ")


class Tokens:
    """Tokens by id, up to n_vocab; ids that no tokenizer file fills stay unused."""

    def __init__(self, n_vocab: int, notices: list[str]) -> None:
        self.texts: list[bytes] = [f"[PAD{i}]".encode() for i in range(n_vocab)]
        self.types = np.full(n_vocab, Type.UNUSED, np.int32)
        self.scores = np.full(n_vocab, -10_000.0, np.float32)
        self._notices = notices

    def put(self, id: int, text: str | bytes, type: int, score: float = 0.0) -> None:
        self.texts[id] = text.encode() if isinstance(text, str) else text
        self.types[id] = type
        self.scores[id] = score

    def put_added(self, added: list[Added]) -> None:
        """Puts the added tokens over what the model itself has; those beyond the table are left out."""
        beyond = [token for token in added if token.id >= len(self.texts)]
        if beyond:
            self._notices.append(
                f"{len(beyond)} tokens, as {beyond[0].text!r}, have ids beyond the {len(self.texts):,} rows of the "
                "table of tokens and are left out"
            )
        for token in added:
            if token.id < len(self.texts):
                self.put(token.id, token.stored, token.type, _ADDED)

    def keys(self, model: str, pre: str) -> dict[str, Value]:
        keys = {
            "tokenizer.ggml.model": Value.string(model),
            "tokenizer.ggml.pre": Value.string(pre),
            "tokenizer.ggml.tokens": Value.strings(self.texts),
        }
        if model in ("llama", "t5"):
            keys["tokenizer.ggml.scores"] = Value.array(self.scores)
        return keys | {"tokenizer.ggml.token_type": Value.array(self.types)}
