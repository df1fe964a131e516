"""The command line on real models and the real engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def edgert(*arguments: str, stdin: bytes | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EDGERT_") or k == "EDGERT_MODELS"}
    done = subprocess.run(
        [sys.executable, "-m", "edgert", *arguments],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        env=environment | variables,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()
    return subprocess.CompletedProcess(done.args, 0, done.stdout.decode(), done.stderr.decode())


def test_run(smollm2_path: Path) -> None:
    arguments = ("run", "-m", str(smollm2_path), "-p", "What is two plus two?", "--temp", "0", "-n", "24")
    facts = json.loads(edgert(*arguments, "--json").stdout)
    assert facts["finish_reason"] in ("stop", "length") and 0 < len(facts["tokens"]) <= 24
    timings = facts["timings"]
    assert timings["prompt_n"] > 20 and timings["cache_n"] == 0
    assert timings["predicted_n"] >= len(facts["tokens"])
    assert facts["backend"].startswith("cpu on ")
    assert edgert(*arguments).stdout == facts["text"].rstrip("\n") + "\n"  # greedy: the same text again
    piped = edgert("run", "-m", str(smollm2_path), "--temp", "0", "-n", "24", stdin=b"What is two plus two?")
    assert piped.stdout.rstrip("\n") == facts["text"].rstrip("\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "-p", "Hi", "-n", "2"),
        ("bench", "-p", "8", "-n", "2", "-r", "1"),
        ("perplexity", "-f", "{text}", "-c", "8"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_the_first_start_says_why_it_takes_long(arguments: tuple[str, ...], smollm2_path: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one two three four five six seven eight nine ten eleven twelve thirteen fourteen")
    filled = [argument.format(text=tmp_path / "text") for argument in arguments]
    first = edgert(filled[0], "-m", str(smollm2_path), *filled[1:], EDGERT_CACHE=str(tmp_path))
    assert "compiling kernels for this processor, the first time only" in first.stderr
    second = edgert(filled[0], "-m", str(smollm2_path), *filled[1:], EDGERT_CACHE=str(tmp_path))
    assert "compiling" not in second.stderr


def test_a_seed_repeats_and_no_seed_varies(smollm2_path: Path) -> None:
    """Case E 66."""
    arguments = ("run", "-m", str(smollm2_path), "-p", "Tell me a story.", "--temp", "1.5", "-n", "40")
    assert edgert(*arguments, "-s", "7").stdout == edgert(*arguments, "-s", "7").stdout
    assert len({edgert(*arguments).stdout for _ in range(4)}) > 1


def test_raw_text(smollm2_path: Path) -> None:
    shown = edgert("run", "-m", str(smollm2_path), "--raw", "-p", "1, 2, 3, 4,", "--temp", "0", "-n", "6")
    assert shown.stdout.startswith(" 5, 6")


PEAK = """
import re, sys
import edgert
n_ctx = int(sys.argv[2])
with edgert.load(sys.argv[1], n_ctx=n_ctx) as model:
    model.generate([1000 + i % 1000 for i in range(n_ctx - 4)], max_tokens=2)
    print(int(re.search(r"VmHWM:\\\\s+(\\\\d+)", open("/proc/self/status").read())[1]) * 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
@pytest.mark.parametrize("n_ctx", [512, pytest.param(2048, marks=pytest.mark.slow), 4096])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_memory_that_show_predicts(name: str, n_ctx: int, request: pytest.FixtureRequest) -> None:
    """Case M 170: predicted against peak within 15 %, once the kernels have been compiled; and the peak's limit."""
    path: Any = request.getfixturevalue(f"{name}_path")
    cost = json.loads(edgert("show", str(path), "-c", str(n_ctx), "--json").stdout)["memory"]
    predicted = cost["total"]
    command = [sys.executable, "-c", PEAK.replace("\\\\", "\\"), str(path), str(n_ctx)]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peak = int(re.findall(r"\d+", done.stdout)[-1])
    assert abs(predicted - peak) < 0.15 * peak, f"predicted {predicted / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB"
    assert peak <= path.stat().st_size + cost["kv"] + 150e6
