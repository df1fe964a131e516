"""What families differ in, under everything that cuts and copies a sequence: forks, sessions, drafts, embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from mixtures import write_mixture
from reference import Reference
from tiny import random_weight, write_tiny

import edgert
from edgert import backends
from edgert.backends.base import Batch
from edgert.model import Model

RNG = np.random.default_rng(8)
N_LAYER, N_EMBD, N_HEAD = 3, 128, 4
TOKENS = RNG.integers(0, 384, 150).tolist()
# Repeats itself, so that drafts are found in it, and breaks off where they go wrong.
REPEATING = (TOKENS[:9] * 6)[:50]
GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
FLOAT = {"backend": "cpu", "n_ctx": 256, "n_threads": 1, "cache_type_k": "f16", "cache_type_v": "f16"}


def convolving(path: Path) -> Path:
    """lfm2 with two convolutions around a layer of attention."""
    weights = {"token_embd_norm.weight": random_weight(RNG, "norm.weight", (N_EMBD,), True)}
    omitted = ["output_norm.weight"]
    for i in (0, 2):
        omitted += [f"blk.{i}.attn_{part}.weight" for part in ("q", "k", "v", "output")]
        for part, shape in {"in_proj": (3 * N_EMBD, N_EMBD), "conv": (N_EMBD, 3), "out_proj": (N_EMBD, N_EMBD)}.items():
            weights[f"blk.{i}.shortconv.{part}.weight"] = random_weight(RNG, part, shape, True)
    for part in "qk":
        weights[f"blk.1.attn_{part}_norm.weight"] = random_weight(RNG, "norm.weight", (32,), True)
    keys = {"lfm2.shortconv.l_cache": 3, "lfm2.attention.head_count_kv": [0, 2, 0], "lfm2.context_length": 4096}
    return write_tiny(
        path, "lfm2", n_layer=N_LAYER, quant=Type.F32, tied=True, weights=weights, omit=omitted, metadata=keys
    )


def with_sinks(path: Path) -> Path:
    sinks = {f"blk.{i}.attn_sinks.weight": RNG.normal(0, 1, N_HEAD).astype(np.float32) for i in range(N_LAYER)}
    return write_tiny(path, "llama", n_layer=N_LAYER, quant=Type.F32, weights=sinks)


def parallel(path: Path) -> Path:
    keys = {"command-r.attention.layer_norm_rms_epsilon": None, "command-r.attention.layer_norm_epsilon": 1e-5}
    omitted = [f"blk.{i}.ffn_norm.weight" for i in range(N_LAYER)]
    return write_tiny(path, "command-r", n_layer=N_LAYER, quant=Type.F32, tied=True, metadata=keys, omit=omitted)


KINDS: dict[str, Callable[[Path], Path]] = {
    "convolutions": convolving,
    "sinks": with_sinks,
    "windows": lambda path: write_tiny(path, "gemma3", quant=Type.F32, n_ctx=4096),
    "experts": lambda path: write_mixture(path, "qwen2moe", quant=Type.F32),
    "multipliers": lambda path: write_tiny(path, "minicpm", n_layer=N_LAYER, quant=Type.F32),
    "side by side": parallel,
    "unrotated layers": lambda path: write_tiny(path, "smollm3", n_layer=4, quant=Type.F32),
}
FAST = ("convolutions", "sinks")


@pytest.fixture(scope="module", params=[k if k in FAST else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[request.param](tmp_path_factory.mktemp("kinds") / "m.gguf")


@pytest.fixture
def load(path: Path) -> Iterator[Callable[..., Model]]:
    opened: list[Model] = []

    def make(**options: Any) -> Model:
        opened.append(edgert.load(path, **{**FLOAT, "spec": "off", **options}))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for model in opened:
        model.close()


def test_logits_forks_and_cuts(path: Path, load: Callable[..., Model]) -> None:
    """Whole, in pieces, forked and cut back: the logits are the reference's, wherever a step begins."""
    expected = Reference(path, n_ctx=256).logits(TOKENS)
    other = [*TOKENS[:70], *TOKENS[100:130]]
    expected_other = Reference(path, n_ctx=256).logits(other)[70:]
    backend = load().backend

    def near(found: np.ndarray, wanted: np.ndarray) -> bool:
        return bool(np.sqrt(((found - wanted) ** 2).mean()) < 0.003 * wanted.std())

    def feed(tokens: list[int], start: int, sequence: int) -> np.ndarray:
        return backend.forward(Batch.of(tokens, start, sequence, "all")).copy()

    pieces = [feed(TOKENS[start:stop], start, 0) for start, stop in ((0, 10), (10, 11), (11, 140), (140, 150))]
    assert near(np.concatenate(pieces), expected)
    feed(TOKENS[:70], 0, 1)
    backend.fork(1, 2, 70)
    assert near(feed(other[70:], 70, 2), expected_other)
    assert near(feed(TOKENS[70:130], 70, 1), expected[70:130])  # what the fork read did not reach its source
    for length in (129, 121, 97):  # as drafts are cut, and beyond a page
        if backend.reachable(1, length) == length:
            backend.truncate(1, length)
            assert near(feed(TOKENS[length:130], length, 1), expected[length:130])
    assert backend.reachable(1, 121) == 121


