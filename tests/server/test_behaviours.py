"""The table of behaviours names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("behaviours.md")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE.read_text("utf-8"))))


def test_the_table_is_read() -> None:
    assert len(NAMED) > 100


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_its_tests_exist(file: str) -> None:
    defined = re.findall(r"^(?:async )?def (test_\w+)", (TABLE.parent.parent / file).read_text("utf-8"), re.MULTILINE)
    assert [name for of, name in NAMED if of == file and name not in defined] == []
