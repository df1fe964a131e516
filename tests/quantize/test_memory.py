"""Peak memory: without calibration, by the script that measures it on three billion weights; and within a bound."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st

from edgert.quantize.memory import Limits, Work

pytest.importorskip("tokenizers", reason="it reads tokenizer.json: pip install edgert[convert]")

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
def test_a_small_model_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three times the largest tensor, as the source stores it, and 200 MB; the kernels not yet compiled."""
    monkeypatch.syspath_prepend(str(BENCH))
    import quantizer_memory as bench

    shape = bench.Shape(n_layer=2, n_embd=1024, n_ff=2048, n_head=8, n_head_kv=2, n_vocab=8192)
    bench.write_checkpoint(tmp_path / "model", shape, shard_bytes=20_000_000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path / "cache"))
    peak, _ = bench.measure(tmp_path / "model", tmp_path / "out.gguf", "--fast", "--type", "q4_k_m", "-t", "2")
    assert peak <= 3 * shape.largest + bench.ALLOWED


@given(st.integers(0, 20_000), st.integers(0, 1 << 28), st.integers(0, 1 << 30), st.integers(0, 1 << 34))
def test_limits_keep_to_the_room_wherever_any_do(widest: int, logits: int, result: int, room: int):
    work = Work(widest, logits, result)
    found = work.within(room)
    if work.n_bytes(work.least) > room:
        assert found == work.least
    else:
        assert work.n_bytes(found) <= room
        more = work.within(room + (1 << 20))
        assert (more.curvatures, more.rows, more.hessians) >= (found.curvatures, found.rows, found.hessians)
    assert found.hessians >= 4 * widest**2 and Limits().curvatures >= found.curvatures >= 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
@pytest.mark.parametrize("way", ["--bpw=6", "--fast"])
def test_the_least_memory_that_is_named_is_enough_and_kept_to(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
):
    """Of a model whose correlations of inputs alone take more than they may."""
    monkeypatch.syspath_prepend(str(BENCH))
    import quantizer_memory as bench

    source = tiny_model("llama", n_embd=256, head_dim=64, n_ff=2560, quant=Type.BF16)
    text, out = tmp_path / "text.txt", tmp_path / "out.gguf"
    text.write_text(" ".join("".join(random.Random(5).choices("the and world hello is in", k=6)) for _ in range(9000)))
    flags = ["-t", "1", *(["--fast", "--type", "q4_k_m"] if way == "--fast" else [way, "--calibration", str(text)])]
    usual, _ = bench.measure(source, out, *flags)
    said = refused(source, out, *flags)
    least = int(re.search(r"it takes ([\d,]+) MB at least", said)[1].replace(",", "")) * 1_000_000  # type: ignore[index]
    peak, _ = bench.measure(source, out, *flags, "--max-memory", str(least))
    assert peak <= least
    if way != "--fast":
        assert peak < usual


def refused(source: Path, out: Path, *flags: str) -> str:
    """What a bound that is too small is answered, in one sentence and before anything is written."""
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "edgert", "quantize", source, "-o", out, *flags, "--max-memory", "30MB"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.count("\n") == 1 and "within the 30 MB of max_memory" in done.stderr
    assert not list(out.parent.glob("out.gguf*"))
    return done.stderr
