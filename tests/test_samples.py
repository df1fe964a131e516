"""Every program in samples/ runs and does what its first lines say."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Runner = Callable[[str], str]
SAMPLES = Path(__file__).resolve().parent.parent / "samples"


@pytest.fixture
def run(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    def runner(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, str(smollm2_path)])
        runpy.run_path(str(SAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return runner


def test_stream_chat(run: Runner) -> None:
    output = run("stream_chat.py")
    counts = re.findall(r"\[(?:stop|length): (\d+) tokens read, (\d+) from the cache\]", output)
    assert len(counts) == 2
    (first, nothing), (second, cached) = (map(int, pair) for pair in counts)
    assert nothing == 0
    assert cached >= first
    assert second < cached


def test_async_requests(run: Runner) -> None:
    lines = run("async_requests.py").splitlines()
    for question, line in zip(("Name a colour.", "Name an animal.", "Name a river."), lines, strict=False):
        assert re.match(re.escape(question) + " -> .", line)
    assert len(lines) > 3


def test_time_limit(run: Runner) -> None:
    assert re.search(r"\[cancelled after \d+ tokens\]\n$|\[length after \d+ tokens\]\n$", run("time_limit.py"))


def test_choose(run: Runner) -> None:
    scores = [float(line.split()[0]) for line in run("choose.py").splitlines()]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 3


def test_every_sample_has_its_test() -> None:
    tested = set(re.findall(r'run\("(\w+\.py)"\)', Path(__file__).read_text()))
    own = {path.name for path in SAMPLES.glob("*.py")}
    assert own == tested
