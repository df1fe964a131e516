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
        pieces.give_back()
        first = pieces.data.ctypes.data
        pages = held(first, first + 15 * pieces.step + size)
        needed = np.zeros_like(pages)
        for piece in np.flatnonzero(expected):
            needed[piece * pieces.step // mmap.PAGESIZE : (piece * pieces.step + size - 1) // mmap.PAGESIZE + 1] = True
        np.testing.assert_array_equal(pages, needed)
        used = np.flatnonzero(expected)
        assert (pieces.data[used] == expected[used, None]).all()
    pieces.give_back()
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
    pieces.give_back()
    assert (pieces.data[[0, 2]] == 7).all() and not pieces.data[[1, 3]].any()


@COUNTED
def test_large_pages_are_not_kept_for_a_part_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not in use of them is trimmed, and once all of one is in use it is asked for again."""
    advice: list[tuple[int, str]] = []

    def advise(self: Pieces, begin: int, n_bytes: int, what: str) -> bool:
        if what != "DONTNEED":
            assert n_bytes == LARGE_PAGE
            advice.append((begin // LARGE_PAGE, what))
        return True

    def told() -> list[tuple[int, str]]:
        found = advice.copy()
        advice.clear()
        return found

    monkeypatch.setattr(Pieces, "_advise", advise)
    pieces = Pieces(40, LARGE_PAGE // 10 + 1, large=True)  # the tenth crosses a boundary
    assert told() == [(page, "HUGEPAGE") for page in range(4)]
    pieces.use(list(range(25)))
    assert told() == []
    pieces.trim()
    assert told() == [(2, "NOHUGEPAGE")]
    pieces.use([25])
    pieces.use(list(range(26, 30)))
    assert told() == [(2, "HUGEPAGE")]
    pieces.empty([3, 4])
    pieces.trim()
    assert told() == [(3, "NOHUGEPAGE")]  # of which the thirtieth has a little
    pieces.give_back()
    assert told() == []
    pieces.trim()
    assert told() == [(0, "NOHUGEPAGE")]


@COUNTED
def test_what_is_trimmed_stays_as_it_was() -> None:
    """And of a large page only what is in use is held from then on."""
    pieces = Pieces(40, LARGE_PAGE // 16, large=True)
    pieces.use([0, 1, 5, 20])
    for piece in (0, 1, 5, 20):
        pieces.data[piece] = piece + 1
    pieces.trim()
    assert bytes_held(pieces.data) == 4 * LARGE_PAGE // 16
    assert all((pieces.data[piece] == piece + 1).all() for piece in (0, 1, 5, 20))
    assert not pieces.data[[2, 3, 4, 6, 19, 21, 39]].any()


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
    pieces.give_back(first)  # since when none has been out of use
    assert bytes_held(pieces.data) == 3 * 8192
    pieces.give_back(pieces.oldest)
    assert bytes_held(pieces.data) == 2 * 8192
    pieces.give_back()
    assert bytes_held(pieces.data) == 8192 and pieces.oldest == np.inf


@COUNTED
def test_large_pages_go_whole_once_all_in_them_has_rested() -> None:
    pieces = Pieces(32, LARGE_PAGE // 16, large=True)
    pieces.use(list(range(32)))
    pieces.data[:] = 1
    pieces.empty(list(range(8)))
    first = pieces.oldest
    pieces.empty(list(range(8, 16)))
    pieces.give_back(first)
    pieces.trim()
    assert bytes_held(pieces.data) == 2 * LARGE_PAGE
    pieces.give_back()
    assert bytes_held(pieces.data) == LARGE_PAGE
