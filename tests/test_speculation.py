"""Speculation on scripted backends: the same replies, sound caches, fewer steps, and pauses where it does not pay."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fake import EOS, N_VOCAB, FakeBackend, FakeTemplate, FakeTokenizer, hashed, held, says
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgert.backends.base import Batch
from edgert.backends.llama.padding import Padding, suitable
from edgert.errors import DoesNotFitError, EdgertError
from edgert.model import Model
from edgert.options import SamplingParams
from edgert.reply import Reply
from edgert.speculation import Speculator, tuning
from edgert.speculation.draft_model import REACH, DraftModel
from edgert.speculation.economics import Costs, Line
from edgert.speculation.ngram import NgramMemory

Logits = Callable[[list[int]], NDArray[np.float32]]
CHEAP = [1e-3 + 1e-5 * i for i in range(30)]  # seconds of a step by its rows: guesses nearly for free


class Clock:
    """What the speculator measures steps by: each takes what it is said to cost, on whatever machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def runs_by(self, backend: FakeBackend, costs: Sequence[float]) -> None:
        """Lets steps of a backend take so long, by their rows."""

        def step(batch: Batch) -> None:
            self.now += costs[min(len(batch), len(costs)) - 1]

        backend.before_forward = step


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    CLOCK.now = 0.0
    for module in ("economics", "speculator"):
        monkeypatch.setattr(f"edgert.speculation.{module}.perf_counter", CLOCK)


class Chancy(FakeBackend):
    """Logits that depend on the last two tokens; `other` is how far they are from those of other=0."""

    def __init__(self, other: float = 0.0, **options: Any) -> None:
        super().__init__(hashed, **{"n_ctx": 64, **options})
        draw = np.random.default_rng(1)
        self._first = draw.normal(size=(N_VOCAB, N_VOCAB)).astype(np.float32) * 2
        self._second = draw.normal(size=(N_VOCAB, N_VOCAB)).astype(np.float32)
        self._noise = np.random.default_rng(2).normal(size=(N_VOCAB, N_VOCAB)).astype(np.float32) * other

    def _logits(self, cells: list[int]) -> NDArray[np.float32]:
        before = cells[-2] if len(cells) > 1 else 0
        logits: NDArray[np.float32] = self._first[cells[-1]] + self._second[before] + self._noise[cells[-1]]
        logits[EOS] -= 2
        return logits


def speculating(
    backend: FakeBackend, draft: FakeBackend | None = None, costs: Sequence[float] = CHEAP, **options: Any
) -> Model:
    speculator = Speculator(
        backend.n_ctx, backend.n_seq_max, Costs(costs), DraftModel(draft) if draft else None, **options
    )
    CLOCK.runs_by(backend, costs)
    if draft:
        CLOCK.runs_by(draft, [costs[0] / 20])
    tokenizer: Any = FakeTokenizer()
    template: Any = FakeTemplate()
    return Model(backend, tokenizer, template, SamplingParams(temperature=0), speculator=speculator)


def facts(reply: Reply) -> tuple[Any, ...]:
    return reply.text, reply.tokens, reply.finish_reason, reply.stats.predicted_n, reply.logprobs


REQUESTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.5, "seed": 2, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 0.0, "repeat_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 1.0, "seed": 3, "repeat_penalty": 1.1, "repeat_last_n": -1},
    {"temperature": 1.0, "seed": 4, "logit_bias": {97: 5.0, 98: False}},
    {"temperature": 1.0, "seed": 5, "logprobs": True, "top_logprobs": 3},
    {"temperature": 1.0, "seed": 6, "stop": ["a", "ef", "zz"]},
    {"temperature": 1.0, "seed": 7, "ignore_eos": True},
    *({"temperature": 1.0, "seed": 8, "max_tokens": n} for n in (1, 2, 3, 6)),
]


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("kind", ["same", "like", "foreign", "ngram", "both"])
@pytest.mark.parametrize("least", [0, 3])
def test_replies_are_those_of_plain_decoding(kind: str, least: int, request_: dict[str, Any]) -> None:
    others = {"same": 0.0, "like": 1.0, "foreign": 9.0, "both": 1.0}
    draft = Chancy(others[kind]) if kind in others else None
    tokenizer: Any = FakeTokenizer()
    with (
        Model(Chancy(), tokenizer, None, SamplingParams(temperature=0)) as plain,
        speculating(Chancy(), draft, ngram=kind in ("ngram", "both"), least=least) as guessing,
    ):
        for prompt in ("abcabc", "x", "the cat and the cat and"):
            a, b = (model.generate(prompt, **request_) for model in (plain, guessing))
            assert facts(a) == facts(b)
            assert a.stats.draft_n == 0
            c = guessing.generate(prompt, **request_)  # from the cache, with more to guess from
            assert facts(c) == facts(a)
            assert c.stats.cache_n > 0
            if least and kind != "ngram" and len(a.tokens) > 2:
                assert b.stats.draft_n > 0
                assert kind != "same" or b.stats.draft_n_accepted == b.stats.draft_n


