"""Servers that tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # so that tests say `from harness import serving`

from fake import fake_model, says
from harness import Server, serving_model
from shelf import Shelf

ANSWER = "Hello, wörld 🙂! one two three four"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A model that answers every chat with ANSWER."""
    with serving_model(fake_model(says(ANSWER), n_ctx=2048)) as running:
        yield running


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()
