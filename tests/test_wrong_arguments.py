"""Whatever a program hands over by mistake, it hears which argument it was."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake import N_VOCAB, fake_model

import edgert
from edgert.errors import (
    SHOWN,
    ContextFullError,
    EdgertError,
    ModelFileError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
    shown,
)

NOTHING = object()
NO_IDS = [None, 1, 1.5, b"x", {}, [None], ["a"], [1.5], [True], [[1]], [-1], [N_VOCAB], [2**70], {1}, NOTHING,
          np.array([1.0]), np.zeros((2, 2), int), np.array(5)]  # fmt: skip
NO_TEXTS = [None, 1, True, 1.5, b"x", [], {}, NOTHING]
NO_MESSAGES = [None, 1, "x", b"x", {}, [], [None], ["x"], [{}], [{"role": 1}], [{"role": "user", "content": 5}],
               [{"role": "user", "content": [5]}], [{"role": "user", "content": [{"type": "image_url"}]}],
               [{"role": "user", "content": "x", "tool_calls": 5}]]  # fmt: skip


def kind(value: object) -> str:
    return repr(value).replace("\n", "")[:40].partition(" at 0x")[0]


def refused(field: str, call: Callable[[], object]) -> None:
    with pytest.raises(RequestError) as error:
        call()
    assert error.value.field.startswith(field)


@pytest.mark.parametrize("ids", NO_IDS, ids=kind)
def test_ids(ids: Any) -> None:
    with fake_model() as model:
        refused("ids", lambda: model.detokenize(ids))
        refused("prompt", lambda: model.generate(ids))
        refused("prompt", lambda: model.logits(ids))
        refused("prompt", lambda: asyncio.run(model.agenerate(ids)))


class Unwritable:
    def __repr__(self) -> str:
        raise RuntimeError


DEEP: list[Any] = []
for _ in range(10_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (1.5, "1.5"),
        (np.float32(1.0000001), "1.0000001"),
        ("a\nb", r"'a\nb'"),
        (None, "None"),
        (10**5000, "a value of the type int"),
        ({"a": [[[1]]]}, "{'a': [[...]]}"),
        (DEEP, "[[[...]]]"),
        (list(range(10**6)), "[0, 1, 2, 3, 4, 5, ...]"),
        (Unwritable(), "<Unwritable instance at 0x"),
        (np.zeros((3, 3)), "array([[0., 0., 0.], "),
    ],
    ids=range(10),
)
def test_values_are_repeated_and_cut(value: Any, written: str) -> None:
    assert str(RequestError.wrong("x", "a text", value)).startswith(f"x: must be a text, not {written}")
    assert len(shown(value)) <= SHOWN
    assert len(shown("x" * 10**7)) <= SHOWN


def test_no_ids() -> None:
    with fake_model() as model:
        assert model.detokenize([]) == ""
        refused("prompt", lambda: model.logits([]))
        assert model.generate([], max_tokens=1).stats.prompt_n == 1  # the begin token


@pytest.mark.parametrize("text", NO_TEXTS, ids=kind)
def test_texts(text: Any) -> None:
    with fake_model() as model:
        refused("text", lambda: model.tokenize(text))


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Any:
    with edgert.load(tiny_model("llama"), n_ctx=64) as model:
        yield model


@pytest.mark.parametrize("messages", NO_MESSAGES, ids=kind)
def test_messages(model: edgert.Model, messages: Any) -> None:
    refused("messages", lambda: model.chat(messages))
    refused("messages", lambda: asyncio.run(model.achat(messages)))
    refused("messages", lambda: model.render(messages))


@pytest.mark.parametrize("value", [0, 1, 1.5, "x", b"x", [None], ["x"], np.zeros(2)], ids=kind)
def test_what_goes_with_messages(model: edgert.Model, value: Any) -> None:
    messages = [{"role": "user", "content": "x"}]
    refused("tools", lambda: model.chat(messages, tools=value))
    refused("chat_template_kwargs", lambda: model.chat(messages, chat_template_kwargs=value))
    refused("on_progress", lambda: model.chat(messages, on_progress=value))
    for name in ("messages", "tools", "self", "tokenizer"):
        refused("chat_template_kwargs", lambda name=name: model.chat(messages, chat_template_kwargs={name: value}))


WRONG = {
    "model": [None, 1, b"x", "", [], NOTHING],
    "n_ctx": [-1, 1.5, "1", True, 2**40],
    "n_threads": [0, -1, 1.5, "1", True],
    "sampling": [1, "x", [], {5: 1}, {"nonsense": 1}, {"max_tokens": 5}, {"temperature": float("nan")}],
    "chat_template": [1, b"x", [], {}, "no template"],
    "progress": [1, "x", []],
    "backend": [None, 1, b"cpu", [], np.zeros(0)],
    "n_batch": [0, -1, 1.5, None, "1", True],
    "n_seq_max": [0, -1, 1.5, None, [1]],
    "n_cached": [-1, 1.5, None],
    "isa": [1, ["amx"]],
    "nonsense": [1, None],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG.items() for v in values], ids=kind)
def test_loading(tiny_model: Callable[..., Path], name: str, value: Any) -> None:
    arguments = {"model": tiny_model("llama"), "n_ctx": 64, name: value}
    named = {"nonsense", "max_tokens", "temperature"} if name == "sampling" else set()
    with pytest.raises(RequestError) as error:
        edgert.load(**arguments)
    assert error.value.field in {name, name.removeprefix("n_"), *named}


@pytest.mark.parametrize(
    "error",
    [
        EdgertError("a"),
        ModelFileError("a"),
        ContextFullError(5000, 4096),
        RequestError("n_ctx", "is wrong"),
        QueueFullError(3, 1.5),
        QueueTimeoutError(1.0, 2.5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_back_from_a_process_of_a_pool(error: EdgertError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.args, vars(again)) == (type(error), str(error), error.args, vars(error))