@pytest.mark.parametrize("guessing", [False, True])
def test_the_rate_counts_what_came_after_the_prompts_logits(guessing: bool) -> None:
    """Guesses that are checked together with the prompt come with its logits and took no time of their own."""
    rows: list[int] = []

    class Counting(Chancy):
        def forward(self, batch: Batch) -> NDArray[np.float32]:
            logits = super().forward(batch)
            rows.append(len(logits))
            return logits

    options = {"draft": Chancy(), "least": 3} if guessing else {"ngram": False}
    with speculating(Counting(), **options) as model:
        model.generate("abcabc", max_tokens=4, ignore_eos=True)  # so that the prompt is cached but for its end
        rows.clear()
        stats = model.generate("abcabc", max_tokens=20, ignore_eos=True).stats
        first = next(n for n in rows if n)  # all guesses are right
        assert first > 1 if guessing else first == 1
        assert stats.predicted_n == 20
        assert stats.predicted_per_second == pytest.approx(1e3 * (20 - first) / stats.predicted_ms)
        assert stats.timed_n == 20 - first
        few = model.generate("abcabc", max_tokens=1).stats
        assert (few.predicted_n, few.timed_n, few.predicted_per_second) == (1, 0, 0.0)


def test_a_curve_of_lengths_counts_what_its_steps_gave() -> None:
    """A draft that is always right: a step gives its guesses and one token more."""

    class Endless(Chancy):
        def _logits(self, cells: list[int]) -> NDArray[np.float32]:
            logits = super()._logits(cells)
            logits[EOS] = -99
            return logits

    with speculating(Endless(), Endless()) as model:
        points = {p.length: p for p in tuning.curve(model, [3], 0.0, prompts=["abc", "the cat"], n_predict=40)}
    assert points[0].per_step == points[0].speed_up == 1
    assert points[3].accepted == 1 and points[3].per_step == 4
    assert all(point.per_second > 0 for point in points.values())


def test_a_chunked_stream_is_the_same_text() -> None:
    with speculating(Chancy(), Chancy(1.0)) as model:
        whole = model.generate("hello", temperature=1.0, seed=3)
        chunks = list(model.generate("hello", True, temperature=1.0, seed=3))
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [token for chunk in chunks for token in chunk.tokens] == whole.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_that_is_its_target_is_always_right(temperature: float) -> None:
    backend, draft = Chancy(), Chancy()
    with speculating(backend, draft, ngram=False, most=6, least=6) as model:
        stats = model.generate("abc", temperature=temperature, seed=1, max_tokens=100, ignore_eos=True).stats
        assert stats.draft_n_accepted == stats.draft_n > 40
        assert all(right == tried for tried, right in stats.draft_positions)
        assert sum(tried for tried, _ in stats.draft_positions) == stats.draft_n
        assert len(backend.batches) < 20


def test_the_cache_holds_what_was_chosen_and_nothing_else() -> None:
    backend = Chancy(n_ctx=64)
    with speculating(backend, Chancy(2.0, n_ctx=64)) as model:
        for seed in range(30):
            reply = model.generate("abc", temperature=1.0, seed=seed, max_tokens=seed)
            text = [256, *b"abc", *reply.tokens]
            held = (
                max(backend.cells.values(), key=len)
                if seed == 0
                else next(cells for cells in backend.cells.values() if cells == text[: len(cells)] and len(cells) >= 3)
            )
            assert held == text[: len(held)]


def test_the_context_may_be_filled_to_its_end() -> None:
    for n_ctx in (16, 17, 40):
        with speculating(Chancy(n_ctx=n_ctx), Chancy(n_ctx=n_ctx)) as model:
            reply = model.generate("abc", ignore_eos=True)
            assert reply.finish_reason == "length"
            assert len(reply.tokens) == n_ctx - 4 + 1


