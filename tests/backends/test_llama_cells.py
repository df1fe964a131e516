"""Shared cells count once: any history against cells that have names of their own."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from edgert.backends.llama.cells import Cells

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "grow", "fork", "cut"]), st.integers(0, 3), st.integers(0, 3), st.integers(0, 20)
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(STEPS)
def test_cells_in_use(steps: list[tuple[str, int, int, int]]) -> None:
    cells, expected, names = Cells(4), [[] for _ in range(4)], itertools.count()
    for kind, one, other, n in steps:
        if kind == "grow":
            expected[one] += [next(names) for _ in range(n)]
            cells.resize(one, len(expected[one]))
        elif kind == "cut":
            del expected[one][n:]
            cells.resize(one, len(expected[one]))
        elif one != other and not expected[other]:
            expected[other] = expected[one][:n]
            cells.fork(one, other, min(n, len(expected[one])))
        assert cells.used == len(set(itertools.chain.from_iterable(expected)))
