"""Notes of what was found out: kept, replaced, lost and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgert import notes
from edgert.notes import Notes


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Notes:
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path / "cache"))
    return Notes("facts")


def test_values_are_kept_and_forgotten(kept: Notes) -> None:
    assert kept.get("a") is None
    kept.put("a", [1, {"b": 2.5}])
    kept.put("c", False)
    assert Notes("facts").get("a") == [1, {"b": 2.5}]
    assert Notes("facts").get("c") is False
    kept.put("a", None)
    assert kept.all() == {"c": False}
    assert list(kept.path.parent.iterdir()) == [kept.path]


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff\x00", "null"])
def test_damaged_notes_are_no_notes(kept: Notes, text: str) -> None:
    kept.path.parent.mkdir()
    kept.path.write_bytes(text.encode("latin-1"))
    assert kept.all() == {}
    kept.put("a", 1)
    assert kept.get("a") == 1


def test_the_oldest_go(kept: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "MOST", 3)
    for i in range(5):
        kept.put(str(i), i)
    kept.put("2", 2)
    kept.put("new", 0)
    assert list(json.loads(kept.path.read_text())) == ["4", "2", "new"]


def test_a_folder_that_cannot_be_written_loses_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path / "file"))
    Notes("facts").put("a", 1)
    assert Notes("facts").get("a") is None