def test_many_requests_at_once_are_those_of_each_alone() -> None:
    backend, draft = Chancy(n_seq_max=4), Chancy(1.0, n_seq_max=4)
    prompts = [("abc" * (1 + i % 3), {"temperature": i % 2, "seed": i, "max_tokens": 20 + i}) for i in range(16)]
    with speculating(backend, draft, most=2, least=2) as model:
        alone = [model.generate(prompt, **parameters) for prompt, parameters in prompts]  # type: ignore[arg-type]
        with held(backend):
            streams = [model.generate(prompt, True, **parameters) for prompt, parameters in prompts]  # type: ignore[call-overload]
        together = [stream.reply() for stream in streams]
    assert [reply.tokens for reply in together] == [reply.tokens for reply in alone]
    assert sum(reply.stats.draft_n_accepted for reply in together) > 0
    assert any(len(set(batch.sequences.tolist())) > 1 and len(batch) > 4 for batch in backend.batches)


def test_a_cancelled_request_leaves_a_sound_cache() -> None:
    backend = Chancy()
    with speculating(backend, Chancy(1.0)) as model:
        with held(backend, after=4):
            stream = model.generate("abc", True, ignore_eos=True)
            pieces = [next(stream) for _ in range(3)]
            stream.cancel()
        rest = list(stream)
        assert rest[-1].finish_reason == "cancelled"
        tokens = [t for chunk in (*pieces, *rest) for t in chunk.tokens]
        again = model.generate("abc", max_tokens=len(tokens), ignore_eos=True)
        assert again.tokens == tokens


class Small(Chancy):
    """A cache of so many cells for all sequences together."""

    def __init__(self, n_cells: int, other: float = 0.0, **options: Any) -> None:
        super().__init__(other, **options)
        self.n_cells = n_cells

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        if sum(map(len, self.cells.values())) + len(batch) > self.n_cells:
            raise DoesNotFitError("full")
        return super().forward(batch)


def test_guesses_give_way_where_the_cache_is_full() -> None:
    with speculating(Small(41, n_ctx=40), Chancy(n_ctx=40)) as model:
        assert len(model.generate("abc", ignore_eos=True).tokens) == 37


def test_a_draft_without_room_is_left_alone() -> None:
    plain = Chancy()
    tokenizer: Any = FakeTokenizer()
    with Model(plain, tokenizer) as model:
        expected = model.generate("abc", temperature=0, max_tokens=50).tokens
    with speculating(Chancy(), Small(20), ngram=False, most=2, least=2) as model:
        reply = model.generate("abc", max_tokens=50)
        assert reply.tokens == expected
        assert 0 < reply.stats.draft_n < 20


def test_a_draft_with_a_short_memory_reads_the_end_of_the_text() -> None:
    n_ctx = 4 * REACH
    target, draft = Chancy(n_ctx=n_ctx, n_batch=256), Chancy(n_ctx=64, n_batch=256)
    with speculating(target, draft, ngram=False, most=6, least=6) as model:
        prompt = [random.Random(0).randrange(256) for _ in range(n_ctx - 200)]
        stats = model.generate(prompt, max_tokens=150, ignore_eos=True).stats
        assert stats.draft_n_accepted == stats.draft_n > 50  # two tokens back is all that matters here
    draft = Chancy(n_ctx=n_ctx, n_batch=256)
    with speculating(Chancy(n_ctx=n_ctx, n_batch=256), draft, ngram=False, most=6, least=6) as model:
        model.generate(prompt, max_tokens=2)
        model.generate(prompt, max_tokens=20, ignore_eos=True)
        assert draft.n_evaluated <= REACH + 60


def test_where_guesses_do_not_pay_they_stop_and_are_tried_again() -> None:
    backend, draft = Chancy(n_ctx=900), Chancy(30.0, n_ctx=900)
    slow = [1.0, 2.0, 3.0, 4.0, *(5.0 + i for i in range(20))]  # each row as dear as a step
    with speculating(backend, draft, costs=slow) as model:
        stats = model.generate("abc", temperature=1.0, seed=1, max_tokens=800, ignore_eos=True).stats
        assert stats.draft_n < 150
        assert len(draft.batches) < 200
        last = max(int(batch.positions.max()) for batch in draft.batches)
        assert last > 200  # long after the first pause


