"""Session files: what comes back, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

import edgert
from edgert import session
from edgert.errors import RequestError, SessionError
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


@pytest.fixture
def open_llama(tiny_model: Callable[..., Path]) -> Iterator[Open]:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    opened: list[Model] = []

    def make(family: str = "llama", seed: int = 0, types: str = "q8_0", **options: object) -> Model:
        path = tiny_model(family, quant=Type.Q8_0, seed=seed, head_dim=32)
        options = {"n_ctx": 256, "n_threads": 1, "n_seq_max": 3, **options}
        opened.append(edgert.load(path, cache_type_k=types, cache_type_v=types, backend="llama", **options))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for model in opened:
        model.close()


@pytest.mark.parametrize("types", ["f16", "q4_0"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_llama_cpp_reads_nothing_again_either(family: str, types: str, open_llama: Open, tmp_path: Path) -> None:
    """A part of a sequence is saved, without what follows it, and comes back in another process's stead."""
    first = open_llama(family, types=types)
    expected = first.generate([*TOKENS[:100], 7], **GREEDY)
    first.generate(TOKENS, max_tokens=0)
    assert first.save_session(tmp_path / "s", TOKENS[:100]) == 100
    assert first.generate([*TOKENS, 3], max_tokens=0).stats.cache_n == len(TOKENS)  # it goes on holding the rest
    second = open_llama(family, types=types)
    assert second.load_session(tmp_path / "s").tokens.tolist() == TOKENS[:100]
    again = second.generate([*TOKENS[:100], 7], **GREEDY)
    assert again.stats.cache_n == 100
    assert again.tokens == expected.tokens
    assert second.save_session(tmp_path / "t", TOKENS[:100]) == 100
    assert session.read(tmp_path / "t").data.nbytes == session.read(tmp_path / "s").data.nbytes


def test_llama_cpp_refuses_what_is_not_its_own(open_llama: Open, open_model: Open, tmp_path: Path) -> None:
    model = open_llama()
    expected = model.generate([*TOKENS, 3], **GREEDY)
    model.save_session(tmp_path / "s", TOKENS)
    with pytest.raises(SessionError, match="another model"):
        open_llama(seed=1).load_session(tmp_path / "s")
    with pytest.raises(SessionError, match="another type k: 'q8_0', not 'f16'"):
        open_llama(types="f16").load_session(tmp_path / "s")
    with pytest.raises(SessionError, match="another backend: 'llama', not 'cpu'"):
        open_model().load_session(tmp_path / "s")
    with pytest.raises(SessionError, match="120 tokens, and the context holds 64"):
        open_llama(n_ctx=64).load_session(tmp_path / "s")
    found = session.read(tmp_path / "s")
    for facts, data in (
        ({**found.facts, "n_bytes": 7}, found.data),
        ({**found.facts, "n_bytes": found.data.nbytes - 9}, found.data[:-9]),
        ({**found.facts, "length": 3}, found.data),
        ({**found.facts, "n_bytes": 4}, np.frombuffer(b"\xff" * 4, np.uint8)),
    ):
        session.write(tmp_path / "t", found.tokens, {}, facts, [data])
        with pytest.raises(SessionError):
            model.load_session(tmp_path / "t")
    assert model.generate([*TOKENS, 3], **GREEDY).tokens == expected.tokens


@pytest.fixture
def open_onnx(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    for name in ("onnx", "onnxruntime"):
        pytest.importorskip(name, reason=f"{name} is not installed (pip install 'edgert[npu]')")
    from edgert.backends.onnx import providers, store

    monkeypatch.setattr(store, "root", lambda: tmp_path / "onnx")
    opened: list[Model] = []

    def make(family: str = "llama", seed: int = 0, profile: str = "fused", **options: object) -> Model:
        row = replace(providers.PROVIDERS["cpu"], profile=profile)  # type: ignore[arg-type]
        monkeypatch.setitem(providers.PROVIDERS, "cpu", row)
        path = tiny_model(family, quant=Type.Q8_0, seed=seed, head_dim=32)
        options = {"n_ctx": 256, "n_threads": 1, "n_seq_max": 3, "device": "cpu", "n_cached": 768, **options}
        opened.append(edgert.load(path, backend="onnx", **options))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for model in opened:
        model.close()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_onnx_runtime_reads_nothing_again_either(family: str, open_onnx: Open, tmp_path: Path) -> None:
    """Nor on a processor for which the cache lies otherwise in memory: the file is the same."""
    first = open_onnx(family)
    expected = first.generate([*TOKENS[:100], 7], **GREEDY)
    first.generate(TOKENS, max_tokens=0)
    assert first.save_session(tmp_path / "s", TOKENS[:100]) == 100
    for i, profile in enumerate(("fused", "static")):
        other = open_onnx(family, profile=profile)
        assert other.load_session(tmp_path / "s").tokens.tolist() == TOKENS[:100]
        assert other.save_session(tmp_path / f"{i}", TOKENS[:100]) == 100
        np.testing.assert_array_equal(session.read(tmp_path / f"{i}").data, session.read(tmp_path / "s").data)
        again = other.generate([*TOKENS[:100], 7], **GREEDY)
        assert again.stats.cache_n == 100
        assert again.tokens == expected.tokens


def test_onnx_runtime_refuses_what_is_not_its_own(open_onnx: Open, open_model: Open, tmp_path: Path) -> None:
    model = open_onnx()
    expected = model.generate([*TOKENS, 3], **GREEDY)
    model.save_session(tmp_path / "s", TOKENS)
    with pytest.raises(SessionError, match="another model"):
        open_onnx(seed=1).load_session(tmp_path / "s")
    with pytest.raises(SessionError, match="another backend: 'onnx', not 'cpu'"):
        open_model().load_session(tmp_path / "s")
    with pytest.raises(SessionError, match="120 tokens, and the context holds 64"):
        open_onnx(n_ctx=64, n_cached=192).load_session(tmp_path / "s")
    found = session.read(tmp_path / "s")
    for facts, data in ((found.facts, found.data[:-4]), ({**found.facts, "length": 3}, found.data)):
        session.write(tmp_path / "t", found.tokens, {}, facts, [data])
        with pytest.raises(SessionError):
            model.load_session(tmp_path / "t")
    assert model.generate([*TOKENS, 3], **GREEDY).tokens == expected.tokens


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
@settings(max_examples=200)
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("s") / "s"
    path.write_bytes(session.MAGIC + content)
    with pytest.raises(SessionError):
        session.read(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=4), some, max_size=3),
    max_leaves=6,
)


