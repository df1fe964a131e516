"""The pager alone: any history of growing, forking, truncating and freeing against a simple model of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgert.backends.cpu.cache import Kept, PagedCache
from edgert.backends.cpu.layouts import PAGE
from edgert.errors import DoesNotFitError

N_SEQ, N_CTX, N_BATCH, WINDOW = 4, 400, 48, 40
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "grow", "grow", "fork", "truncate", "free"]),
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
            for i in range(seen_from, len(numbers)):
                assert pool.data[pages[i // PAGE], i % PAGE] == numbers[i]
            held += pool.held(sequence).tolist()
        used = set(held)
        assert pool.used == len(used)  # none is leaked, none is given away while it is held
        counts = np.bincount(held, minlength=pool.size) if held else np.zeros(pool.size, int)
        np.testing.assert_array_equal(pool._references[sorted(used)], counts[sorted(used)])
        assert not used & set(pool._free)
        assert len(used) + len(pool._free) == pool.size


@pytest.mark.parametrize("type_k", ["f16", "q4_0"])
@given(STEPS)
@settings(max_examples=150)
def test_any_history(type_k: str, steps: list[tuple[str, int, int, int]]) -> None:
    cache = make(type_k)
    expected: list[list[int]] = [[] for _ in range(N_SEQ)]
    for stamp, (what, one, other, number) in enumerate(steps):
        present = len(expected[one])
        if what == "grow":
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


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=16))
@settings(max_examples=300)
def test_what_is_wasted(lengths: list[int]) -> None:
    """Positions in pages that hold none, at any mix of lengths: at most a page less one a sequence, so under 4 % of
    what is cached wherever sequences have 375 positions or more in the mean."""
    cache = PagedCache([Kept(0, 1, 32)], len(lengths), 4096, len(lengths) * 4096 // PAGE, 512, "q8_0", "q8_0")
    for sequence, length in enumerate(lengths):
        cache.grow(sequence, length)
    cached = cache.used_bytes // cache.token_bytes
    waste = cached - sum(lengths)
    assert 0 <= waste <= len(lengths) * (PAGE - 1)
    if sum(lengths) >= 375 * len(lengths):
        assert waste < 0.04 * cached


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
    cache.pools[0].data[:] = 1
    cache.truncate(0, 0)
    cache.grow(1, 20)
    assert not cache.pools[0].data[cache.pools[0].held(1)].any()
