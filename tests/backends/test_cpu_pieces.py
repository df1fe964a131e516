"""Equal pieces of memory: what the system holds of them, page by page."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from resident import COUNTED, bytes_held, held

from edgert.backends.cpu import pieces as module
from edgert.backends.cpu.memory import LARGE_PAGE
from edgert.backends.cpu.pieces import Pieces


@COUNTED
@pytest.mark.parametrize("size", [100, 4096, 5000, 195_840, 1 << 20])
@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 15), min_size=1, max_size=6), st.booleans()), max_size=12
    )
)
@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_pieces_hold_what_is_in_use(size: int, steps: list[tuple[bool, list[int], bool]]) -> None:
    """Page by page: once what was emptied is given back, each page of the system is held if something in it is in
    use, and no other; what is taken is zeros, and what is in use stays as it was."""
    pieces = Pieces(16, size)
    expected = np.zeros(16, np.uint8)
    for takes, some, gives in steps:
        some = [piece for piece in dict.fromkeys(some) if (expected[piece] == 0) == takes]
        if not some:
            continue
        if takes:
            pieces.use(some)
            assert not pieces.data[some].any()
            for piece in some:
                expected[piece] = piece + 1
                pieces.data[piece] = piece + 1
        else:
            pieces.empty(some)
            expected[some] = 0
        if not gives:
            continue
        pieces.give_back(pieces.rested(np.inf))
        first = pieces.data.ctypes.data
        pages = held(first, first + 15 * pieces.step + size)
        needed = np.zeros_like(pages)
        for piece in np.flatnonzero(expected):
            needed[piece * pieces.step // mmap.PAGESIZE : (piece * pieces.step + size - 1) // mmap.PAGESIZE + 1] = True
        np.testing.assert_array_equal(pages, needed)
        used = np.flatnonzero(expected)
        assert (pieces.data[used] == expected[used, None]).all()
    pieces.give_back(pieces.rested(np.inf))
    assert (pieces.data == expected[:, None]).all()


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("gives_back", [True, False])
def test_pieces_where_the_system_takes_nothing_back(
    gives_back: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GIVES_BACK", gives_back and module.GIVES_BACK)
    if refused:
        monkeypatch.setattr(Pieces, "_advise", lambda *_: False)
    pieces = Pieces(4, 5000)
    pieces.use([0, 1, 2])
    pieces.data[:3] = 7
    pieces.empty([1])
    pieces.give_back(pieces.rested(np.inf))
    assert (pieces.data[[0, 2]] == 7).all() and not pieces.data[[1, 3]].any()


@COUNTED
def test_large_pages_are_asked_for_where_all_of_one_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there already in small pages is made a large one; and none is kept for a part of it."""
    advice: list[tuple[int, int]] = []

    def advise(self: Pieces, begin: int, n_bytes: int, what: int) -> bool:
        if what != mmap.MADV_DONTNEED:
            assert n_bytes == LARGE_PAGE
            advice.append((begin // LARGE_PAGE, what))
        return True

    def told() -> list[tuple[int, int]]:
        found = advice.copy()
        advice.clear()
        return found

    large, small, collapse = mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE, module.COLLAPSE
    monkeypatch.setattr(Pieces, "_advise", advise)
    pieces = Pieces(40, LARGE_PAGE // 10 + 1, large=True)  # the tenth crosses a boundary
    pieces.use(list(range(9)))
    assert told() == []
    pieces.use([9])
    assert told() == [(0, large), (0, collapse)]
    pieces.use(list(range(10, 35)))
    assert told() == [(1, large), (2, large), (1, collapse)]
    pieces.empty([12, 13])
    assert told() == []
    pieces.use([12])
    pieces.empty([14])
    pieces.give_back(pieces.rested(np.inf))
    assert told() == [(1, small)]
    pieces.use([13])
    assert told() == []
    pieces.use([14])
    assert told() == [(1, large), (1, collapse)]
    pieces.empty(list(range(10)))
    pieces.give_back(pieces.rested(np.inf))
    assert told() == [(0, small), (1, small)]
    pieces.use(list(range(10)))
    assert told() == [(0, large), (1, large), (1, collapse)]  # the first is all fresh


@COUNTED
def test_of_a_large_page_what_is_in_use_is_kept() -> None:
    """As it was, and no more is held than that."""
    pieces = Pieces(40, LARGE_PAGE // 16, large=True)
    pieces.use(list(range(20)))
    for piece in range(20):
        pieces.data[piece] = piece + 1
    pieces.empty([2, 3, 4, 6, 19])
    pieces.give_back(pieces.rested(np.inf))
    assert bytes_held(pieces.data) == 15 * LARGE_PAGE // 16
    pieces.move(18, 4)
    assert bytes_held(pieces.data) == 15 * LARGE_PAGE // 16
    assert (pieces.data[4] == 19).all()
    assert all((pieces.data[piece] == piece + 1).all() for piece in (0, 1, 5, *range(7, 18)))
    assert not pieces.data[[2, 3, 6, 18, 19, 20, 39]].any()


@COUNTED
def test_what_was_emptied_of_late_is_held() -> None:
    """So that who comes next need not wait for fresh memory, and finds zeros in it all the same."""
    pieces = Pieces(4, 8192)
    pieces.use([0, 1, 2])
    pieces.data[:3] = 7
    pieces.empty([0])
    first = pieces.oldest
    pieces.empty([1])
    pieces.use([0])
    assert not pieces.data[0].any() and bytes_held(pieces.data) == 3 * 8192
    pieces.empty([0])
    pieces.give_back(pieces.rested(first))  # since when none has been out of use
    assert bytes_held(pieces.data) == 3 * 8192
    pieces.give_back(pieces.rested(pieces.oldest))
    assert bytes_held(pieces.data) == 2 * 8192
    pieces.give_back(pieces.rested(np.inf))
    assert bytes_held(pieces.data) == 8192 and pieces.oldest == np.inf
