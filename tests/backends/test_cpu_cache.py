"""The pager alone: any history of growing, forking, truncating and freeing against a simple model of it."""

from __future__ import annotations

import mmap
from random import Random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from resident import COUNTED, bytes_held

from edgert.backends.cpu import cache as cache_module
from edgert.backends.cpu import pieces as pieces_module
from edgert.backends.cpu.cache import Kept, PagedCache
from edgert.backends.cpu.layouts import PAGE
from edgert.backends.cpu.memory import LARGE_PAGE
from edgert.errors import DoesNotFitError

N_SEQ, N_CTX, N_BATCH, WINDOW = 4, 400, 48, 40
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "grow", "grow", "fork", "truncate", "free", "rest"]),
        st.integers(0, N_SEQ - 1),
        st.integers(0, N_SEQ - 1),
        st.integers(0, N_CTX),
    ),
    max_size=60,
)


def make(type_k: str, windows: tuple[int, ...] = (0, WINDOW, WINDOW), n_pages: int = 60) -> PagedCache:
    return PagedCache([Kept(window, 1, 32) for window in windows], N_SEQ, N_CTX, n_pages, N_BATCH, type_k, "f16")


def row(cache: PagedCache, window: int, sequence: int) -> np.ndarray:
    """Pages of a sequence by position / PAGE, as the kernels find them; -1 where they have been given back."""
    pool = cache.pools[window]
    pages = pool.table[sequence, pool.lead : pool.end[sequence]].copy()
    pages[: max(0, pool.first[sequence] - pool.lead)] = -1
    return pages


