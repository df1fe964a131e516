"""Peak memory without calibration, by the script that measures it on a model of three billion weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="it reads tokenizer.json: pip install edgert[convert]")

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
def test_a_small_model_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three times the largest tensor, as the source stores it, and 200 MB; the kernels not yet compiled."""
    monkeypatch.syspath_prepend(str(BENCH))
    import quantizer_memory as bench

    shape = bench.Shape(n_layer=2, n_embd=1024, n_ff=2048, n_head=8, n_head_kv=2, n_vocab=8192)
    bench.write_checkpoint(tmp_path / "model", shape, shard_bytes=20_000_000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path / "cache"))
    peak, _ = bench.measure(tmp_path / "model", tmp_path / "out.gguf", "--type", "q4_k_m", "-t", "2")
    assert peak <= 3 * shape.largest + bench.ALLOWED