class Changing(Chancy):
    """A target of which a step after one of another size takes CHANGE seconds more, as a GPU's graphs have it."""

    settling, CHANGE = 11, 12.0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._padding, self._rows = Padding(), 0

    def rows_of(self, n_tokens: int) -> int:
        return suitable(n_tokens)

    @property
    def settled(self) -> bool:
        return self._padding.settled

    def extend(self, tokens: Sequence[int], position: int, sequence: int) -> NDArray[np.float32]:
        rows = self._padding.rows(len(tokens))
        CLOCK.now += (1.0 + 0.05 * rows) + (self.CHANGE if rows != self._rows else 0.0)
        self._rows = rows
        return super().extend(tokens, position, sequence)


def seconds_with(draft: FakeBackend | None, n: int, **options: Any) -> float:
    """Of some replies, by a target whose changes of size are dear."""
    target, tokenizer = Changing(n_ctx=900), FakeTokenizer()
    costs = Costs.measure(target, 19)
    assert target.CHANGE < 1.001 * costs.change < 2 * target.CHANGE
    model = DraftModel(draft) if draft else None
    speculator = Speculator(target.n_ctx, target.n_seq_max, costs, model, target=target, **options)
    if draft:
        CLOCK.runs_by(draft, [0.1])
    parameters: Any = SamplingParams(temperature=0)
    with Model(target, tokenizer, None, parameters, speculator=speculator) as guessing:  # type: ignore[arg-type]
        began = CLOCK.now
        for seed in range(n):
            guessing.generate("abc", temperature=1.0, seed=seed, max_tokens=400, ignore_eos=True)
        return CLOCK.now - began


def test_where_a_change_of_size_is_dear_guesses_stay_or_stop() -> None:
    """Bad ones cost little in five replies, and good ones pay although each change takes as long as a dozen steps."""
    plain = seconds_with(None, 5, ngram=False)
    assert seconds_with(None, 5) < 1.02 * plain  # two tokens that agree now and then are no reason
    assert seconds_with(Chancy(30.0, n_ctx=900), 5) < 1.15 * plain
    assert seconds_with(Chancy(n_ctx=900), 5) < 0.6 * plain


@pytest.mark.parametrize("least", [1, 4])
def test_a_fixed_length_is_kept(least: int) -> None:
    backend = Chancy()
    with speculating(backend, Chancy(30.0), most=least, least=least, ngram=False) as model:
        stats = model.generate("abc", max_tokens=60, ignore_eos=True).stats
        assert len(stats.draft_positions) == least
        assert stats.draft_positions[0][0] >= 40
        assert {len(batch) for batch in backend.batches[1:-6]} == {least + 1}


def test_unsure_tokens_are_not_guessed_on_demand() -> None:
    with speculating(Chancy(), Chancy(), most=4, least=4, p_min=1.0, ngram=False) as model:
        assert model.generate("abc", max_tokens=20).stats.draft_n == 0


def test_a_text_that_repeats_itself_is_guessed_without_a_draft() -> None:
    line = "one two three four five six seven "
    backend = FakeBackend(says(line * 6), n_ctx=512)
    with speculating(backend) as model:
        reply = model.generate("\n")
        assert reply.text == line * 6
        assert len(backend.batches) < 100


def test_a_text_that_has_ended_helps_the_next_one() -> None:
    backend = FakeBackend(says("It was a dark and stormy night; the rain fell in torrents."), n_ctx=256)
    with speculating(backend) as model:
        model.generate("a\n")
        first = len(backend.batches)
        reply = model.generate("something else\n")
        assert reply.text.endswith("torrents.")
        assert len(backend.batches) - first < first / 2


# The distribution


