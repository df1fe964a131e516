"""What is already cached is not read again, and changes no reply: repeated prompts, warm and partly warm, windows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_many_at_once_say_what_each_says_alone(family: str, tiny_model: Callable[..., Path]) -> None:
    """Six clients whose prompts begin alike, in less memory than they want, on real pages."""
    window = {"window": 48} if family == "gemma3" else {}
    path = tiny_model(family, quant=Type.F32, n_ctx=1024, **window)
    rng = np.random.default_rng(6)
    beginnings = [rng.integers(0, 384, 300).tolist() for _ in range(2)]
    prompts = [
        beginnings[i % 2][: int(rng.integers(1, 300))] + rng.integers(0, 384, int(rng.integers(1, 50))).tolist()
        for i in range(30)
    ]
    options: dict[str, Any] = {"backend": "cpu", "n_ctx": 512, "n_threads": 2, "spec": "off"}
    with edgert.load(path, prefix_cache="off", n_parallel=1, **options) as model:
        alone = [model.generate(prompt, **GREEDY).tokens for prompt in prompts]
        assert model.snapshot().cached_tokens == 0
    with edgert.load(path, n_parallel=4, n_cached=900, **options) as model:
        found: dict[int, list[int]] = {}

        def client(first: int) -> None:
            for i in range(first, len(prompts), 6):
                found[i] = model.generate(prompts[i], user=f"u{first}", **GREEDY).tokens

        threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[i] for i in range(len(prompts))] == alone
        counts = model.snapshot()
        assert counts.finished == 30 and counts.prefix_hits > 10 and counts.prefix_evictions > 0
        assert counts.batch_sequences >= 1
        assert counts.kv_bytes <= counts.kv_bytes_total * 1.5 if family == "llama" else True
