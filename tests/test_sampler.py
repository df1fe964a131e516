"""Sampling: checked parameters, the chain against a plain reading of it and against llama.cpp, the draw."""

from __future__ import annotations

import ctypes
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgert.backends.cpu.isa import available, select
from edgert.backends.cpu.sampling import SampleKernel
from edgert.errors import EdgertError, RequestError
from edgert.options import Options, SamplingParams
from edgert.sampler import Sampler, logprobs, uniform

NOTHING = np.empty(0, np.int32)


def row(n: int, seed: int = 0, scale: float = 3.0) -> Any:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


@pytest.fixture(scope="module", params=["numpy", "kernel", "portable kernel"])
def kernel(request: pytest.FixtureRequest) -> SampleKernel | None:
    """Each way to sample: NumPy, the kernel for this processor, the kernel for any processor."""
    if request.param == "numpy":
        return None
    return SampleKernel(select("portable" if request.param.startswith("portable") else available()[0]))


def plain(logits: Any, history: Any, p: SamplingParams) -> tuple[list[int], list[float]]:
    """The chain, one token at a time, in float64."""
    values = {i: float(v) + p.logit_bias.get(i, 0.0) for i, v in enumerate(logits)}
    window = list(history) if p.repeat_last_n < 0 else list(history)[max(0, len(history) - p.repeat_last_n) :]
    for token in set(window):
        v = values[token]
        v = v / p.repeat_penalty if v > 0 else v * p.repeat_penalty
        values[token] = v - window.count(token) * p.frequency_penalty - p.presence_penalty
    order = sorted(values, key=lambda i: (-values[i], i))
    if p.temperature == 0:
        return order[:1], [1.0]
    order = order[: p.top_k or None]
    weights = [math.exp(values[i] - values[order[0]]) for i in order]
    goal, mass, end = p.top_p * math.fsum(weights), 0.0, 0
    while p.top_p < 1 and end < len(order):
        mass += weights[end]
        end += 1
        if mass >= goal:
            break
    order = order[: end or None]
    order = [i for i in order if math.exp(values[i] - values[order[0]]) >= p.min_p]
    weights = [math.exp((values[i] - values[order[0]]) / p.temperature) for i in order]
    return order, [w / sum(weights) for w in weights]


# Parameters


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repeat_penalty"])
@pytest.mark.parametrize("value", [math.nan, 1e999, -1e999, -1, "0.7", True, [1], 1e300, 10**4000, -(10**400), -1e-9])
def test_a_wrong_number_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == name


def test_a_refusal_tells_the_value_that_was_given() -> None:
    with pytest.raises(RequestError, match=r"must be a number from 0 to 1, not 1\.0000001$"):
        SamplingParams(top_p=1.0000001)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, "1", False, 2.5, -3])
def test_wrong_penalties(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["top_k", "repeat_last_n", "seed", "max_tokens", "top_logprobs"])
@pytest.mark.parametrize("value", [math.nan, 1.5, -2, "3", True, 10**4000])
def test_a_wrong_integer_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        Options.of(SamplingParams(), **{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("value", [[1], {"x": 1}, {1: "2"}, {1: math.nan}, {1: math.inf}, {1: 101}, {1: True}])
def test_wrong_logit_bias(value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(logit_bias=value)  # type: ignore[arg-type]
    assert caught.value.field.startswith("logit_bias")


@pytest.mark.parametrize("value", [3, ["a", 3], {"a": 1}])
def test_wrong_stop(value: object) -> None:
    with pytest.raises(RequestError, match="stop"):
        Options.of(SamplingParams(), stop=value)


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(RequestError, match=r"temprature.*temperature"):
        Options.of(SamplingParams(), temprature=0.5)


def test_a_request_overrides_the_models_defaults_which_override_ours() -> None:
    recommended = SamplingParams.from_metadata(
        {"general.sampling.temp": np.float32(1.0), "general.sampling.top_k": 64, "general.name": "x"}
    )
    assert (recommended.temperature, recommended.top_k, recommended.top_p) == (1.0, 64, 0.95)
    options = Options.of(recommended, temperature=0.25, top_k=None, max_tokens=-1, stop=["", "a"])
    assert options.sampling.temperature == 0.25
    assert options.sampling.top_k == 64
    assert options.max_tokens is None
    assert options.stop == ("a",)


# The chain


CHAINS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.3, 0.8, 1.5, 50]),
    top_k=st.sampled_from([0, 1, 2, 40, 1000]),
    top_p=st.sampled_from([0, 0.1, 0.5, 0.95, 1]),
    min_p=st.sampled_from([0, 0.05, 0.5, 1]),
    repeat_penalty=st.sampled_from([1.0, 1.1, 1.5, 0.5]),
    repeat_last_n=st.sampled_from([-1, 0, 1, 5, 64]),
    presence_penalty=st.sampled_from([0, 0.5, -1]),
    frequency_penalty=st.sampled_from([0, 0.25, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, 1), st.sampled_from([-100.0, 1.0, 5.0])),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=300)
