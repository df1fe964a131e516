"""Texts to calibrate with: files, and sets that come with the package; as token ids, cut as llama-imatrix cuts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.errors import EdgertError, RequestError
from edgert.quantize.engine import Engine

Tokens = NDArray[np.int32]

MUCH = 6  # characters of a token: mostly there are fewer
_FOLDER = Path(__file__).parent / "texts"
BUILT_IN = {name: _FOLDER / file for name, file in (
    ("articles", "articles.txt"),
    ("chat", "chat.jsonl"),
    ("code", "code.txt"),
    ("languages", "languages.txt"),
    ("prose", "prose.txt"),
)}  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A text's ids, int32 (n,), and the name under which it is recorded."""

    name: str
    tokens: Tokens


def read_text(engine: Engine, source: str | os.PathLike[str], n_tokens: int | None = None) -> Text:
    """Reads a text and tokenizes it for the engine's model.

    source:    the name of a built-in set, or a file: UTF-8 text; or, if it ends in .jsonl, a JSON object a line, either
               {"messages": [...]}, a chat that is rendered with the model's own template, or {"text": "..."}
    n_tokens:  that will be used at most: what comes after them may be left out

    Raises: EdgertError that says what is wrong and where.
    """
    name = os.fspath(source)
    path = BUILT_IN.get(name, Path(name))
    text = _read(path)
    if path.suffix != ".jsonl":
        if not text.strip():
            raise EdgertError(f"The text {name} is empty.")
        text = text.removesuffix("\n")  # as llama.cpp reads a prompt file
        if n_tokens is not None and len(text) > MUCH * n_tokens:
            ids = engine.tokenize(text[: MUCH * n_tokens])
            if len(ids) > n_tokens + 64:  # the last ones may be others than those of the whole text
                return Text(name, ids)
        return Text(name, engine.tokenize(text))
    parts, n = [], 0
    for part in _entries(engine, path, text, lenient=name in BUILT_IN):
        parts.append(part)
        n += len(part)
        if n_tokens is not None and n > n_tokens:
            break
    if not parts:
        raise EdgertError(f"{path} has no entries: give one JSON object a line.")
    return Text(name, np.concatenate(parts))


def default_texts(engine: Engine, n_tokens: int | None = None) -> list[Text]:
    """The built-in sets that suit the model: chats only if it has a template. n_tokens: of each, as in read_text()."""
    return [
        read_text(engine, name, n_tokens) for name in BUILT_IN if engine.can_chat or BUILT_IN[name].suffix != ".jsonl"
    ]


def cut(engine: Engine, texts: Sequence[Text], n_ctx: int, n_chunks: int | None = None) -> list[Tokens]:
    """Pieces of n_ctx tokens, the texts by turns, each with the begin token first if the model wants one.

    A text's rest is left out, unless it is all there is of the text. With n_chunks no more than so many.

    Raises: EdgertError for texts without tokens, or more tokens than the engine takes.
    """
    if not 1 < n_ctx <= engine.n_ctx:
        raise EdgertError(f"A chunk has 2 to {engine.n_ctx} tokens, not {n_ctx}.")
    queues = []
    for text in texts:
        if not len(text.tokens):
            raise EdgertError(f"The text {text.name} is empty.")
        whole = max(len(text.tokens) // n_ctx * n_ctx, min(n_ctx, len(text.tokens)))
        queues.append([text.tokens[start : start + n_ctx] for start in range(0, whole, n_ctx)])
    chunks: list[Tokens] = []
    while any(queues) and (n_chunks is None or len(chunks) < n_chunks):
        for queue in queues:
            if queue and (n_chunks is None or len(chunks) < n_chunks):
                chunk = queue.pop(0).copy()
                if engine.bos is not None:
                    chunk[0] = engine.bos
                chunks.append(chunk)
    return chunks


def check(source: str | os.PathLike[str]) -> None:
    """Says before all work what read_text() would say of a file that is not there. Raises: EdgertError."""
    path = BUILT_IN.get(os.fspath(source), Path(source))
    try:
        path.open("rb").close()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> EdgertError:
    names = ", ".join(BUILT_IN)
    return EdgertError(f"The text {path} cannot be read ({error.strerror or error}): name a file, or one of {names}.")


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8").removeprefix("\ufeff")  # which Windows' editors begin with
    except OSError as error:
        raise _unreadable(path, error) from None
    except UnicodeDecodeError as error:
        raise EdgertError(f"The text {path} is not UTF-8 (byte {error.start}).") from None


def _entries(engine: Engine, path: Path, text: str, lenient: bool) -> Iterator[Tokens]:
    """The entries of a .jsonl; with `lenient`, those that the model's template refuses are left out."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            raise EdgertError(f"{path}: line {number} is no JSON.") from None
        if isinstance(entry, dict) and isinstance(entry.get("messages"), list):
            try:
                yield engine.render(entry["messages"])
            except RequestError as error:
                if not lenient:
                    raise EdgertError(f"{path}: line {number}: {error}.") from None
        elif isinstance(entry, dict) and isinstance(entry.get("text"), str):
            yield engine.tokenize(entry["text"])
        else:
            raise EdgertError(f'{path}: line {number} has neither "messages" nor "text".')
