"""How answers look in OpenAI's JSON: whole, and in pieces."""

from __future__ import annotations

import codecs
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import edgert
from edgert.reply import Chunk, Reply, TokenLogprob
from edgert.server.parsing import Parser, Plain

if TYPE_CHECKING:
    from edgert.model import Model

Json = dict[str, Any]


class Shape(ABC):
    """One request's answers; `whole` and `part` are the names of its objects."""

    whole: str
    part: str
    prefix: str

    def __init__(self, name: str, model: Model) -> None:
        self.model = model
        self._head: Json = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": f"edgert-{edgert.__version__}",
        }

    def mark(self, who: str) -> None:
        """Says in every part who has answered."""
        self._head["served_by"] = who

    def head(self, kind: str) -> Json:
        """The fields that all parts of an answer share."""
        return self._head | {"object": kind}

    def begin(self, index: int) -> list[Json]:
        """What comes before the first piece of a choice."""
        return []

    @abstractmethod
    def empty(self, index: int) -> Json:
        """A choice that brings nothing."""

    @abstractmethod
    def pieces(self, index: int, chunk: Chunk) -> list[Json]:
        """What a piece adds to a choice; never empty at its end."""

    @abstractmethod
    def choice(self, index: int, reply: Reply) -> Json:
        """A whole choice."""

    def _bytes(self, token: int) -> bytes:
        return self.model.tokenizer.piece(token)

    def _text(self, token: int) -> str:
        return self._bytes(token).decode("utf-8", "replace")


class ChatShape(Shape):
    """chat.completion; a parser for each choice tells text from thoughts and calls of tools."""

    whole, part, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, name: str, model: Model, parser: Callable[[], Parser] = Plain) -> None:
        super().__init__(name, model)
        self._new_parser = parser
        self._parsers: dict[int, Parser] = {}

    def begin(self, index: int) -> list[Json]:
        return [self._choice(index, {"role": "assistant", "content": ""})]

    def empty(self, index: int) -> Json:
        return self._choice(index, {})

    def pieces(self, index: int, chunk: Chunk) -> list[Json]:
        parser = self._parsers.get(index) or self._parsers.setdefault(index, self._new_parser())
        deltas = parser.push(chunk.text) if chunk.text else []
        found = self._logprobs(chunk.logprobs)
        if chunk.finish_reason is None:
            if found and not deltas:
                deltas = [{"content": ""}]
            return [self._choice(index, delta, found if i == 0 else None) for i, delta in enumerate(deltas)]
        tail, reason = parser.end(_reason(chunk.finish_reason))
        choices = [self._choice(index, delta) for delta in [*deltas, *tail]]
        if found:
            choices.insert(0, self._choice(index, {"content": ""}, found))
        return [*choices, self._choice(index, {}, reason=reason)]

    def choice(self, index: int, reply: Reply) -> Json:
        parser = self._new_parser()
        deltas = parser.push(reply.text)
        tail, reason = parser.end(_reason(reply.finish_reason))
        message: Json = {"role": "assistant", "content": None}
        for delta in [*deltas, *tail]:
            for name, value in delta.items():
                if name == "tool_calls":
                    _merge_calls(message.setdefault(name, []), value)
                else:
                    message[name] = (message.get(name) or "") + value
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(reply.logprobs),
            "finish_reason": reason,
        }

    @staticmethod
    def _choice(index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, scores: Sequence[TokenLogprob]) -> Json | None:
        return {"content": [self._score(score) for score in scores], "refusal": None} if scores else None

    def _score(self, score: TokenLogprob) -> Json:
        top = [self._one(token, value) for token, value in score.top]
        return self._one(score.token, score.logprob) | {"top_logprobs": top}

    def _one(self, token: int, logprob: float) -> Json:
        piece = self.model.tokenizer.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(piece)}


def _merge_calls(calls: list[Json], deltas: list[Json]) -> None:
    """Puts the pieces of tool calls together."""
    for delta in deltas:
        place = delta["index"]
        if place == len(calls):
            function = dict(delta["function"])
            calls.append({"id": delta["id"], "type": "function", "function": function})
        else:
            calls[place]["function"]["arguments"] += delta["function"]["arguments"]


@dataclass(frozen=True)
class Echo:
    """A prompt that comes before its answers.

    ids, scores:  its tokens, and how likely those from the second on are; none where nobody asked
    """

    text: str
    ids: Sequence[int] = ()
    scores: Sequence[TokenLogprob] = ()


class CompletionShape(Shape):
    """text_completion.

    echoes:  the prompts, where they shall come first
    n:       answers to each
    """

    whole = part = "text_completion"
    prefix = "cmpl"

    def __init__(self, name: str, model: Model, echoes: Sequence[Echo], n: int) -> None:
        super().__init__(name, model)
        self._echoes, self._n = echoes, n
        self._offsets: dict[int, int] = {}

    def _echo(self, index: int) -> Echo:
        return self._echoes[index // self._n] if self._echoes else Echo("")

    def begin(self, index: int) -> list[Json]:
        echo = self._echo(index)
        return [self._choice(index, echo.text, self._echoed(echo))] if echo.text or echo.ids else []

    def empty(self, index: int) -> Json:
        return self._choice(index, "")

    def pieces(self, index: int, chunk: Chunk) -> list[Json]:
        if not chunk.text and not chunk.logprobs and chunk.finish_reason is None:
            return []
        reason = chunk.finish_reason and _reason(chunk.finish_reason)
        return [self._choice(index, chunk.text, self._logprobs(index, chunk.logprobs), reason)]

    def choice(self, index: int, reply: Reply) -> Json:
        echo = self._echo(index)
        before, after = self._echoed(echo), self._logprobs(index, reply.logprobs)
        scores = {name: before[name] + after[name] for name in before} if before and after else before or after
        return self._choice(index, echo.text + reply.text, scores, _reason(reply.finish_reason))

    def _echoed(self, echo: Echo) -> Json | None:
        """The prompt's own scores; its first token has none, as nothing comes before it."""
        if not echo.ids:
            return None
        first, decoder = echo.ids[0], codecs.getincrementaldecoder("utf-8")("replace")
        offsets, at = [], 0
        for token in echo.ids:
            offsets.append(min(at, len(echo.text)))
            at += 0 if token in self.model.tokenizer.control_ids else len(decoder.decode(self._bytes(token)))
        rest = self._scored(echo.scores)
        return {
            "tokens": [self._text(first), *rest["tokens"]],
            "token_logprobs": [None, *rest["token_logprobs"]],
            "top_logprobs": [None, *rest["top_logprobs"]],
            "text_offset": offsets,
        }

    @staticmethod
    def _choice(index: int, text: str, logprobs: Json | None = None, reason: str | None = None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, scores: Sequence[TokenLogprob]) -> Json | None:
        if not scores:
            return None
        found = self._scored(scores)
        at, offsets = self._offsets.get(index, len(self._echo(index).text)), []
        for token in found["tokens"]:
            offsets.append(at)
            at += len(token)
        self._offsets[index] = at
        return found | {"text_offset": offsets}

    def _scored(self, scores: Sequence[TokenLogprob]) -> Json:
        return {
            "tokens": [self._text(score.token) for score in scores],
            "token_logprobs": [max(score.logprob, -9999.0) for score in scores],
            "top_logprobs": [
                {self._text(token): max(value, -9999.0) for token, value in score.top} for score in scores
            ],
        }


def _reason(reason: str) -> str:
    return "stop" if reason == "cancelled" else reason