def write(cache: PagedCache, sequence: int, start: int, stop: int, stamp: int) -> list[int]:
    """Puts a number in every position of every layer; returns them."""
    numbers = [(stamp + i) % 251 + 1 for i in range(start, stop)]
    for window in cache.pools:
        pages = row(cache, window, sequence)
        for i, number in zip(range(start, stop), numbers, strict=True):
            cache.pools[window].data[pages[i // PAGE], i % PAGE] = number
    return numbers


def check(cache: PagedCache, expected: list[list[int]]) -> None:
    for window, pool in cache.pools.items():
        held: list[int] = []
        for sequence, numbers in enumerate(expected):
            assert cache.lengths[sequence] == len(numbers)
            pages = row(cache, window, sequence)
            seen_from = max(0, len(numbers) + 1 - window) if window else 0
            resting = len(numbers) % PAGE if sequence in cache._packed else 0  # packed; looked at when it goes on
            for i in range(seen_from, len(numbers) - resting):
                assert pool.data[pages[i // PAGE], i % PAGE] == numbers[i]
            held += pool.held(sequence).tolist()
        used = set(held)
        assert pool.used == len(used)  # none is leaked, none is given away while it is held
        counts = np.bincount(held, minlength=pool.size) if held else np.zeros(pool.size, int)
        np.testing.assert_array_equal(pool._references[sorted(used)], counts[sorted(used)])
        assert not used & set(pool._free)
        assert len(used) + len(pool._free) == pool.size


@pytest.mark.parametrize("large_page", [LARGE_PAGE, 2 * mmap.PAGESIZE])
@pytest.mark.parametrize("type_k", ["f16", "q4_0"])
@given(STEPS)
@settings(max_examples=150)
def test_any_history(type_k: str, large_page: int, steps: list[tuple[str, int, int, int]]) -> None:
    """Also where pages move, as those in large pages of the system do."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces_module, "LARGE_PAGE", large_page)
        cache = make(type_k)
        assert cache.pools[0]._pieces.large == (large_page < LARGE_PAGE and pieces_module.GIVES_BACK)
        go_through(cache, steps)


def go_through(cache: PagedCache, steps: list[tuple[str, int, int, int]]) -> None:
    expected: list[list[int]] = [[] for _ in range(N_SEQ)]
    for stamp, (what, one, other, number) in enumerate(steps):
        present = len(expected[one])
        if what == "rest":
            cache.rest(one)
            if number % 2:
                cache.give_back()
        elif what == "grow":
            length = min(N_CTX, present + 1 + number % N_BATCH)
            if length == present or cache.missing({one: length}):
                continue
            cache.grow(one, length)
            expected[one] += write(cache, one, present, length, 7 * stamp)
        else:
            length = 0 if what == "free" else cache.reachable(one, number % (present + 1))
            if what == "fork" and (one == other or expected[other]):
                continue
            try:
                if what == "fork":
                    cache.fork(one, other, length)
                    expected[other] = expected[one][:length]
                else:
                    cache.truncate(one, length)
                    del expected[one][length:]
            except DoesNotFitError:  # for the copy of the last page: whoever meets it frees the sequence
                failed = other if what == "fork" else one
                cache.truncate(failed, 0)
                expected[failed] = []
        check(cache, expected)
    for sequence in range(N_SEQ):
        cache.truncate(sequence, len(expected[sequence]))
    check(cache, expected)
    for sequence in range(N_SEQ):
        cache.truncate(sequence, 0)
    assert cache.used_bytes == 0


def test_windows_give_pages_back() -> None:
    """However long a sequence is, layers with a window hold the window, as much before it, and a step."""
    cache = make("f16")
    most = 0
    for length in range(1, N_CTX + 1):
        cache.grow(0, length)
        most = max(most, cache.pools[WINDOW].used)
        assert cache.pools[0].used == -(-length // PAGE)
        for back in range(WINDOW):
            assert cache.reachable(0, max(0, length - back)) == max(0, length - back)
    assert most <= 2 * WINDOW // PAGE + 2
    assert cache.reachable(0, N_CTX - 3 * WINDOW) == 0
    assert cache.reachable(0, 0) == 0


def test_a_window_that_is_nearly_the_context_has_no_pages_of_its_own() -> None:
    cache = PagedCache([Kept(0, 1, 32), Kept(200, 1, 32)], 1, 256, 16, 64)
    assert list(cache.pools) == [0]


SHAPES = {  # layers, types of keys and values
    "smollm2": ([Kept(0, 3, 64)] * 30, "q8_0", "q8_0"),
    "smollm2 f16": ([Kept(0, 3, 64)] * 30, "f16", "f16"),
    "smollm2 q4_0 values": ([Kept(0, 3, 64)] * 30, "q8_0", "q4_0"),
    "gemma3": ([Kept(512 * (i % 6 != 5), 1, 256) for i in range(18)], "q8_0", "q8_0"),
    "lfm2": ([Kept(0, 8, 64) if i % 3 == 2 else Kept(64, 0, 0, 1024) for i in range(16)], "q8_0", "q8_0"),
}
# Mixes of lengths: some sequences, most of them short, in an order in which they grow.
MIXES = st.lists(
    st.one_of(st.integers(1, 40), st.integers(1, 40), st.integers(1, 800)), min_size=1, max_size=24
).filter(lambda lengths: sum(lengths) <= 2000)
ONCE = settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])


def fill(name: str, lengths: list[int], draw: Random, freed: int) -> PagedCache:
    """Sequences of these lengths, grown in turn by a few positions, and as many more that have come and gone."""
    layers, type_k, type_v = SHAPES[name]
    n = len(lengths)
    cache = PagedCache(layers, 2 * n, 4096, 4000 // PAGE + 4 * n, 64, type_k, type_v)
    assert all(pool.step % mmap.PAGESIZE == 0 for pool in cache.pools.values())
    present, other = [0] * (2 * n), [min(length, freed) for length in lengths]
    goals = lengths + other
    while growing := [i for i in range(2 * n) if present[i] < goals[i]]:
        one = draw.choice(growing)
        present[one] = min(goals[one], present[one] + draw.randrange(1, 64))
        cache.grow(one, present[one])
        for pool in cache.pools.values():
            pool.data[pool.held(one)] = 1  # each page's positions lie all over it
    for i in range(n):
        cache.truncate(n + i, 0)
    return cache


def memory(cache: PagedCache) -> tuple[int, int]:
    """Bytes that the system holds for a cache, and bytes of what its sequences keep."""
    held = used = 0
    for pool in cache.pools.values():
        held += bytes_held(pool.data) + sum(bytes_held(part) for part in pool.shelf.ranges())
        for sequence, length in enumerate(cache.lengths):
            used += max(0, length - pool.first[sequence] * PAGE) * pool.stride // PAGE
    return held, used


def rounding(cache: PagedCache) -> int:
    """Bytes by which pages of the system may exceed what they are for."""
    padding = sum((pool.used - len(pool.shelf)) * (pool.step - pool.stride) for pool in cache.pools.values())
    return padding + len(cache.pools) * (PAGE - 1) * (mmap.PAGESIZE - 1)


@COUNTED
@pytest.mark.parametrize("name", SHAPES)
@given(MIXES, st.integers(0, 1 << 30), st.integers(1, 100))
@ONCE
def test_what_is_wasted_at_rest(name: str, lengths: list[int], seed: int, freed: int) -> None:
    """At any mix of lengths, and whatever ended beside them, the system holds less than 4 % beyond the positions.

    Pages of the system cannot be divided: each size which ends of sequences have, 15 at most in a pool, takes up to one
    more than it fills, and whole pages of the cache may be a fiftieth apart. So 4 % are sure from 3.3 MB a pool on, 270
    positions of SmolLM2, whose positions nearly fill three pages of the system: there they are at all lengths.
    """
    cache = fill(name, lengths, Random(seed), freed)
    for sequence in range(len(lengths)):
        cache.rest(sequence)
    cache.give_back()
    held, used = memory(cache)
    assert 0 <= held - used <= rounding(cache)
    if name == "smollm2" or used >= 3_300_000 * len(cache.pools):
        assert held - used < 0.04 * held


@COUNTED
@given(MIXES, st.integers(0, 1 << 30), st.integers(1, 4), st.integers(1, 100))
@ONCE
def test_what_is_wasted_while_some_are_computed(lengths: list[int], seed: int, n_computed: int, freed: int) -> None:
    """Each sequence that steps compute has its last page whole, because kernels read keys of PAGE positions side by
    side: PAGE - 1 positions at most, so that 4 % are kept from 420 positions for each of these on."""
    draw = Random(seed)
    cache = fill("smollm2", lengths, draw, freed)
    computed = draw.sample(range(len(lengths)), min(n_computed, len(lengths)))
    for sequence in set(range(len(lengths))) - set(computed):
        cache.rest(sequence)
    cache.give_back()
    held, used = memory(cache)
    assert 0 <= held - used <= len(computed) * (PAGE - 1) * cache.token_bytes + rounding(cache)
    if sum(lengths) >= 420 * len(computed):
        assert held - used < 0.04 * held


@pytest.mark.parametrize("type_v", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("type_k", ["f16", "q8_0", "q4_0"])
def test_what_rested_is_as_it_was(type_k: str, type_v: str) -> None:
    """Byte by byte, of keys, values, what rounding left of the first keys, and rows of convolutions."""
    layers = [Kept(0, 2, 64), Kept(0, 2, 64), Kept(0, 1, 32), Kept(40, 0, 0, 16), Kept(0, 2, 64)]
    draw = np.random.default_rng(0)
    for length in (1, 3, 4, 15, 16, 17, 30, 200):
        cache = PagedCache(layers, 2, 256, 40, 256, type_k, type_v)
        cache.grow(0, length)
        for pool in cache.pools.values():
            pages = pool.held(0)
            pool.data[pages] = draw.integers(1, 256, (len(pages), pool.stride), np.uint8)
            if pool.lead:  # of its values nothing is read
                for part in cache._held(pool.page(0, 0), 0, PAGE):
                    part[...] = 0
                for part in cache._held(pool.page(0, 0), 0, PAGE, keys_only=True):
                    part[...] = 7
        facts, before = cache.save(0, length)
        cache.rest(0)
        cache.rest(0)
        cache.give_back()
        again, after = cache.save(0, length)  # which leaves it at rest
        assert again == facts and all(map(np.array_equal, before, after))
        cache.give_back()
        if length % PAGE:
            assert not cache.pools[0].page(0, cache.pools[0].end[0] - 1).any()
        cache.fork(0, 1, length)
        assert all(map(np.array_equal, before, cache.save(1, length)[1]))
        cache.grow(0, length + 1)
        assert all(map(np.array_equal, before, cache.save(0, length)[1]))


@COUNTED
def test_what_has_rested_is_given_back_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at once, so that who goes on finds it; and whatever asks for it gets it."""
    now = 100.0
    for module in (cache_module, pieces_module):
        monkeypatch.setattr(module, "monotonic", lambda: now)
    cache = PagedCache([Kept(0, 3, 64)] * 30, 4, 512, 8, 64, "q8_0", "q8_0")

    def grow(sequence: int, length: int) -> None:
        cache.grow(sequence, length)
        cache.pools[0].data[cache.pools[0].held(sequence)] = 1

    for sequence in range(3):
        grow(sequence, 17)
    whole, page = memory(cache)[0], cache.pools[0].step
    cache.rest(0)
    now = 103.0
    cache.truncate(1, 0)
    assert memory(cache)[0] == whole and len(cache.pools[0].shelf) == 0
    now = 105.0
    cache.rest(2)  # the first one has rested for five seconds
    held = memory(cache)[0]
    assert held < whole and len(cache.pools[0].shelf) == 1
    now = 109.0
    cache.grow(2, 18)
    cache.give_back(now - 5)
    cache.rest(2)
    assert memory(cache)[0] <= held - 2 * page + mmap.PAGESIZE * 8
    assert len(cache.pools[0].shelf) == 1
    cache.give_back()
    assert len(cache.pools[0].shelf) == 2 and cache.oldest == np.inf


@COUNTED
def test_pages_move_to_where_others_have_left_holes() -> None:
    """So that large pages of the system are full, whoever comes and goes, while what stays is computed."""
    cache = PagedCache([Kept(0, 3, 64)] * 30, 4, 4096, 256, 64, "q8_0", "q8_0")
    pool, draw = cache.pools[0], np.random.default_rng(0)
    for length in range(40, 1000, 40):
        for sequence in range(4):
            cache.grow(sequence, length + sequence)
            pages = pool.held(sequence)[-4:]
            pool.data[pages] = draw.integers(0, 256, (len(pages), pool.stride), np.uint8)
    cache.truncate(2, 0)
    cache.truncate(3, 0)
    cache.fork(0, 2, 500)
    expected = [cache.save(sequence, cache.lengths[sequence])[1] for sequence in range(3)]
    assert sorted({*pool.held(0), *pool.held(1), *pool.held(2)}) != list(range(pool.used))
    cache.give_back()
    assert sorted({*pool.held(0), *pool.held(1), *pool.held(2)}) == list(range(pool.used))
    assert pool._pieces._large.sum() == pool.used * pool.step // LARGE_PAGE
    assert bytes_held(pool.data) <= pool.used * pool.step
    for sequence in range(3):
        after = cache.save(sequence, cache.lengths[sequence])[1]
        assert all(map(np.array_equal, expected[sequence], after))
    for sequence in range(3):
        cache.truncate(sequence, 0)
    assert pool.used == 0 and sorted(pool._free) == list(range(pool.size))


def test_forks_hold_one_copy() -> None:
    cache = PagedCache([Kept(0, 1, 32)], 8, 1024, 512, 512, "q8_0", "q8_0")
    cache.grow(0, 1000)
    alone = cache.used_bytes
    for target in range(1, 8):
        cache.fork(0, target, 1000)
    assert cache.used_bytes - alone == 7 * cache.token_bytes * PAGE  # of each the last page, which it will write to


def test_pages_of_others_are_wiped() -> None:
    cache = PagedCache([Kept(0, 1, 32)], 2, 64, 4, 64)
    cache.grow(0, 64)
    cache.pools[0].data[cache.pools[0].held(0)] = 1
    cache.truncate(0, 0)
    cache.grow(1, 20)
    assert not cache.pools[0].data[cache.pools[0].held(1)].any()


@pytest.mark.parametrize("type_k", ["f16", "q4_0"])
def test_a_sequence_of_whole_pages_is_repeated(type_k: str) -> None:
    """In windows too, which give back what they pass meanwhile; what is there already stays."""
    cache = make(type_k)
    cache.grow(0, 2 * PAGE)
    first = write(cache, 0, 0, 2 * PAGE, 7)
    assert cache.repeatable(0)
    cache.repeat(0, 300, N_BATCH)
    for window, pool in cache.pools.items():
        pages = row(cache, window, 0)
        held = [i for i in range(300) if pages[i // PAGE] >= 0]
        assert held[-1] == 299 and (held[0] == 0) == (not window)
        assert all(pool.data[pages[i // PAGE], i % PAGE] == first[i % len(first)] for i in held)
    assert cache.lengths == [300, 0, 0, 0] and not cache.repeatable(0)
    cache.grow(1, 20)
    assert not cache.repeatable(1) and not cache.repeatable(2)