class Saved:
    """A session, the model that it is of, and what that answers as long as nothing has harmed its memory."""

    def __init__(self, model: Model, path: Path) -> None:
        self.model, self.path = model, path
        self.expected = model.generate([*TOKENS, 3], **GREEDY).tokens
        model.save_session(path, TOKENS, transcript={"said": "häh\ud800"})
        self.content = path.read_bytes()
        (n_header,) = struct.unpack("<Q", self.content[8:16])
        self.header = json.loads(self.content[16 : 16 + n_header])
        self.rest = self.content[16 + n_header : -32]

    def forge(self, header: object, rest: bytes | None = None) -> None:
        """Writes a file whose checksum is right."""
        text = json.dumps(header).encode()
        content = session.MAGIC + struct.pack("<Q", len(text)) + text + (self.rest if rest is None else rest)
        self.path.write_bytes(content + hashlib.sha256(content).digest())

    def check_unharmed(self) -> None:
        reply = self.model.generate([*TOKENS, 3], **GREEDY)
        assert reply.tokens == self.expected
        assert reply.stats.cache_n == len(TOKENS)


@pytest.fixture
def saved(open_model: Open, tmp_path: Path) -> Saved:
    return Saved(open_model("gemma3", types="q4_0"), tmp_path / "s")


@given(data=st.data())
@settings(max_examples=150)
def test_any_damage_is_refused(saved: Saved, data: st.DataObject) -> None:
    """Cut, lengthened, or changed anywhere."""
    content = bytearray(saved.content)
    place = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 600))
    how = data.draw(st.sampled_from(["cut", "flip", "zero", "insert", "append"]))
    if how == "cut":
        del content[place:]
    elif how == "flip":
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "zero":
        stop = place + data.draw(st.integers(1, 5000))
        content[place:stop] = bytes(len(content[place:stop]))
    elif how == "insert":
        content[place:place] = data.draw(st.binary(min_size=1, max_size=40))
    else:
        content += data.draw(st.binary(min_size=1, max_size=40))
    if content == saved.content:  # zeros were zeros before
        return
    saved.path.write_bytes(content)
    with pytest.raises(SessionError, match=r"damaged|not a session"):
        saved.model.load_session(saved.path)
    if data.draw(st.integers(0, 19)) == 0:
        saved.check_unharmed()


@given(data=st.data())
@settings(max_examples=60)
def test_any_forgery_is_refused_or_right(saved: Saved, data: st.DataObject) -> None:
    """A header that somebody wrote by hand, with a right checksum."""
    header = json.loads(json.dumps(saved.header))
    holder = header
    while True:
        key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
        if holder[key] and isinstance(holder[key], dict | list) and data.draw(st.booleans()):
            holder = holder[key]
            continue
        if data.draw(st.booleans()) and isinstance(holder[key], int):
            holder[key] += data.draw(st.sampled_from([-1, 1, 0.0, 2**31, 2**63, -(2**64), 1e308]))
        else:
            holder[key] = data.draw(JSON)
        break
    saved.forge(header)
    with contextlib.suppress(SessionError):
        saved.model.load_session(saved.path)
    saved.check_unharmed()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, r"session format 2; this edgert reads 1"),
        ({"n_tokens": 10**18}, "damaged"),
        ({"n_bytes": -1}, "damaged"),
        ({"n_tokens": float("inf")}, "damaged"),
        ({"n_tokens": 0}, "damaged"),
    ],
)
def test_each_refusal_says_why(saved: Saved, change: dict[str, object], words: str) -> None:
    saved.forge({**saved.header, **change})
    with pytest.raises(SessionError, match=words):
        saved.model.load_session(saved.path)
    saved.check_unharmed()


