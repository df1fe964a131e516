"""The soak, shortened."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from soak import soak


@pytest.mark.slow
def test_half_a_minute_of_everything(smollm2_path: Path) -> None:
    found = soak(str(smollm2_path), 30, clients=6, threads=1)
    assert found["faults"] == []
    assert found["tried"]["exchange"] and found["tried"]["exchange refused"]
    assert sum(found["tried"].values()) > 6 * 10
