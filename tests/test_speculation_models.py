"""Speculation on the engines: drafts found, refused and checked; tiny models, then the real one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import click.testing
import numpy as np
import pytest
from numpy.typing import NDArray
from tiny import write_tiny

import edgert
from edgert import backends
from edgert.backends.base import Batch, Stakes
from edgert.backends.cpu.draft import CpuDraft
from edgert.backends.cpu.sampling import SampleKernel
from edgert.cli.verbs import tune_draft
from edgert.errors import EdgertError, RequestError
from edgert.generation import engine as engine_module
from edgert.options import SamplingParams
from edgert.quantize.gguf_file import GGUFFile
from edgert.sampler import _RACE_DEPTH, Sampler
from edgert.speculation import loading, tuning
from edgert.speculation.draft_model import DraftModel, Text
from edgert.store.catalogue import CATALOGUE

Tiny = Callable[..., Path]
PROMPT = "Hello world, hello world and the"


def test_constants_that_stand_twice_agree() -> None:
    from edgert.backends.cpu.layouts import WINDOW
    from edgert.backends.cpu.sampling import RACE_DEPTH

    assert tune_draft.MOST == loading.MOST < WINDOW - 1
    assert _RACE_DEPTH == RACE_DEPTH


def test_other_vocabularies_are_refused_naming_both_sizes(tiny_model: Tiny) -> None:
    target, draft = tiny_model("llama"), tiny_model("llama", n_vocab=400)
    with pytest.raises(EdgertError, match=r"400 tokens .* 384: a draft must share its model's vocabulary"):
        edgert.load(target, draft=draft)


def test_the_same_size_with_other_tokens_is_refused(tiny_model: Tiny) -> None:
    target, draft = tiny_model("llama"), tiny_model("gemma3", n_vocab=384)
    with pytest.raises(EdgertError, match="384 tokens each, but not the same"):
        edgert.load(target, draft=draft)


def test_a_draft_that_is_not_there(tiny_model: Tiny, tmp_path: Path) -> None:
    with pytest.raises(EdgertError, match="no-such"):
        edgert.load(tiny_model("llama"), draft=tmp_path / "no-such.gguf")
    with pytest.raises(EdgertError, match="No draft is known"):
        edgert.load(tiny_model("llama"), spec="draft")


@pytest.mark.parametrize(
    "arguments, field",
    [
        ({"spec": "both"}, "spec"),
        ({"spec_max": 0}, "spec_max"),
        ({"spec_max": 63}, "spec_max"),
        ({"spec_max": 2.0}, "spec_max"),
        ({"spec_min": 3, "spec_max": 2}, "spec_min"),
        ({"spec_p_min": 1.5}, "spec_p_min"),
    ],
)
def test_wrong_arguments_are_named(tiny_model: Tiny, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        edgert.load(tiny_model("llama"), **arguments)
    assert caught.value.field == field


def test_the_catalogues_draft_is_found_beside_the_model(tiny_model: Tiny, tmp_path: Path) -> None:
    entry = CATALOGUE["smollm2"]
    source = tiny_model("llama", metadata={"general.name": entry.title_in_file})
    target = tmp_path / "model.gguf"
    target.write_bytes(source.read_bytes())
    (tmp_path / entry.draft).write_bytes(tiny_model("llama", seed=3).read_bytes())
    with GGUFFile.open(target) as file:
        assert loading.find_made_for(file) == tmp_path / entry.draft
    with edgert.load(target, spec="auto") as model:
        assert model.speculator is not None and model.speculator.model is not None
    for spec, expected in (("off", None), ("ngram", None)):
        with edgert.load(target, spec=spec) as model:
            assert getattr(model.speculator, "model", None) is expected
    (tmp_path / entry.draft).write_bytes(tiny_model("llama", n_vocab=400).read_bytes())
    with edgert.load(target, spec="auto") as model:  # it was not asked for: the model goes without
        assert model.speculator is not None and model.speculator.model is None


@pytest.mark.parametrize("n_ctx", [1, 2, 5])
def test_a_context_shorter_than_a_guess(tiny_model: Tiny, n_ctx: int) -> None:
    target = tiny_model("llama")
    for arguments in ({"spec": "ngram"}, {"draft": target}):
        with edgert.load(target, n_ctx=n_ctx, n_threads=1, **arguments) as model:  # type: ignore[arg-type]
            reply = model.generate([3], temperature=0, ignore_eos=True)
            assert len(reply.tokens) == n_ctx and reply.finish_reason == "length"


def test_no_draft_is_taken_for_another_model(tiny_model: Tiny) -> None:
    with GGUFFile.open(tiny_model("llama")) as file:
        assert loading.find_made_for(file) is None


@pytest.mark.parametrize("name", [[1, 2], ["a"], 7, True])
def test_a_name_that_is_none_belongs_to_no_draft(name: Any, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", metadata={"general.name": name})
    with GGUFFile.open(path) as file:
        assert loading.find_made_for(file) is None


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("parameters", [{"temperature": 0}, {"temperature": 0.9, "seed": 4}])
def test_replies_on_the_engine_are_those_of_plain_decoding(
    tiny_model: Tiny, family: str, parameters: dict[str, Any]
) -> None:
    target, draft = tiny_model(family), tiny_model(family, seed=1)
    parameters = {**parameters, "max_tokens": 80, "ignore_eos": True}
    with edgert.load(target, spec="off") as model:
        expected = model.generate(PROMPT, **parameters).tokens
    for arguments in (
        {"draft": draft},
        {"draft": target},
        {"draft": target, "spec_min": 5, "spec_max": 5},
        {"spec": "ngram"},
    ):
        with edgert.load(target, **arguments) as model:  # type: ignore[arg-type]
            reply = model.generate(PROMPT, **parameters)
            assert reply.tokens == expected
            if "spec_min" in arguments:
                assert reply.stats.draft_n_accepted == reply.stats.draft_n > 50


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_logits_of_a_checked_guess_are_bit_for_bit_those_of_single_steps(tiny_model: Tiny, family: str) -> None:
    with_closing = backends.load(tiny_model(family), backend="cpu", n_ctx=256, n_threads=2)
    try:
        tokens = np.random.default_rng(0).integers(0, 384, 130)
        with_closing.forward(Batch.of(tokens[:100].tolist(), 0, wanted="none"))
        single = np.array([with_closing.step(int(token), 0).copy() for token in tokens[100:117]])
        for count in (2, 3, 5, 8, 9, 17):
            with_closing.truncate(0, 100)
            rows = with_closing.forward(Batch.of(tokens[100 : 100 + count].tolist(), 100, wanted="all"))
            assert (rows == single[:count]).all()
    finally:
        with_closing.close()


def test_a_draft_shares_the_threads_of_its_target(tiny_model: Tiny) -> None:
    target = backends.load(tiny_model("llama"), backend="cpu", n_threads=2)
    draft = backends.load(tiny_model("llama"), backend="cpu", n_threads=2, beside=target)
    other = backends.load(tiny_model("llama"), backend="cpu", n_threads=1, beside=target)
    assert draft._team is target._team and other._team is not target._team  # type: ignore[attr-defined]
    draft.close()
    other.close()
    target.step(1, 0)
    with pytest.raises(ValueError, match="closed"):
        draft.step(1, 0)
    target.close()


def test_the_draft_of_another_engine_runs_on_the_processor(tiny_model: Tiny) -> None:
    """Which guesses in one call; a call of llama.cpp for each token costs a GPU more than guesses bring."""
    pytest.importorskip("llama_cpp")
    path = tiny_model("llama")
    with edgert.load(path, backend="llama", draft=path, spec_min=3, spec_max=3, n_ctx=128, n_threads=1) as model:
        assert model.speculator is not None and model.speculator.model is not None
        draft = model.speculator.model.backend
        assert draft.verdict.backend == "cpu" and "guess" in draft.capabilities and "check" not in draft.capabilities
        assert model.generate([5, 6, 7], max_tokens=8, temperature=0, ignore_eos=True).stats.draft_n > 0


@pytest.mark.parametrize("token, sequence", [(-1, 0), (384, 0), (0, 1), (0, -1)])
def test_a_wrong_single_step_is_refused(tiny_model: Tiny, token: int, sequence: int) -> None:
    backend = backends.load(tiny_model("llama"), backend="cpu", n_ctx=4, n_threads=1)
    with pytest.raises((ValueError, IndexError)):
        backend.step(token, sequence)
    for _ in range(4):
        backend.step(1, 0)
    with pytest.raises(ValueError, match="positions"):
        backend.step(1, 0)
    backend.close()


def test_tune_draft_tells_the_curve(tiny_model: Tiny, tmp_path: Path) -> None:
    model = str(tiny_model("llama"))
    (tmp_path / "prompts.txt").write_text("Hello world\n\nAnd the\n")
    arguments = ["-m", model, "-md", model, "--lengths", "2,4", "--temps", "0,0.7", "-n", "12"]
    arguments += ["-f", str(tmp_path / "prompts.txt")]
    runner = click.testing.CliRunner()
    done = runner.invoke(tune_draft.command, [*arguments, "--json"], catch_exceptions=False)
    facts = json.loads(done.stdout)
    points = {(point["temperature"], point["length"]): point for point in facts["points"]}
    assert set(points) == {(t, n) for t in (0, 0.7) for n in (0, 2, 4, -1)}
    assert points[0, 0]["speed_up"] == 1 and points[0, 0]["accepted"] == 0
    assert points[0, 4]["accepted"] == 1 and points[0, 4]["rejected"] == 0
    assert points[0, 4]["per_step"] > points[0, 2]["per_step"] > 1
    assert facts["best"] in (0, 2, 4, -1)
    table = runner.invoke(tune_draft.command, arguments, catch_exceptions=False).stdout
    assert "adaptive" in table and "Best:" in table
    wrong = runner.invoke(tune_draft.command, [*arguments, "--lengths", "0"])
    assert wrong.exit_code == 2


def test_the_best_length_is_that_of_all_temperatures() -> None:
    ups = {(0.0, 2): 1.5, (0.0, 4): 2.0, (0.9, 2): 1.4, (0.9, 4): 1.0, (0.0, 0): 1.0, (0.9, 0): 1.0}
    points = [tuning.Point(t, n, 100 * up, up, 0.5, 0.5, 1.5) for (t, n), up in ups.items()]
    length, gain = tuning.best(points)
    assert length == 2 and gain == pytest.approx(2 / (1 / 1.5 + 1 / 1.4))
    adaptive = tuning.Point(0.0, tuning.ADAPTIVE, 140, 1.40, 0.5, 0.5, 1.5)
    assert tuning.best([*points, adaptive])[0] == tuning.ADAPTIVE
    assert tuning.best([*points, replace(adaptive, speed_up=1.36)])[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_real_model_says_the_same_with_guesses(smollm2_path: Path, temperature: float) -> None:
    parameters: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_tokens": 60}
    messages = [{"role": "user", "content": "Repeat twice: the quick brown fox jumps over the lazy dog."}]
    with edgert.load(smollm2_path, spec="off", n_ctx=512) as model:
        expected = model.chat(messages, **parameters).tokens
    with edgert.load(smollm2_path, spec="ngram", n_ctx=512) as model:
        reply = model.chat(messages, **parameters)
        assert reply.tokens == expected
        assert temperature or reply.stats.draft_n > 0
    with edgert.load(smollm2_path, draft=smollm2_path, spec="draft", spec_min=3, spec_max=3, n_ctx=512) as model:
        reply = model.chat(messages, **parameters)
        assert reply.tokens == expected
        assert reply.stats.draft_n_accepted == reply.stats.draft_n > 0


@pytest.mark.slow
def test_another_family_is_no_draft(smollm2_path: Path, gemma3_path: Path) -> None:
    with pytest.raises(EdgertError, match=r"262144 tokens .* 49152"):
        edgert.load(smollm2_path, draft=gemma3_path)


@pytest.mark.slow
def test_the_llama_backend_speculates_too(smollm2_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    arguments: dict[str, Any] = {"backend": "llama", "n_ctx": 512, "use_extra_bufts": False}
    with edgert.load(smollm2_path, draft=smollm2_path, spec_min=3, spec_max=3, **arguments) as model:
        reply = model.chat([{"role": "user", "content": "What is rain?"}], temperature=0, max_tokens=40)
        assert (
            reply.stats.draft_n >= reply.stats.draft_n_accepted > 20
        )  # its batches are not bit for bit its single steps
        assert model.backend.length(0) <= reply.stats.prompt_n + reply.stats.predicted_n


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("some", [False, True])
def test_a_draft_guesses_in_one_walk_what_it_does_step_by_step(
    tiny_model: Tiny, temperature: float, some: bool
) -> None:
    with GGUFFile.open(tiny_model("llama")) as file:
        common = np.arange(3, len(file.metadata.strings("tokenizer.ggml.tokens")), 2) if some else None
        draft = CpuDraft(file, n_guesses=6, common=common, n_ctx=128, n_threads=2, n_seq_max=1)
    params = SamplingParams(temperature=temperature, seed=5, repeat_penalty=1.3)
    sampler = Sampler(params, draft.n_vocab, (), SampleKernel())
    tokens = np.zeros(128, np.int32)
    tokens[:12] = np.arange(20, 32)
    floors, odds = np.zeros(7), np.full(2, 0.9)
    stakes = _stakes(6, floors, odds)
    shares = DraftModel(draft).guess(0, tokens, 12, sampler, stakes)
    guessed = tokens[12:18].tolist()
    assert len(shares) == 6 and draft.length(0) == 17
    expected = tokens.copy()
    for i in range(6):
        logits = draft.forward(Batch.of([int(expected[11 + i])], _rewound(draft, 11 + i)))[0]
        if some:
            left = np.full_like(logits, -np.inf)
            left[common] = logits[common]
            logits = left
        expected[12 + i], _ = Sampler(params, draft.n_vocab)._sample(logits.clip(-1e30), expected[: 12 + i])
    assert guessed == expected[12:18].tolist()
    stakes.floors[3] = 2.0  # no chance is as high
    assert len(DraftModel(draft).guess(0, tokens, 12, sampler, replace(stakes))) == 3
    draft.close()


def test_a_draft_guesses_for_several_in_one_walk_what_it_does_for_each(tiny_model: Tiny) -> None:
    """Texts of different lengths, samplers and ends; then with some of the guesses and other tokens behind them."""
    n_texts, most = 5, [6, 3, 1, 6, 6]
    with GGUFFile.open(tiny_model("llama")) as file:
        together, alone = (
            DraftModel(CpuDraft(file, n_guesses=6, n_ctx=128, n_threads=2, n_seq_max=n_texts)) for _ in range(2)
        )
    draw, kernel = np.random.default_rng(3), SampleKernel()
    lengths = [3, 40, 1, 12, 64]
    tokens = draw.integers(20, 60, (n_texts, 128)).astype(np.int32)
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, repeat_penalty=1.3) for i in range(n_texts)]
    samplers = [[Sampler(one, together.backend.n_vocab, (), kernel) for one in params] for _ in range(2)]
    stakes = [_stakes(n, np.zeros(n + 1), np.full(2, 0.9)) for n in most]
    stakes[3].floors[2] = 2.0  # no chance is as high
    for right in range(4):
        texts = [
            Text(i, tokens[i].copy(), n, samplers[0][i], stakes[i], params[i])
            for i, n in enumerate(lengths)
            if i != right
        ]
        shares = together.guess_together(texts)
        for text, found in zip(texts, shares, strict=True):
            i, n = text.sequence, text.n
            other = tokens[i].copy()
            expected = alone.guess(i, other, n, samplers[1][i], stakes[i], params[i])
            assert found is not None and found.tolist() == expected.tolist()
            assert text.tokens[: n + len(found)].tolist() == other[: n + len(found)].tolist()
            assert together.backend.length(i) == alone.backend.length(i)
            accepted = min(right, len(found))
            tokens[i, n : n + accepted] = other[n : n + accepted]
            lengths[i] = n + accepted + 1  # and a token that was chosen in place of the next guess
    assert [len(stake.floors) for stake in stakes] == [n + 1 for n in most]
    together.backend.close()
    alone.backend.close()


def test_a_draft_whose_memory_is_full_begins_anew_near_the_ends_of_texts(tiny_model: Tiny) -> None:
    """Four texts that grow where there is room for 100 positions each; a fifth one that nobody asks for any more."""
    with GGUFFile.open(tiny_model("llama")) as file:
        model = DraftModel(CpuDraft(file, n_guesses=4, n_ctx=512, n_threads=2, n_seq_max=5, n_cached=400))
    kernel, stakes = SampleKernel(), _stakes(4, np.zeros(5), np.full(2, 0.9))
    samplers = [Sampler(SamplingParams(temperature=0), model.backend.n_vocab, (), kernel) for _ in range(5)]
    tokens = np.random.default_rng(3).integers(20, 60, (5, 512)).astype(np.int32)
    for n in [64, *range(70, 500, 3)]:
        texts = [Text(i, tokens[i], n, samplers[i], stakes, samplers[i]) for i in range(4 if n > 64 else 5)]
        shares = model.guess_together(texts)
        assert [len(found) for found in shares if found is not None] == [4] * len(texts)
    assert sum(model.backend.length(i) for i in range(5)) <= 400 and not model.backend.length(4)
    model.backend.close()


def _stakes(most: int, floors: NDArray[np.float64], odds: NDArray[np.float64], step: float = 0.0) -> Stakes:
    """step: tokens that checking one guess more must bring"""
    extra, known = step * np.arange(most + 1), np.zeros(most + 1, np.int64)
    return Stakes(most, floors, 0.0, np.array([0.5]), odds, np.array([-1]), extra, known)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("same", [False, True])
def test_guesses_are_checked_in_one_walk_as_in_three_calls(tiny_model: Tiny, temperature: float, same: bool) -> None:
    """The draft's walk goes on to the target's step and to the choice of tokens, whatever is guessed."""
    seed = 0 if same else 1
    target = backends.load(tiny_model("llama"), backend="cpu", n_ctx=128, n_threads=2)
    with GGUFFile.open(tiny_model("llama", seed=seed)) as file:
        draft = CpuDraft(file, n_guesses=6, n_ctx=128, n_threads=2, beside=target)
    model, odds = DraftModel(draft), np.full(2, 0.9)
    assert model.checks
    sampler = Sampler(SamplingParams(temperature=temperature, seed=5, repeat_penalty=1.3), target.n_vocab, (),
                      SampleKernel())  # fmt: skip
    tokens, n, accepted = np.zeros(128, np.int32), 12, []
    tokens[:n] = np.arange(20, 32)
    target.forward(Batch.of(tokens[: n - 1].tolist(), 0, wanted="none"))
    for step in (0.0, 0.75, 0.5, 0.0, 2.0, 0.0):
        stakes = _stakes(6, np.zeros(7), odds, step)
        apart = tokens.copy()
        shares = model.guess(0, apart, n, sampler, stakes).copy()
        net = np.cumsum(0.9 ** np.arange(1, 7)) - step * np.arange(1, 7)
        count = int(net.argmax()) + 1 if net.max() > 0 else 0
        logits = target.extend(apart[n - 1 : n + count].tolist(), n - 1, 0)
        expected = sampler.follow(logits, apart, n)
        target.truncate(0, n - 1)
        rounds = model.rounds(0, tokens, n, sampler, stakes, None, 1, stakes.most)
        assert rounds is not None
        [found] = rounds
        assert found[0].tolist() == shares.tolist() and found[1:] == (count, expected)
        assert tokens[n : n + 6].tolist() == apart[n : n + 6].tolist()
        tokens[n : n + len(expected)] = expected
        n += len(expected)
        accepted.append(len(expected) - 1)
        assert target.length(0) == n - 1
    assert sum(accepted) > 12 if same else min(accepted) < 6
    single = target.step(int(tokens[n - 1]), 0).copy()  # the cache holds what was chosen
    target.truncate(0, 0)
    assert (target.forward(Batch.of(tokens[:n].tolist(), 0, wanted="last"))[0] == single).all()
    draft.close()
    target.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("same", [False, True])
def test_several_rounds_of_one_walk_are_those_of_several_walks(
    tiny_model: Tiny, temperature: float, same: bool
) -> None:
    target = backends.load(tiny_model("llama"), backend="cpu", n_ctx=160, n_threads=2)
    with GGUFFile.open(tiny_model("llama", seed=0 if same else 1)) as file:
        draft = CpuDraft(file, n_guesses=6, n_ctx=128, n_threads=2, beside=target)
    model, n, owner = DraftModel(draft), 12, object()
    stakes = _stakes(5, np.zeros(6), np.full(2, 0.9), 0.7)  # of five guesses some are checked
    sampler = Sampler(SamplingParams(temperature=temperature, seed=5, repeat_penalty=1.3), target.n_vocab, (),
                      SampleKernel())  # fmt: skip
    single, several = np.zeros(160, np.int32), np.zeros(160, np.int32)
    single[:n] = several[:n] = np.arange(20, 32)

    def walk(tokens: NDArray[np.int32], n: int, at_once: int, reach: int, stakes: Stakes = stakes) -> list[Any]:
        found = model.rounds(0, tokens, n, sampler, stakes, owner, at_once, reach)
        assert found is not None and len(found) == len(model.times)
        assert all(guessing >= 0 and checking >= 0 for guessing, checking in model.times)
        end = n
        for shares, checked, chosen in found:
            assert 0 <= len(chosen) - 1 <= checked <= len(shares) <= stakes.most
            tokens[end : end + len(chosen)] = chosen
            end += len(chosen)
        assert target.length(0) == end - 1
        return [(shares.tolist(), checked, chosen) for shares, checked, chosen in found]

    def again(n: int) -> None:
        nonlocal owner
        target.truncate(0, n - 1)
        owner = object()

    target.forward(Batch.of(single[: n - 1].tolist(), 0, wanted="none"))
    expected, ends = [], [n]
    for _ in range(12):
        expected += walk(single, ends[-1], 1, 5)
        ends.append(ends[-1] + len(expected[-1][2]))
    again(n)
    found = walk(several, n, 4, 100)
    assert found == expected[:4]
    found += walk(several, ends[4], 8, 100)  # from where the caches are
    assert found == expected and (several == single).all()
    logits = target.extend([int(single[ends[12] - 1])], ends[12] - 1, 0).copy()
    target.truncate(0, 0)  # the cache holds what was chosen
    assert (target.forward(Batch.of(single[: ends[12]].tolist(), 0, wanted="last")) == logits).all()

    again(n)
    model.interrupted[0] = 1
    assert walk(several, n, 4, 100) == expected[:1] and not model.interrupted[0]
    again(n)
    found = walk(several, n, 8, 8)
    whole = sum(end + 5 <= n + 8 for end in ends)  # rounds that begin where there is room for five guesses
    assert found[:whole] == expected[:whole] and len(found) > whole
    length = n + sum(len(chosen) for _, _, chosen in found)
    assert n + 8 <= length <= n + 9 and several[:length].tolist() == single[:length].tolist()
    text = single[n : ends[8]].tolist()
    place = next(i for i in range(ends[1] - n, len(text)) if text[i] not in text[:i])
    again(n)
    found = walk(several, n, 8, 100, replace(stakes, ends=np.array([text[place]])))
    tokens = [token for _, _, chosen in found for token in chosen]
    assert text[place] in found[-1][2] and tokens == single[n : n + len(tokens)].tolist()

    def said(end: int, n: int) -> bool:
        return any((single[i : i + n] == single[end - n : end]).all() for i in range(end - n))

    for repeated in (1, 2, 60):
        again(n)
        stop = next((i for i in range(1, 8) if said(ends[i], repeated)), 8)
        assert walk(several, n, 8, 100, replace(stakes, repeated=repeated)) == expected[:stop]
    draft.close()
    target.close()


def test_a_lone_request_is_checked_in_the_walk_of_its_guesses(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = DraftModel.rounds

    def counted(self: DraftModel, *arguments: Any) -> Any:
        found = original(self, *arguments)
        calls.append(found)
        return found

    monkeypatch.setattr(DraftModel, "rounds", counted)
    parameters: dict[str, Any] = {"temperature": 0, "max_tokens": 90, "ignore_eos": True}
    with edgert.load(tiny_model("llama"), spec="off") as model:
        expected = model.generate(PROMPT, **parameters).tokens
        used = model.backend.memory()["kv"]
    with edgert.load(tiny_model("llama"), draft=tiny_model("llama"), spec="draft", spec_min=4, spec_max=4) as model:
        assert model.generate(PROMPT, **parameters).tokens == expected
        assert model.backend.memory()["kv"] == used  # pages kept from step to step are given back
        n_calls = len(calls)
        assert n_calls > 10 and None not in calls
        stopped = model.generate(PROMPT, **(parameters | {"stop": [" "]}))
        model.generate(PROMPT, logprobs=True, max_tokens=8)
        assert stopped.finish_reason in ("stop", "length") and len(calls) >= n_calls


def _rewound(draft: CpuDraft, length: int) -> int:
    """Takes a draft back to its first tokens; returns how many."""
    draft.truncate(0, length)
    return length


@pytest.mark.parametrize("spec_min", [0, 5])
def test_a_draft_goes_on_guessing_beyond_its_own_context(tiny_model: Tiny, spec_min: int) -> None:
    target, draft = tiny_model("llama"), tiny_model("llama", n_ctx=64)
    parameters: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
    with edgert.load(target, spec="off") as model:
        expected = model.generate(PROMPT, **parameters).tokens
    with edgert.load(target, draft=draft, spec="draft", spec_min=spec_min, spec_max=5) as model:
        reply = model.generate(PROMPT, **parameters)
    assert reply.tokens == expected
    if spec_min:
        assert reply.stats.draft_n > 100


def test_the_default_model_has_its_draft_in_the_package(smollm2_path: Path) -> None:
    draft = loading.ASSETS / CATALOGUE["smollm2"].draft
    beside = smollm2_path.parent / draft.name
    with GGUFFile.open(smollm2_path) as file, GGUFFile.open(draft) as small:
        assert loading.find_made_for(file) == (beside if beside.is_file() else draft)
        loading.check_vocabulary(file, small)
        common = loading._common(small)
    assert common is not None and len(common) == loading.N_COMMON and (np.diff(common) > 0).all()


def test_the_engine_gives_back_what_has_rested(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without anybody asking: what the model's cache and the draft's hold of a last page is packed a little later."""
    monkeypatch.setattr(engine_module, "RESTED", 0.05)
    with edgert.load(tiny_model("llama"), draft=tiny_model("llama"), spec="draft", spec_min=4, spec_max=4) as model:
        model.generate(PROMPT, temperature=0, max_tokens=37, ignore_eos=True)
        caches: list[Any] = [model.backend._cache, model.speculator.model.backend._cache]  # type: ignore[attr-defined, union-attr]
        end = monotonic() + 60
        while any(math.isfinite(cache.oldest) for cache in caches) and monotonic() < end:
            sleep(0.01)
        assert all(len(cache.pools[0].shelf) for cache in caches)