@given(
    n=st.integers(2, 700),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    ties=st.booleans(),
    params=CHAINS,
)
def test_the_chain_equals_a_plain_reading(n: int, seed: int, scale: float, ties: bool, params: SamplingParams) -> None:
    logits = row(n, seed, scale)
    if ties:
        logits = np.round(logits)
    history = np.random.default_rng(seed).integers(0, n, seed % 90).astype(np.int32)
    before = logits.copy()
    ids, share = Sampler(params, n).distribution(logits, history)
    assert (logits == before).all()
    want_ids, want_share = plain(logits, history, params)
    if list(ids) != want_ids:  # rounding may move the borders of top-p and min-p by equals
        assert abs(len(ids) - len(want_ids)) <= np.count_nonzero(np.isclose(share, share[-1], rtol=1e-4))
    else:
        np.testing.assert_allclose(share, want_share, rtol=1e-3)


@pytest.mark.parametrize("isa", ["portable", *(name for name in available() if name != "portable")])
def test_the_kernel_chooses_what_numpy_chooses(isa: str) -> None:
    kernel, n_checked = SampleKernel(select(isa)), 0

    @settings(max_examples=500)
    @given(
        n=st.integers(2, 3000),
        seed=st.integers(0, 10**6),
        scale=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
        ties=st.booleans(),
        params=CHAINS,
    )
    def check(n: int, seed: int, scale: float, ties: bool, params: SamplingParams) -> None:
        nonlocal n_checked
        logits = row(n, seed, scale)
        if ties:
            logits = np.round(logits)
        history = np.random.default_rng(seed).integers(0, n, seed % 200).astype(np.int32)
        before = logits.copy()
        reference, sampler = Sampler(params, n), Sampler(params, n, kernel=kernel)
        token = sampler.sample(logits, history)
        assert (logits == before).all()
        ids, share = reference.distribution(logits, history)
        expected, (guessed, probability) = (
            reference.sample(logits, history),
            sampler.guess(logits, history, len(history)),
        )
        assert guessed == token in ids
        if token != expected:  # rounding may move a border by equals, or the end of a race
            n_checked -= 1
        elif params.temperature and params.top_k != 1:
            assert probability == pytest.approx(share[list(ids).index(token)], rel=1e-3)
        else:
            assert probability == pytest.approx(reference.guess(logits, history, len(history))[1], rel=1e-3, abs=1e-6)
        n_checked += 1

    check()
    assert n_checked > 450

    rows = np.stack([row(900, seed, 5.0) for seed in range(4)])
    params = SamplingParams(temperature=0.8, seed=3, repeat_penalty=1.2)
    for sampler in (Sampler(params, 900), Sampler(params, 900, kernel=kernel)):
        history = np.zeros(24, np.int32)
        history[:20] = np.arange(20)
        for right in range(4):  # so many guesses are what is chosen
            expected = []
            for i in range(right + 1):
                expected.append(sampler.sample(rows[i], history, 20 + i))
                history[20 + i] = expected[i]
            history[20 + right] = (expected[right] + 1) % 900
            assert sampler.follow(rows, history, 20) == expected
    damaged = rows.copy()
    damaged[2, 5] = np.nan
    history[20:23] = expected[:3]
    assert sampler.follow(damaged, history, 20) == expected[:2]
    with pytest.raises(EdgertError, match="not a finite number"):
        sampler.follow(damaged[2:], history, 22)


