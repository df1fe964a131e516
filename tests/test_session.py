"""Session files: what comes back, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

import edgert
from edgert import session
from edgert.errors import SessionError
from edgert.model import Model

TOKENS = np.random.default_rng(5).integers(0, 384, 120).tolist()
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}

Open = Callable[..., Model]


@pytest.fixture
def open_model(tiny_model: Callable[..., Path]) -> Iterator[Open]:
    opened: list[Model] = []

    def make(family: str = "llama", seed: int = 0, types: str = "q8_0", **options: object) -> Model:
        path = tiny_model(family, quant=Type.Q8_0, seed=seed, head_dim=32)
        options = {"n_ctx": 256, "n_threads": 2, **options}
        opened.append(edgert.load(path, cache_type_k=types, cache_type_v=types, backend="cpu", **options))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for model in opened:
        model.close()


@pytest.mark.parametrize("types", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_restored_session_reads_nothing_again(family: str, types: str, open_model: Open, tmp_path: Path) -> None:
    first = open_model(family, types=types)
    reply = first.generate(TOKENS, **GREEDY)
    whole = [*TOKENS, *reply.tokens]
    n = first.save_session(tmp_path / "s", whole, transcript={"said": "häh"})
    assert n == len(whole) - 1  # the last token was chosen and not evaluated
    second = open_model(family, types=types)
    found = second.load_session(tmp_path / "s")
    assert found.transcript == {"said": "häh"}
    assert found.tokens.tolist() == whole[:n]
    again = second.generate([*whole, 7], **GREEDY)
    assert again.stats.cache_n == n
    assert again.tokens == first.generate([*whole, 7], **GREEDY).tokens


def test_any_prefix_of_what_is_cached_is_saved(open_model: Open, tmp_path: Path) -> None:
    """What follows the saved part in its last page stays out of the file, which depends on the part alone."""
    model = open_model(types="q4_0")
    for length in (1, 5, 15, 16, 17, 40):
        model.generate(TOKENS, max_tokens=0)
        assert model.save_session(tmp_path / "a", TOKENS[:length]) == length
        model.generate([*TOKENS[:length], 1], max_tokens=0)
        other = open_model(types="q4_0")
        other.load_session(tmp_path / "a")
        assert other.save_session(tmp_path / "b", TOKENS[:length]) == length
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        other.close()


def test_damage_is_refused_and_harms_nothing(open_model: Open, tmp_path: Path) -> None:
    model = open_model()
    expected = model.generate([*TOKENS, 3], **GREEDY)
    model.save_session(tmp_path / "s", TOKENS)
    sound = (tmp_path / "s").read_bytes()
    rng = np.random.default_rng(1)
    places = [0, 7, 8, 15, 16, 40, len(sound) - 33, len(sound) - 32, len(sound) - 1]
    for place in [*places, *rng.integers(0, len(sound), 40).tolist()]:
        (tmp_path / "bad").write_bytes(
            sound[:place] + bytes([sound[place] ^ 1 << int(rng.integers(8))]) + sound[place + 1 :]
        )
        with pytest.raises(SessionError, match=r"damaged|not a session"):
            model.load_session(tmp_path / "bad")
    for length in (0, 7, 15, 30, 47, 100, len(sound) - 1):
        (tmp_path / "bad").write_bytes(sound[:length])
        with pytest.raises(SessionError, match=r"damaged|not a session"):
            model.load_session(tmp_path / "bad")
    again = model.generate([*TOKENS, 3], **GREEDY)
    assert again.tokens == expected.tokens
    assert again.stats.cache_n == len(TOKENS)
    assert open_model().generate([*TOKENS, 3], **GREEDY).tokens == expected.tokens


def test_sessions_of_others_are_refused(open_model: Open, tmp_path: Path) -> None:
    first = open_model()
    first.generate(TOKENS, max_tokens=0)
    first.save_session(tmp_path / "s", TOKENS)
    with pytest.raises(SessionError, match="another type k: 'q8_0', not 'f16'"):
        open_model(types="f16").load_session(tmp_path / "s")
    with pytest.raises(SessionError, match="another model"):
        open_model(seed=1).load_session(tmp_path / "s")
    with pytest.raises(SessionError, match="120 tokens, and the context holds 64"):
        open_model(n_ctx=64).load_session(tmp_path / "s")
    with pytest.raises(SessionError, match="Nothing of this text is cached"):
        open_model().save_session(tmp_path / "t", TOKENS)
    assert not (tmp_path / "t").exists()


def test_facts_that_lie_are_refused(open_model: Open, tmp_path: Path) -> None:
    """A file with a right checksum that somebody made by hand."""
    model = open_model("gemma3")
    model.generate(TOKENS, max_tokens=0)
    model.save_session(tmp_path / "s", TOKENS)
    found = session.read(tmp_path / "s")
    pool = found.facts["pools"][0]
    for lie in (
        {"length": len(found.tokens) + 1},
        {"length": None},
        {"pools": []},
        {"pools": 3},
        {"pools": [{**pool, "end": pool["end"] + 1}]},
        {"pools": [{**pool, "first": 1}]},
        {"pools": [{**pool, "first": -1}]},
        {"pools": [{**pool, "stride": 1}]},
        {"layout": 0},
    ):
        session.write(tmp_path / "t", found.tokens, {}, {**found.facts, **lie}, [found.data])
        with pytest.raises(SessionError):
            model.load_session(tmp_path / "t")
    with pytest.raises(SessionError):
        session.write(tmp_path / "t", found.tokens, {}, found.facts, [found.data[:-1]])
        model.load_session(tmp_path / "t")
    with pytest.raises(SessionError, match="vocabulary"):
        session.write(tmp_path / "t", found.tokens + 400, {}, found.facts, [found.data])
        model.load_session(tmp_path / "t")


def test_a_full_cache_makes_room(open_model: Open, tmp_path: Path) -> None:
    """What idles is forgotten for it; what runs is not."""
    model = open_model(n_cached=128)
    model.generate(TOKENS, max_tokens=0)
    model.save_session(tmp_path / "s", TOKENS)
    other = np.random.default_rng(6).integers(0, 384, 100).tolist()
    model.generate(other, max_tokens=0)
    model.load_session(tmp_path / "s")
    assert model.generate([*TOKENS, 3], **GREEDY).stats.cache_n == len(TOKENS)


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("s") / "s"
    path.write_bytes(session.MAGIC + content)
    with pytest.raises(SessionError):
        session.read(path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs /dev/full")
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, data = np.arange(3, dtype=np.int32), np.zeros(5, np.uint8)
    session.write(tmp_path / "s", tokens, {}, {}, [data])
    before = (tmp_path / "s").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edgert.download.replace", full)
    with pytest.raises(SessionError, match="No space left"):
        session.write(tmp_path / "s", tokens + 1, {}, {}, [data])
    assert (tmp_path / "s").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