@pytest.mark.parametrize("kind", ["draft", "ngram"])
def test_sampled_replies_follow_the_targets_distribution(kind: str) -> None:
    """Chi-square of three-token replies over many seeds against the product of the target's probabilities."""
    parameters: dict[str, Any] = {"temperature": 0.7, "top_k": 3, "top_p": 1.0, "min_p": 0.0, "max_tokens": 3}
    backend = Chancy()
    draft = Chancy(1.5) if kind == "draft" else None
    n_runs, counts, guessed, accepted = 2000, dict[tuple[int, ...], int](), 0, 0
    with speculating(backend, draft, ngram=draft is None, most=3, least=3) as model:
        prompt = [5, 6, 7, 5, 6, 7, 5, 6]
        for seed in range(n_runs):
            reply = model.generate(prompt, seed=seed, ignore_eos=True, **parameters)
            key = tuple(reply.tokens)
            counts[key] = counts.get(key, 0) + 1
            guessed += reply.stats.draft_n
            accepted += reply.stats.draft_n_accepted
    assert guessed > n_runs

    def misfit(of: Chancy) -> tuple[float, int, int]:
        """Chi-square against the probabilities of a model, its degrees of freedom, and replies that it never gives."""

        def chances(text: list[int]) -> dict[int, float]:
            logits = of._logits(text).astype(np.float64)
            logits[[EOS, 258]] = -np.inf
            best = np.argsort(-logits)[:3]
            weights = np.exp((logits[best] - logits[best[0]]) / 0.7)
            return dict(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))

        expected = {}
        for a, p in chances(prompt).items():
            for b, q in chances([*prompt, a]).items():
                for c, r in chances([*prompt, a, b]).items():
                    expected[a, b, c] = n_runs * p * q * r
        usual = [key for key, value in expected.items() if value >= 5]
        rare = sum(value for value in expected.values() if value < 5)
        seen = sum(count for key, count in counts.items() if key not in usual)  # all that can hardly be is one class
        chi2 = sum((counts.get(key, 0) - expected[key]) ** 2 / expected[key] for key in usual)
        impossible = sum(count for key, count in counts.items() if key not in expected)
        return chi2 + (seen - rare) ** 2 / max(rare, 1.0), len(usual), impossible

    chi2, freedom, impossible = misfit(Chancy())
    assert freedom > 10 and not impossible
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)
    chi2, freedom, _ = misfit(Chancy(1.5))  # the draft's own, which the test must tell from the target's
    assert chi2 > 10 * freedom
    assert 0.1 * guessed < accepted < 0.9 * guessed or draft is None


# Parts


@settings(max_examples=200)
@given(data=st.data())
def test_the_memory_finds_only_what_is_there(data: st.DataObject) -> None:
    memory = NgramMemory(200)
    tokens = np.zeros(200, np.int32)
    n = 0
    for _ in range(data.draw(st.integers(1, 8))):
        n = data.draw(st.integers(0, n))  # goes back, as another prompt does
        more = data.draw(st.lists(st.integers(0, 3), max_size=60))[: 200 - n]
        tokens[n : n + len(more)] = more
        n += len(more)
        memory.sync(tokens, n)
        guess, agreed = memory.find(tokens, n, 10)
        text = tokens[:n].tolist()
        if not guess:
            assert agreed == 0
            continue
        assert len(guess) == 10 and agreed >= 2
        places = [p for p in range(agreed, n) if text[p - agreed : p] == text[n - agreed :]]
        assert any((text[p:] * 10)[:10] == guess for p in places)


def test_the_memory_prefers_the_longest_agreement() -> None:
    memory = NgramMemory(64)
    text = np.array([1, 2, 3, 4, 5, 9, 8, 4, 5, 7, 1, 2, 3, 4, 5], np.int32)
    memory.sync(text, len(text))
    assert memory.find(text, len(text), 3) == ([9, 8, 4], 5)


def test_a_full_memory_begins_anew() -> None:
    memory = NgramMemory(32)
    for start in range(0, 100, 10):
        memory.append(np.arange(start, start + 10, dtype=np.int32))
    context = np.array([92, 93, 94], np.int32)
    assert memory.find(context, 3, 3)[0] == [95, 96, 97]
    memory.append(np.arange(1000, 1100, dtype=np.int32))
    assert memory.find(np.array([1090, 1091, 1092], np.int32), 3, 2)[0] == [1093, 1094]


def test_costs_follow_the_machine_and_keep_their_proportions() -> None:
    costs = Costs([1.0, 1.1, 1.2, 2.0])
    for _ in range(60):
        costs.learn(1, 3.0)
    assert costs[1] == pytest.approx(3.0, rel=0.01)
    assert costs[4] / costs[1] == pytest.approx(2.0, rel=0.01)
    for _ in range(300):
        costs.learn(1, 3.0)
        costs.learn(4, 3.6)
    assert costs[4] / costs[1] == pytest.approx(1.2, rel=0.1)
    costs.learn(1, 3000.0)  # a step that was held up
    assert costs[1] < 3.5


