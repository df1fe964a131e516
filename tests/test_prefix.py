"""What is already cached is not read again, and changes no reply: repeated prompts, warm and partly warm, windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import edgert
from edgert.model import Model

GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def load(path: Path, types: str, n_ctx: int = 1024) -> Model:
    return edgert.load(
        path, backend="cpu", n_ctx=n_ctx, n_threads=2, spec="off", cache_type_k=types, cache_type_v=types
    )


@pytest.mark.parametrize("types", ["f16", "q8_0", "q4_0"])
def test_a_chat_beyond_the_window_reads_what_is_new(types: str, tiny_model: Callable[..., Path]) -> None:
    """Five turns; layers with a window have given back the beginning, and the answers are those of a cold start."""
    path = tiny_model("gemma3", quant=Type.F32, window=48, n_ctx=1024)
    rng = np.random.default_rng(2)
    with load(path, types) as model:
        pools = model.backend._cache.pools  # type: ignore[attr-defined]
        assert sorted(pools) == [0, 48]
        text: list[int] = []
        for turn in range(5):
            text += rng.integers(0, 384, 150).tolist()
            reply = model.generate(text, **GREEDY)
            read = len(text) - reply.stats.cache_n
            assert read <= 151 if turn else read == 150
            with load(path, types) as cold:
                assert cold.generate(text, **GREEDY).tokens == reply.tokens
            text += reply.tokens
        assert pools[48].used < pools[0].used


def test_what_a_window_has_passed_is_read_again(tiny_model: Callable[..., Path]) -> None:
    """A prompt that leaves the cached one far behind its end starts anew, and is answered as by a cold start."""
    path = tiny_model("gemma3", quant=Type.F32, window=48, n_ctx=1024)
    tokens = np.random.default_rng(3).integers(0, 384, 900).tolist()
    with load(path, "q8_0") as model:
        model.generate(tokens, **GREEDY)
        model.generate([*tokens, 1], **GREEDY)
        near = model.generate([*tokens[:870], 5], **GREEDY)
        assert near.stats.cache_n == 870
        far = model.generate([*tokens[:300], 5], **GREEDY)
        assert far.stats.cache_n == 0
    with load(path, "q8_0") as cold:
        assert cold.generate([*tokens[:300], 5], **GREEDY).tokens == far.tokens


@pytest.mark.parametrize("types", ["f16", "q8_0", "q4_0"])
def test_cold_warm_and_partly_warm(types: str, tiny_model: Callable[..., Path]) -> None:
    """The same prompt thrice, and prompts that share a beginning: with float weights no reply differs."""
    path = tiny_model("llama", quant=Type.F32)
    rng = np.random.default_rng(4)
    beginning = rng.integers(0, 384, 70).tolist()
    prompts = [beginning[: int(rng.integers(1, 70))] + rng.integers(0, 384, 40).tolist() for _ in range(12)]
    with load(path, types, 256) as warm:
        for prompt in prompts:
            partly = warm.generate(prompt, **GREEDY)
            again = [warm.generate(prompt, **GREEDY) for _ in range(2)]
            assert [reply.tokens for reply in again] == [partly.tokens] * 2
            assert again[1].stats.cache_n == len(prompt) - 1
            with load(path, types, 256) as fresh:
                assert fresh.generate(prompt, **GREEDY).tokens == partly.tokens
