"""Thousands of damaged files; the work is in fuzz_gguf, run in a process of its own, which may not crash."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="the harness measures memory by getrusage")

import fuzz_gguf


@pytest.mark.parametrize(("mutations", "first_seed"), [(1_000, 0), pytest.param(10_000, 1_000, marks=pytest.mark.slow)])
def test_damaged_files_are_opened_or_refused(mutations: int, first_seed: int) -> None:
    command = [sys.executable, fuzz_gguf.__file__, "--mutations", str(mutations), "--first-seed", str(first_seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.findall(r"^(.*): tried (\d+), survived (\d+)", done.stdout, re.MULTILINE)
    tried = {name: int(tried) for name, tried, survived in counted if tried == survived}
    assert tried["truncations"] > 100
    assert tried["length fields"] > 600
    assert tried["mutations"] == mutations


def test_the_harness_notices_a_reader_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise MemoryError

    monkeypatch.setattr(fuzz_gguf, "read_everything", broken)
    count = fuzz_gguf.Count()
    fuzz_gguf.attempt(tmp_path / "x.gguf", b"", "seed 1", count)
    assert len(count.failures) == 1
    assert "MemoryError" in count.failures[0]


def test_all_length_fields_are_found(tmp_path: Path) -> None:
    data = fuzz_gguf.write_sample(tmp_path / "s.gguf")
    meanings = [meaning for _, _, meaning in fuzz_gguf.length_fields(data)]
    assert meanings.count("offset") == meanings.count("dimensions") == meanings.count("tensor type") == 5
    assert meanings.count("dimension") == 9
    assert meanings.count("element length") == 5
    assert meanings.count("key length") == meanings.count("value type") == 16


def test_a_seed_gives_the_same_damage() -> None:
    data = bytes(range(256)) * 8
    assert fuzz_gguf.mutated(data, 5) == fuzz_gguf.mutated(data, 5)
    assert len({fuzz_gguf.mutated(data, seed) for seed in range(100)}) > 90