def test_costs_from_a_busy_moment_are_mended_by_a_few_steps() -> None:
    """Measured beside other programs all sizes seemed alike; what is learned of some reaches the larger ones."""
    true = [1.0, 1.05, 1.15, 1.25, 1.5, 1.6, 2.0, 2.1]
    costs = Costs([6.0] * 8, seen=0.5)
    for n in 2 * (1, 4, 4, 6, 4, 4, 6, 6):
        costs.learn(n, true[n - 1])
    assert costs[6] / costs[1] > 1.05 and costs[8] >= costs[7] >= costs[6]
    for n in 20 * (1, 2, 4, 6):
        costs.learn(n, true[n - 1])
    for n in (1, 2, 4, 6):
        assert costs[n] == pytest.approx(true[n - 1], rel=0.1)
    dear = Costs([1.0, 4.0, 7.0, 10.0], seen=0.5)
    assert not dear.known(4)
    for _ in range(12):
        dear.learn(4, 1.3)
    assert dear.known(4) and dear[2] <= dear[3] <= dear[4] < 1.6
    dear.learn(4, 400.0)
    assert dear[4] < 1.6


@pytest.mark.parametrize("wrong", [2, 3, 4, 6])
def test_a_wrong_belief_of_what_steps_cost_is_put_right(wrong: int) -> None:
    """Sizes that were held up when they were measured, by however much, are tried all the same, and found cheap."""
    backend, draft = Chancy(n_ctx=900), Chancy(n_ctx=900)
    with speculating(backend, draft, ngram=False) as model:
        speculator: Any = model.speculator
        speculator.costs = Costs([cost * (8 if n >= wrong else 1) for n, cost in enumerate(CHEAP, 1)])
        model.generate("abc", max_tokens=800, ignore_eos=True)
        n_before = len(backend.batches)
        model.generate("abd", max_tokens=800, ignore_eos=True)
        assert len(backend.batches) - n_before < 80  # 50 where beliefs were right from the beginning


def test_the_cost_of_a_guess_is_a_line_through_those_seen() -> None:
    line = Line(1.0, 1.0)
    for i in range(200):
        line.learn(1 + i % 4, 2.0 + 0.5 * (1 + i % 4))
    assert line.step == pytest.approx(0.5, rel=0.05)
    line.learn(1, 1000.0)
    assert line.step < 1.0
    same = Line(1.0, 1.0)
    for _ in range(500):
        same.learn(3, 6.0)
    assert 0 < same.step <= 2.0


def test_a_text_that_gives_nothing_to_guess_is_left_alone() -> None:
    """Random words: most steps are not even looked at, and a new request is."""
    backend, asked = Chancy(n_ctx=300), []

    class Watched(Speculator):
        def propose(self, tasks: Any, room: int) -> list[int]:
            asked.append(len(tasks))
            return super().propose(tasks, room)

    costs = [1.0, 2.0, 3.0, 4.0, *(5.0 + i for i in range(20))]
    speculator = Watched(backend.n_ctx, backend.n_seq_max, Costs(costs))
    CLOCK.runs_by(backend, costs)
    tokenizer: Any = FakeTokenizer()
    with Model(backend, tokenizer, None, SamplingParams(temperature=0), speculator=speculator) as model:
        noise: dict[str, Any] = {"temperature": 50.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True}
        model.generate("abc", seed=1, max_tokens=250, **noise)
        assert 15 < len(asked) < 100
        asked.clear()
        model.generate("xyz", seed=2, max_tokens=5, **noise)
        assert len(asked) >= 3


def test_a_draft_that_breaks_does_not_break_the_reply() -> None:
    class Broken(Chancy):
        def forward(self, batch: Batch) -> NDArray[np.float32]:
            if self.n_evaluated > 30:
                raise EdgertError("the draft's weights are damaged")
            return super().forward(batch)

    with speculating(Chancy(), Broken(), ngram=False) as model:
        assert len(model.generate("abc", max_tokens=60, ignore_eos=True).tokens) == 60


def test_who_comes_and_who_leaves_interrupts_a_step_of_several_rounds() -> None:
    backend = Chancy()
    with speculating(backend, Chancy()) as model:
        assert model.speculator is not None
        word = model.speculator.interrupted  # which nothing resets where there are no such steps
        assert word[0] == 0
        with held(backend):
            stream = model.generate("abc", True, max_tokens=60, ignore_eos=True)
            assert word[0] == 1
            word[0] = 0
            stream.cancel()
            assert word[0] == 1
        stream.reply()
