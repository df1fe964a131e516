"""Plans on machines that are not this one; what was measured for others is not known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgert.devices import probe


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("edgert.notes.cache_root", lambda: tmp_path / "notes")


@pytest.fixture
def with_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this a machine with so much memory left, this process counted as nothing."""

    def left(n_bytes: int) -> None:
        machine = replace(probe.probe(), memory_available=n_bytes)
        monkeypatch.setattr(probe, "probe", lambda *_: machine)
        monkeypatch.setattr(probe, "process_memory", lambda: (0, 0))

    return left
