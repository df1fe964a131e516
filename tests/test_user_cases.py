"""What users of such runtimes met, where no other test has it: engines, chance, penalties, crowded contexts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgert
from edgert.options import SamplingParams
from edgert.sampler import Sampler


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime")),
    reason="onnx and onnxruntime are not installed (pip install 'edgert[npu]')",
)
def test_a_stream_by_onnx_runtime_is_the_whole_reply(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path))
    with edgert.load(tiny_model("llama"), backend="onnx", device="cpu", n_ctx=128, n_threads=1) as model:
        whole = model.generate([1, 2, 3], temperature=0, max_tokens=64, ignore_eos=True)
        chunks = list(model.generate([1, 2, 3], True, temperature=0, max_tokens=64, ignore_eos=True))
        tokens = [token for chunk in chunks for token in chunk.tokens]
        assert tokens == whole.tokens and len(tokens) == 64 and len(set(tokens)) > 1
        assert "".join(chunk.text for chunk in chunks) == whole.text
        # and each is what the model says after those before it
        logits = model.logits([1, 2, 3, *tokens[:-1]])
        margins = np.sort(logits[2:], axis=1)
        sure = margins[:, -1] - margins[:, -2] > 0.05  # a batch may be rounded otherwise than single tokens
        assert (logits[2:].argmax(1) == tokens)[sure].all() and sure.sum() > 32


def test_a_tensor_more_is_told_and_changes_nothing_and_one_less_is_named(
    tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    def answer(path: Path) -> list[int]:
        with edgert.load(path, n_ctx=64, n_threads=1, backend="cpu", spec="off") as model:
            return model.generate([1, 2, 3], temperature=0, max_tokens=8, ignore_eos=True).tokens

    expected = answer(tiny_model("llama"))
    assert "v.patch_embd.weight" not in caplog.text
    assert answer(tiny_model("llama", weights={"v.patch_embd.weight": np.ones((4, 32), np.float32)})) == expected
    assert "v.patch_embd.weight" in caplog.text
    with pytest.raises(edgert.EdgertError, match=r"blk\.1\.ffn_down\.weight"):
        answer(tiny_model("llama", omit=("blk.1.ffn_down.weight",)))


RESTARTED = """
import sys, edgert
with edgert.load(sys.argv[1], n_ctx=128, n_threads=1, backend="cpu", spec="off") as model:
    for _ in range(10):
        print(model.generate([1, 2, 3], temperature=1.5, max_tokens=32, ignore_eos=True).tokens)
"""


def test_without_a_seed_answers_differ_after_a_restart_too(tiny_model: Callable[..., Path]) -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", RESTARTED, str(tiny_model("llama"))], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for _ in range(2)
    ]
    assert [len(run) for run in runs] == [10, 10]
    assert len({*runs[0], *runs[1]}) > 10  # of 32 tokens each: that two are equal does not happen


def chances(logits: np.ndarray, history: list[int], **params: Any) -> np.ndarray:
    """Probability of each token after a history: float64 (n_vocab,)."""
    all_ = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0).changed(params)
    ids, values = Sampler(all_, len(logits)).distribution(logits, np.array(history, np.int32))
    found = np.zeros(len(logits))
    found[ids] = values
    return found


def test_a_penalty_makes_every_seen_token_less_likely_though_all_scores_are_negative() -> None:
    logits = np.array([-1.0, -2.0, -3.0, -0.5, -4.0], np.float32)
    free, held = chances(logits, [0, 2]), chances(logits, [0, 2], repeat_penalty=1.5)
    assert held[0] < free[0] and held[2] < free[2]
    assert (held[[1, 3, 4]] > free[[1, 3, 4]]).all()
    # by as much as the score itself grows
    assert np.log(held[0] / held[1]) == pytest.approx(-1.5 + 2.0)


@pytest.mark.parametrize("score", [2.0, -2.0])
def test_a_penalty_is_applied_once_however_often_a_token_was_seen(score: float) -> None:
    logits = np.array([score, 0.0, 1.0], np.float32)
    once, often = (chances(logits, [0] * n, repeat_penalty=1.1, repeat_last_n=-1) for n in (1, 50))
    np.testing.assert_allclose(often, once)
    expected = score / 1.1 if score > 0 else score * 1.1
    assert np.log(once[0] / once[1]) == pytest.approx(expected)
