"""A model that answers by rule, so that the command line is tested without an engine; also a program.

`python fake_model.py ARGUMENTS` is the command `edgert ARGUMENTS` on that model.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edgert.backends.base import Verdict
from edgert.errors import ContextFullError, EdgertError, RequestError
from edgert.options import Options, SamplingParams
from edgert.reply import Chunk, Progress, Reply, Stats


class FakeStream:
    """Pieces of a text, with pauses, that can be cancelled; its rules are those of `Stream`."""

    seed = 7

    def __init__(self, pieces: Sequence[str | Exception], pause: float, on_progress: Any = None) -> None:
        self._pieces = list(pieces)
        self._pause = pause
        self._cancelled = False
        self._on_progress = on_progress

    def cancel(self) -> None:
        self._cancelled = True

    def __iter__(self) -> Iterator[Chunk]:
        if self._on_progress:
            for done in (0, 512, 1024):
                self._on_progress(Progress(1024, 0, done, 1.0))
        sent = 0
        for piece in self._pieces:
            time.sleep(self._pause)
            if self._cancelled:
                break
            if isinstance(piece, Exception):
                raise piece
            sent += 1
            yield Chunk(piece, [sent])
        stats = Stats.of(3, 9, 0.01, sent, 0.1)
        yield Chunk("", [], "cancelled" if self._cancelled else "stop", stats)

    def reply(self) -> Reply:
        chunks = list(self)
        last = chunks[-1]
        assert last.finish_reason and last.stats
        text = "".join(chunk.text for chunk in chunks)
        return Reply(text, [t for chunk in chunks for t in chunk.tokens], last.finish_reason, last.stats, self.seed)


class FakeBackend:
    capabilities: frozenset[str] = frozenset()

    def memory(self) -> dict[str, int]:
        return {"weights": 98_000_000, "kv": 1_000_000}


class FakeTemplate:
    source = "{{ messages }}"


class FakeModel:
    """Answers "you said TEXT", or by a word in the text: `count` counts slowly, `think`, `crash`, `full`, `poem`."""

    template: FakeTemplate | None = FakeTemplate()
    n_ctx = 4096
    verdict = Verdict("auto", "cpu", "a fake", "chosen by the test")

    @property
    def engine(self) -> str:
        return str(self.verdict)

    def __init__(self) -> None:
        self.defaults = SamplingParams()
        self.backend = FakeBackend()
        self.calls: list[Any] = []

    def __enter__(self) -> FakeModel:
        return self

    def __exit__(self, *_: object) -> None: ...

    def tokenize(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        return self.tokenize(" ".join(message["content"] for message in messages))

    def chat(self, messages: list[dict[str, str]], stream: bool = False, **params: Any) -> FakeStream:
        on_progress = params.pop("on_progress", None)
        Options.of(self.defaults, **params)
        roles = [message["role"] for message in messages if message["role"] != "system"]
        if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
            raise RequestError("messages", "must alternate user and assistant")
        self.calls.append((messages, params))
        if "params" in messages[-1]["content"]:
            return FakeStream([json.dumps(params)], 0.0)
        return self._answer(messages[-1]["content"], on_progress)

    def generate(self, prompt: str, stream: bool = False, **params: Any) -> FakeStream:
        params.pop("on_progress", None)
        self.calls.append((prompt, params))
        return FakeStream([f"|{prompt}|"], 0.0)

    def _answer(self, text: str, on_progress: Any) -> FakeStream:
        if "full" in text:
            raise ContextFullError(5000, self.n_ctx)
        if "crash" in text:
            return FakeStream(["half an ", RuntimeError("the engine is gone")], 0.05)
        if "count" in text:
            return FakeStream([f"{i} " for i in range(2000)], 0.02)
        if "slow" in text:
            return FakeStream([f"{i} " for i in range(15)], 0.05)
        if "silent" in text:
            return FakeStream([""] * 2000, 0.02, on_progress)
        if "think" in text:
            return FakeStream(["<th", "ink>\nhidden ", "thoughts</thi", "nk>\n\nthe answer"], 0.0)
        if "poem" in text:
            return FakeStream(
                ["The so", "und of", " the waves, an", " ethe", "real mel", "ody is here to", " stay."], 0.0
            )
        if "evil" in text:
            return FakeStream(["a\x1b]0;title\x07b\x1b[2Jc"], 0.0)
        return FakeStream(["you said ", repr(text)], 0.0, on_progress)


def main() -> None:
    import edgert
    from edgert import cli
    from edgert.cli import loading

    def load(path: Path, progress: Any, **options: Any) -> FakeModel:
        for done in (0, 5, 10) if "fresh" in path.name else ():
            progress(done, 10)
        while "held" in path.name and not os.path.exists(os.environ["HELD_UNTIL"]):
            time.sleep(0.01)
        if "broken" in path.name:
            raise EdgertError("The file is broken.")
        model = FakeModel()
        model.verdict = Verdict("auto", "cpu", "a fake", json.dumps(options, sort_keys=True))
        if "warns" in path.name:
            for _ in ("the model", "its draft"):
                logging.getLogger("edgert.template").warning("%s has no template", path.name)
        if "bare" in path.name:
            model.template = None
        return model

    edgert.load = load  # type: ignore[assignment]
    loading.model_path = lambda name: Path(name or "smollm2")
    cli.main()


if __name__ == "__main__":
    main()
