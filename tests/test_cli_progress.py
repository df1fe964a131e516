"""How far long work is, on a terminal and without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgert.cli import progress
from edgert.cli.progress import duration, stages
from edgert.quantize.progress import EXPECTED


def test_who_sees_no_bar_hears_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all may take, what has begun, and after tenths of what takes long how long it will yet take."""
    now = 100.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    with stages() as tell:
        tell(EXPECTED, "", 0, 125.0)
        tell("loading", "", 0, 1)
        for i in range(50):
            tell("short", "", i + 1, 50)
            now += 0.05
        for i in range(100):  # 200 s in all, a line each tenth
            tell("long", "", i, 100)
            now += 2.0
        tell("short", "", 0, 50)
    assert capsys.readouterr().err.splitlines() == [
        "This will take about 2 min.",
        "loading",
        "short",
        "long",
        *(f"long: {10 * i} %, about {duration(200 - 20 * i)} left" for i in range(1, 10)),
        "short",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 s"), (89.6, "90 s"), (95, "2 min"), (3600, "60 min"), (7000, "1 h 57 min")]
)
def test_times_are_told_roughly(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_stage_that_comes_back_is_shown_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    from rich.progress import Progress

    names, drawn = ["compiling", "compiling", "calibrating", "compiling", "quantizing"], []

    def run_through() -> None:
        with stages() as tell:
            for stage in names:
                tell(stage, "", 1, 2)

    run_through()
    expected = ["compiling", "calibrating", "compiling", "quantizing"]
    assert capsys.readouterr().err.split() == expected
    add_task = Progress.add_task

    def add(self: Progress, description: str, **options: Any) -> Any:
        assert not self.task_ids  # one bar at a time
        drawn.append(description)
        return add_task(self, description, **options)

    monkeypatch.setattr(Progress, "add_task", add)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    run_through()
    assert drawn == expected