@pytest.mark.parametrize(
    "settings_",
    [
        {},
        {"temperature": 1.3, "top_k": 0, "top_p": 0.9},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.02},
        {"repeat_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.7},
        {"logit_bias": {5: 10.0, 6: -10.0}},
    ],
)
def test_the_chain_equals_llama_cpps(settings_: dict[str, Any]) -> None:
    api = pytest.importorskip("llama_cpp.llama_cpp")
    p, n = SamplingParams(**settings_), 3000
    logits = row(n, 1)
    history = np.random.default_rng(2).integers(0, 60, 100).astype(np.int32)
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    if p.logit_bias:
        pairs = (api.llama_logit_bias * len(p.logit_bias))(*p.logit_bias.items())
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_logit_bias(n, len(pairs), pairs))
    penalties = (n, p.repeat_last_n, p.repeat_penalty, p.frequency_penalty, p.presence_penalty)
    n_arguments = len(api.llama_sampler_init_penalties.argtypes)  # releases differ in the first one
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_penalties(*penalties[-n_arguments:]))
    if p.top_k:
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_top_k(p.top_k))
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_top_p(p.top_p, 1))
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_min_p(p.min_p, 1))
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(p.temperature))
    for token in history:
        api.llama_sampler_accept(chain, int(token))
    cells = (api.llama_token_data * n)(*((i, float(v), 0.0) for i, v in enumerate(logits)))
    array = api.llama_token_data_array(cells, n, -1, False)
    api.llama_sampler_apply(chain, ctypes.byref(array))
    theirs = sorted(((array.data[i].logit, array.data[i].id) for i in range(array.size)), reverse=True)
    api.llama_sampler_free(chain)
    peak = theirs[0][0]
    weights = np.array([math.exp(logit - peak) for logit, _ in theirs])
    ids, share = Sampler(p, n).distribution(logits, history)
    assert [int(i) for i in ids] == [i for _, i in theirs]
    np.testing.assert_allclose(share, weights / weights.sum(), rtol=1e-4)


def test_a_penalty_makes_tokens_of_negative_score_less_likely() -> None:
    logits = np.linspace(-9, -1, 9, dtype=np.float32)
    seen = np.array([2, 8, 8], np.int32)
    free = dict(zip(*Sampler(SamplingParams(top_k=0, min_p=0), 9).distribution(logits, NOTHING), strict=True))
    params = SamplingParams(top_k=0, top_p=1, min_p=0, repeat_penalty=1.5)
    bent = dict(zip(*Sampler(params, 9).distribution(logits, seen), strict=True))
    assert bent[8] < free[8]
    assert bent[2] < free.get(2, 1e-3)


def test_the_repeat_penalty_counts_a_token_once() -> None:
    logits = row(50)
    sampler = Sampler(SamplingParams(repeat_penalty=1.1, top_k=0), 50)
    once = sampler.distribution(logits, np.array([7], np.int32))
    often = sampler.distribution(logits, np.full(50, 7, np.int32))
    np.testing.assert_array_equal(once[0], often[0])
    np.testing.assert_array_equal(once[1], often[1])


def test_greedy_takes_the_lowest_id_among_equals(kernel: SampleKernel | None) -> None:
    logits = np.zeros(100, np.float32)
    logits[[60, 40, 80]] = 5
    sampler = Sampler(SamplingParams(temperature=0, seed=1), 100, kernel=kernel)
    assert {sampler.sample(logits, np.zeros(i, np.int32)) for i in range(20)} == {40}


def test_a_ban_and_a_bias(kernel: SampleKernel | None) -> None:
    logits = row(100)
    best = int(logits.argmax())

    def choose(bias: Any, banned: Any = ()) -> int:
        params = SamplingParams(temperature=0, logit_bias=bias)
        return Sampler(params, 100, banned, kernel).sample(logits, NOTHING)

    assert choose({}) == best
    assert choose({best: False}) == choose({}, [best]) == np.argsort(logits)[-2]
    assert choose({"3": 100}) == 3
    with pytest.raises(RequestError, match="token 100 is outside the vocabulary of 100"):
        choose({100: 1})
    with pytest.raises(RequestError, match="every token"):
        choose({}, range(100))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("place", [0, 777, 999])