def test_a_header_of_any_depth(saved: Saved) -> None:
    text = b"[" * 200_000
    content = session.MAGIC + struct.pack("<Q", len(text)) + text
    saved.path.write_bytes(content + hashlib.sha256(content).digest())
    with pytest.raises(SessionError, match="damaged"):
        session.read(saved.path)


def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, a pipe that nobody writes to, nothing, a name that cannot be, a file larger than memory."""
    with pytest.raises(SessionError, match=r"cannot be read \("):
        session.read(tmp_path / "none")
    with pytest.raises(SessionError, match=r"cannot be read \("):
        session.read(tmp_path / "a\0b")
    with pytest.raises(SessionError, match=r"cannot be read|no file"):
        session.read(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(SessionError, match="no file"):
            session.read(tmp_path / "pipe")
    with open(tmp_path / "huge", "wb") as file:
        file.write(session.MAGIC + struct.pack("<Q", 2))
        file.truncate(1 << 42)
    with pytest.raises(SessionError, match=r"4194304 MiB, and \d+ MiB of memory are available"):
        session.read(tmp_path / "huge")


def test_places_that_take_no_file(tmp_path: Path) -> None:
    tokens, data = np.arange(3, dtype=np.int32), np.zeros(5, np.uint8)
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file" / "s", tmp_path / "a\0b", tmp_path / ("x" * 300)):
        with pytest.raises(SessionError, match="cannot be written"):
            session.write(path, tokens, {}, {}, [data])
    (tmp_path / "folder").mkdir()
    with pytest.raises(SessionError, match="cannot be written"):
        session.write(tmp_path / "folder", tokens, {}, {}, [data])
    with pytest.raises(RequestError, match="transcript: must be what JSON can hold"):
        session.write(tmp_path / "s", tokens, {"x": {1, 2}}, {}, [data])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="who may do everything may write anywhere")
def test_a_folder_that_may_only_be_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SessionError, match="Permission denied"):
        session.write(tmp_path / "s", np.arange(3, dtype=np.int32), {}, {}, [])


def test_links_are_not_followed(tmp_path: Path) -> None:
    """What a link of the file's name points to stays as it is; reading follows it."""
    tokens = np.arange(3, dtype=np.int32)
    (tmp_path / "other").write_text("kept")
    try:
        (tmp_path / "s").symlink_to("other")
    except OSError:
        pytest.skip("links cannot be made here")
    session.write(tmp_path / "s", tokens, {}, {}, [])
    assert (tmp_path / "other").read_text() == "kept"
    (tmp_path / "link").symlink_to("s")
    assert session.read(tmp_path / "link").tokens.tolist() == [0, 1, 2]


def test_what_a_killed_process_left_goes_in_time(tmp_path: Path) -> None:
    old, new = tmp_path / "s.abc.part", tmp_path / "s.def.part"
    old.touch()
    new.touch()
    os.utime(old, (1, 1))
    session.write(tmp_path / "s", np.arange(3, dtype=np.int32), {}, {}, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "s.def.part"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_process_leaves_a_whole_file(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, itertools, numpy as np; from edgert import session\n"
        "for i in itertools.count():\n"
        "    data = [np.full(1 << 20, i % 256, np.uint8)]\n"
        "    session.write(pathlib.Path(sys.argv[1]), np.full(9, i, np.int32), {}, {}, data)\n"
        "    if not i: print('begun', flush=True)"
    )
    delays = np.random.default_rng(2).uniform(0, 0.08, 40)
    for delay in delays:
        with subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "s")], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "begun\n"
            time.sleep(delay)
            writer.kill()
        found = session.read(tmp_path / "s")
        assert found.data.tolist() == [found.tokens[0] % 256] * (1 << 20)


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of resources")
def test_a_disk_that_fills_while_it_is_written(tmp_path: Path) -> None:
    """The system's own error in the middle of the file."""
    import resource

    tokens, data = np.arange(3, dtype=np.int32), np.zeros(1 << 20, np.uint8)
    session.write(tmp_path / "s", tokens, {}, {}, [data[:5]])
    before = (tmp_path / "s").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limits[1]))
    try:
        with pytest.raises(SessionError, match=r"cannot be written \(File too large\)"):
            session.write(tmp_path / "s", tokens + 1, {}, {}, [data])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "s").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, data = np.arange(3, dtype=np.int32), np.zeros(5, np.uint8)
    session.write(tmp_path / "s", tokens, {}, {}, [data])
    before = (tmp_path / "s").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edgert.files.replace", full)
    with pytest.raises(SessionError, match="No space left"):
        session.write(tmp_path / "s", tokens + 1, {}, {}, [data])
    assert (tmp_path / "s").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
