"""What tests of the choice need: notes of their own, a model, and a count of the doors that were opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from twins import Clock

from edgert import backends
from edgert.backends import choice
from edgert.backends.base import Backend


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Notes and a clock of this test alone; kernels where all tests have them."""
    monkeypatch.setattr("edgert.notes.cache_root", lambda: tmp_path / "notes")
    monkeypatch.setattr(choice, "time", Clock())


@pytest.fixture
def path(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which doors were opened."""
    found: list[str] = []
    for name, opener in list(backends.OPENERS.items()):

        def counted(*arguments: Any, name: str = name, opener: Any = opener) -> Backend:
            found.append(name)
            return opener(*arguments)

        monkeypatch.setitem(backends.OPENERS, name, counted)
    return found