def test_logits_that_are_not_finite_are_an_error(
    value: float, temperature: float, place: int, kernel: SampleKernel | None
) -> None:
    logits = row(1000)
    logits[place] = value
    sampler = Sampler(SamplingParams(temperature=temperature), 1000, kernel=kernel)
    with pytest.raises(EdgertError, match="after 3 tokens is not a finite number"):
        sampler.sample(logits, np.zeros(3, np.int32))


def test_huge_logits_are_fine(kernel: SampleKernel | None) -> None:
    logits = row(100, scale=1e37)
    assert Sampler(SamplingParams(), 100, kernel=kernel).sample(logits, NOTHING) == logits.argmax()


# The draw


@pytest.mark.parametrize("params", [{}, {"top_k": 0}, {"top_k": 0, "top_p": 1, "min_p": 0, "temperature": 1.5}])
def test_draws_follow_the_distribution(params: dict[str, Any], kernel: SampleKernel | None) -> None:
    logits, n_draws = row(60, 5, 1.5), 20_000
    sampler = Sampler(SamplingParams(seed=11, **params), 60, kernel=kernel)
    ids, share = sampler.distribution(logits, NOTHING)
    histories = np.zeros(n_draws, np.int32)
    draws = np.bincount([sampler.sample(logits, histories[:i]) for i in range(n_draws)], minlength=60)
    assert draws.sum() == draws[ids].sum()
    chi2 = ((draws[ids] - n_draws * share) ** 2 / (n_draws * share)).sum()
    assert chi2 < len(ids) + 5 * math.sqrt(2 * len(ids))


def test_the_seed_repeats_a_run_and_no_seed_does_not(kernel: SampleKernel | None) -> None:
    logits = row(5000)

    def run(seed: int | None) -> tuple[int, ...]:
        sampler = Sampler(SamplingParams(temperature=1.5, top_k=0, top_p=1, seed=seed), 5000, kernel=kernel)
        return tuple(sampler.sample(logits, np.zeros(i, np.int32)) for i in range(20))

    assert len({run(42) for _ in range(20)}) == 1
    assert run(42) != run(43)
    assert len({run(None) for _ in range(10)}) == 10
    assert len({run(-1) for _ in range(10)}) == 10


def test_uniform_is_uniform() -> None:
    for numbers in (
        np.array([uniform(7, i) for i in range(20_000)]),
        np.array([uniform(i, 7) for i in range(20_000)]),
    ):
        assert numbers.min() >= 0 and numbers.max() < 1
        cells = np.bincount((numbers * 100).astype(int), minlength=100)
        assert ((cells - 200) ** 2 / 200).sum() < 100 + 5 * math.sqrt(200)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_logprobs_are_those_of_the_plain_softmax() -> None:
    logits = row(500)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    value, best = logprobs(logits, 9, 5)
    assert value == pytest.approx(exact[9], abs=1e-5)
    assert [i for i, _ in best] == list(np.argsort(-exact)[:5])
    assert [v for _, v in best] == pytest.approx(np.sort(exact)[::-1][:5], abs=1e-5)
    assert logprobs(logits, 9, 0)[1] == []


def test_requests_that_wait_share_the_scratch_of_the_kernel() -> None:
    kernel = SampleKernel()
    tracemalloc.start()
    try:
        samplers = [Sampler(SamplingParams(seed=seed, top_p=0.9), 49152, (), kernel) for seed in range(100)]
        assert tracemalloc.get_traced_memory()[0] < 10e6
    finally:
        tracemalloc.stop()
    rng = np.random.default_rng(1)
    logits, history = rng.normal(0, 2, 49152).astype(np.float32), rng.integers(0, 49152, 60).astype(np.int32)
    for sampler in samplers[:10]:
        alone = Sampler(sampler.params, 49152, (), SampleKernel())
        assert sampler.sample(logits, history) == alone.sample(logits, history)
