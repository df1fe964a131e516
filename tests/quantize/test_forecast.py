"""How long a quantization will take is told before it, and learned from those that were done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from edgert.quantize import forecast
from edgert.quantize.progress import EXPECTED


def test_a_forecast_learns_from_what_was_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """First by what is usual, then by what this machine took, compiling left out."""
    monkeypatch.setattr("edgert.notes.cache_root", lambda: tmp_path)
    now, heard = 0.0, []
    monkeypatch.setattr(forecast, "time", SimpleNamespace(monotonic=lambda: now))
    work = {"calibrating": 1e12, "quantizing plainly": 1e8}
    usual = sum(units * forecast.USUAL[stage] for stage, units in work.items()) / 2
    for expected in (usual, 70 + 5):
        one = forecast.Forecast(lambda *tell: heard.append(tell), 2)
        one.begin(work)
        assert heard[0] == (EXPECTED, "", 0, pytest.approx(expected))
        for stage, seconds in (("calibrating", 40), ("compiling", 500), ("calibrating", 30), ("quantizing", 5)):
            one(stage, "", 0, 1)
            now += seconds
        one.end()
        assert [stage for stage, *_ in heard[1:]] == ["calibrating", "compiling", "calibrating", "quantizing"]
        heard.clear()


def test_what_takes_little_teaches_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("edgert.notes.cache_root", lambda: tmp_path)
    one = forecast.Forecast(lambda *_: None, 1)
    one.begin({"comparing": 1e3})
    one("comparing", "", 0, 1)
    one.end()
    assert not forecast.Notes("quantizing").all()
