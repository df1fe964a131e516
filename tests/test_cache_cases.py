"""What users met with caches and sessions (`user-cases.md`, G), on the real models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgert
from edgert.errors import SessionError
from edgert.model import Model

pytestmark = pytest.mark.slow
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
TEXT = (
    "The harbour lies where two rivers meet the sea. In spring the ice breaks early there, and the fishing boats leave "
    "before sunrise to reach the banks beyond the islands. Who keeps the lighthouse writes the weather down every hour."
)


def load(path: Path, **options: Any) -> Model:
    return edgert.load(path, backend="cpu", n_threads=2, spec="off", **options)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Model]:
    with load(smollm2_path, n_ctx=1024) as model:
        yield model


def test_fifty_prompts_cold_warm_and_partly_warm(smollm2: Model, smollm2_path: Path) -> None:
    """Line 88, and 86: no greedy reply differs, with the quantized weights and the usual cache."""
    draw = np.random.default_rng(88)
    words = TEXT.split()
    prompts = [
        smollm2.tokenize(" ".join([*words[: draw.integers(1, 30)], *draw.permutation(words)[: draw.integers(1, 60)]]))
        for _ in range(50)
    ]
    with load(smollm2_path, n_ctx=1024, prefix_cache="off") as plain:
        cold = [plain.generate(prompt, **GREEDY) for prompt in prompts]
    assert not any(reply.stats.cache_n for reply in cold)
    partly = [smollm2.generate(prompt, **GREEDY) for prompt in prompts]
    assert sum(reply.stats.cache_n > 0 for reply in partly) > 25
    for prompt, first, second in zip(prompts, cold, partly, strict=True):
        warm = [smollm2.generate(prompt, **GREEDY) for _ in range(2)]
        assert {tuple(reply.tokens) for reply in (first, second, *warm)} == {tuple(first.tokens)}
        assert warm[1].stats.cache_n == len(prompt) - 1 and warm[1].text == first.text != ""


def test_five_turns_beyond_the_window_of_gemma3(gemma3_path: Path) -> None:
    """Line 90: each turn reads what is new, and answers as a cold start does."""
    messages: list[dict[str, str]] = []
    with load(gemma3_path, n_ctx=2048) as model:
        for turn in range(5):
            messages.append({"role": "user", "content": f"{turn}. {TEXT * 5} What is this about?"})
            reply = model.chat(messages, temperature=0.0, max_tokens=12)
            read = reply.stats.prompt_n
            assert turn == 0 or (reply.stats.cache_n > 150 * turn and read < 300), (turn, read)
            with load(gemma3_path, n_ctx=2048) as cold:
                assert cold.chat(messages, temperature=0.0, max_tokens=12).tokens == reply.tokens
            messages.append({"role": "assistant", "content": reply.text})
        assert reply.stats.cache_n + reply.stats.prompt_n > 1000  # twice its window of 512


def test_a_rejected_session_leaves_the_cache_as_it_was(smollm2: Model, smollm2_path: Path, tmp_path: Path) -> None:
    """Line 92, and row 14: each kind of damage is refused, and the next reply is that of a cold start."""
    prompt = smollm2.tokenize(TEXT)
    smollm2.generate(prompt, **GREEDY)
    smollm2.save_session(tmp_path / "s", prompt)
    sound = (tmp_path / "s").read_bytes()
    with load(smollm2_path, n_ctx=1024) as cold:
        expected = cold.generate([*prompt, 5], **GREEDY)
    draw = np.random.default_rng(92)
    places = [0, 9, 20, *(len(sound) * draw.random(12)).astype(int).tolist(), len(sound) - 1]
    for place in places:
        bad = bytearray(sound)
        bad[place] ^= 1 << int(draw.integers(8))
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(SessionError):
            smollm2.load_session(tmp_path / "bad")
        reply = smollm2.generate([*prompt, 5], **GREEDY)
        assert reply.tokens == expected.tokens and reply.stats.cache_n == len(prompt)
    with load(smollm2_path, n_ctx=1024) as other:
        with pytest.raises(SessionError):
            other.load_session(tmp_path / "bad")
        reply = other.generate([*prompt, 5], **GREEDY)
        assert reply.tokens == expected.tokens and reply.stats.cache_n == 0
        other.load_session(tmp_path / "s")
        assert other.generate([*prompt, 5], **GREEDY).tokens == expected.tokens
