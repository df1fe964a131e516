"""Calibration texts: what files may hold, how they are cut, what is said when they cannot be used."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert.errors import EdgertError
from edgert.quantize import text_parts
from edgert.quantize.calibration_text import BUILT_IN, Text, cut, default_texts, read_text
from edgert.quantize.engine import open_engine
from edgert.quantize.text_parts import TextParts

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[..., Path]) -> Any:
    with open_engine(tiny_model("llama", template=CHATML), n_threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def gemma(tiny_model: Callable[..., Path]) -> Any:
    """It begins texts with a token, and has no template that edgert would know."""
    with open_engine(tiny_model("gemma3"), n_threads=1) as engine:
        yield engine


def text_of(engine: Any, tokens: np.ndarray) -> str:
    return engine.tokenizer.decode(tokens.tolist(), special=True)


def test_files(engine: Any, tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("Hello world <|im_end|>\n", encoding="utf-8")
    text = read_text(engine, plain)
    assert text.name == str(plain)
    assert text_of(engine, text.tokens) == "Hello world <|im_end|>"
    assert 2 not in text.tokens  # the name of a control token in a text is text
    chats = tmp_path / "chats.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello <|im_end|>"}]},
        {"text": "plain"},
    ]
    chats.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    tokens = read_text(engine, chats).tokens
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello <|im_end|><|im_end|>\nplain"
    assert text_of(engine, tokens) == expected
    assert (tokens == 2).sum() == 2  # those of the template, and not the one that was said


@pytest.mark.parametrize(
    "name, data, complaint",
    [
        ("a.txt", b"caf\xe9", r"a\.txt is not UTF-8 \(byte 3\)"),
        ("a.jsonl", b'{"text": "x"}\n{"messages": ', r"line 2 is no JSON"),
        ("a.jsonl", b"[" * 100_000, r"line 1 is no JSON"),
        ("a.jsonl", b'{"prompt": "x"}', r'line 1 has neither "messages" nor "text"'),
        ("a.jsonl", b"[1]", r"line 1 has neither"),
        ("a.jsonl", b"\n\n", r"no entries"),
        ("a.jsonl", b'\n{"messages": [{"role": 7}]}', r"a\.jsonl: line 2: messages"),
    ],
)
def test_damaged_files(name: str, data: bytes, complaint: str, engine: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(EdgertError, match=complaint):
        read_text(engine, tmp_path / name)


def test_names(engine: Any, gemma: Any, tmp_path: Path) -> None:
    with pytest.raises(EdgertError, match="chat, code, languages, prose"):
        read_text(engine, "wikitext")
    assert [text.name for text in default_texts(engine)] == list(BUILT_IN)
    for text in default_texts(engine):
        assert len(text.tokens) > 1000
        assert text.tokens.dtype == np.int32


def test_models_without_a_template_take_no_chats(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    none = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(384)]}
    with open_engine(tiny_model("llama", metadata=none), n_threads=1) as engine:
        assert [text.name for text in default_texts(engine)] == ["articles", "code", "languages", "prose"]
        (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}')
        with pytest.raises(EdgertError, match=r"a\.jsonl: line 1: .* no chat template"):
            read_text(engine, tmp_path / "a.jsonl")


def test_cut(engine: Any, gemma: Any) -> None:
    a, b = Text("a", np.arange(10, 35, dtype=np.int32)), Text("b", np.arange(100, 112, dtype=np.int32))
    chunks = [chunk.tolist() for chunk in cut(engine, [a, b], 10)]
    assert chunks == [list(range(10, 20)), list(range(100, 110)), list(range(20, 30))]
    assert [len(chunk) for chunk in cut(engine, [a, b], 12)] == [12, 12, 12]
    assert len(cut(engine, [a, b], 5, n_chunks=3)) == 3
    assert [chunk.tolist() for chunk in cut(engine, [Text("c", np.arange(3, dtype=np.int32))], 10)] == [[0, 1, 2]]
    assert a.tokens[0] == 10
    for chunk in cut(gemma, [a, b], 10):
        assert chunk[0] == gemma.bos == 2
    assert a.tokens[0] == 10
    with pytest.raises(EdgertError, match="text e is empty"):
        cut(engine, [Text("e", np.empty(0, np.int32))], 10)
    for n_ctx in (1, 513):
        with pytest.raises(EdgertError, match="2 to 512 tokens"):
            cut(engine, [a], n_ctx)


def test_a_byte_order_mark_is_no_text(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfHello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "Hello"}')
    same = engine.tokenize("Hello").tolist()
    assert [read_text(engine, tmp_path / name).tokens.tolist() for name in ("a.txt", "b.jsonl")] == [same, same]


def test_no_more_is_read_than_is_used(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pieces as of the whole texts, and most of these neither rendered nor tokenized."""
    (tmp_path / "a.txt").write_text(" ".join(f"word{i}" for i in range(30_000)))
    chats = ({"messages": [{"role": "user", "content": f"What is {i}?"}]} for i in range(3000))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, chats)))
    texts = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    found = TextParts.read(engine, texts, texts, 64, 1000)
    seen: list[int] = []
    whole = {str(text): read_text(engine, text) for text in texts}
    monkeypatch.setattr(text_parts, "read_text", lambda _, name, n: seen.append(n) or whole[str(name)])
    expected = TextParts.read(engine, texts, texts, 64, 1000)
    for ours, theirs in zip(
        [found.training, found.judging, *found.held_out.values()],
        [expected.training, expected.judging, *expected.held_out.values()],
        strict=True,
    ):
        np.testing.assert_array_equal(np.concatenate(ours), np.concatenate(theirs))
    for text in texts:
        assert len(read_text(engine, text, seen[0]).tokens) < len(whole[str(text)].tokens) / 2


def test_a_seed_divides_the_texts_otherwise(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ".join(f"word{i}" for i in range(900)))

    def division(seed: int) -> tuple[set[bytes], set[bytes], set[bytes]]:
        parts = TextParts.read(engine, [tmp_path / "a.txt"], (), 64, 10_000, seed)
        return tuple(
            {piece.tobytes() for piece in some} for some in (parts.training, parts.judging, *parts.held_out.values())
        )  # type: ignore[return-value]

    first, again, other = division(0), division(0), division(7)
    assert first == again and division(7) == other
    assert first != other and set.union(*first) == set.union(*other)  # the same pieces, in other parts
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(other, 2))