def test_inputs_of_convolutions_are_given_back(tmp_path: Path) -> None:
    """Of a long text only the latest are kept: enough to cut drafts, and what is beyond is said to be out of reach."""
    path = convolving(tmp_path / "m.gguf")
    tokens = RNG.integers(0, 384, 600).tolist()
    expected = Reference(path, n_ctx=2048).logits(tokens)
    options = {**FLOAT, "n_ctx": 2048, "n_batch": 64, "n_seq_max": 2}
    with closing(backends.load(path, **options)) as backend:
        for start in range(0, 576, 64):
            found = backend.forward(Batch.of(tokens[start : start + 64], start, 0, "all")).copy()
        assert np.abs(found - expected[512:576]).max() < 0.02 * np.abs(expected).max()
        assert backend.reachable(0, 300) == 0
        with pytest.raises(ValueError, match="have passed what precedes position 300"):
            backend.truncate(0, 300)
        facts, chunks = backend.save(0, 540)
        backend.truncate(0, 540)
        backend.restore(1, facts, np.concatenate([chunk.reshape(-1) for chunk in chunks]))
        for sequence in (0, 1):
            found = backend.forward(Batch.of(tokens[540:], 540, sequence, "all")).copy()
            assert np.abs(found - expected[540:]).max() < 0.02 * np.abs(expected).max()


def test_drafts_do_not_change_the_text(load: Callable[..., Model]) -> None:
    plain = load().generate(REPEATING, **GREEDY).tokens
    guessed = load(spec="ngram", spec_max=8).generate(REPEATING, **GREEDY)
    assert guessed.tokens == plain


def test_a_session_goes_on_where_it_was(load: Callable[..., Model], tmp_path: Path) -> None:
    whole = [*TOKENS[:80], *(reply := load().generate(TOKENS[:80], **GREEDY).tokens)]
    first = load()
    first.generate(TOKENS[:80], **{**GREEDY, "max_tokens": 6})
    n = first.save_session(tmp_path / "s", [*TOKENS[:80], *reply[:6]])
    second = load()
    second.load_session(tmp_path / "s")
    assert second.generate(whole[:n], **{**GREEDY, "max_tokens": len(whole) - n}).tokens == whole[n:]


def test_embeddings_are_the_states_before_the_head(path: Path, load: Callable[..., Model]) -> None:
    found = load().embed(TOKENS[:40], "last")
    reference = Reference(path, n_ctx=256)
    wanted = reference.states(TOKENS[:40])[-1]
    assert found @ wanted / np.linalg.norm(wanted) > 1 - 1e-4
