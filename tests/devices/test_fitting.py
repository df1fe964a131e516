"""What fits into memory, and what is said when it does not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgert.devices import fitting


@given(st.integers(0, 10**6), st.integers(1, 10**4), st.integers(0, 10**8), st.integers(16, 10**5))
def test_the_largest_is_the_largest(fixed: int, each: int, available: int, most: int) -> None:
    def needed(n: int) -> int:
        return fixed + each * n

    found = fitting.largest(needed, available, most)
    assert 0 <= found <= most
    assert found == 0 or needed(found) <= available
    if found < most:
        assert needed(min(most, found + fitting.STEP)) > available
        assert found % fitting.STEP == 0


def test_the_nearest_remedy() -> None:
    def f16(n: int) -> int:
        return 1000 + 16 * n

    def q8(n: int) -> int:
        return 1000 + 8 * n

    def q4(n: int) -> int:
        return 1000 + 4 * n

    smaller = {"q8_0": q8, "q4_0": q4}
    assert fitting.remedy(f16, smaller, 1000, 9000) == "it fits with -ctk q8_0 -ctv q8_0; at most -c 496 fits otherwise"
    assert fitting.remedy(f16, smaller, 1000, 5000).startswith("it fits with -ctk q4_0 -ctv q4_0; at most -c 240")
    assert fitting.remedy(f16, smaller, 1000, 3000) == "at most -c 112 fits"
    assert fitting.remedy(f16, {}, 1000, 1100) == "a smaller model, or one of fewer bits, may fit"


def test_what_is_missing_is_never_less_than_is_missing() -> None:
    text = fitting.missing((900 << 20) + 1, 800 << 20)
    assert text == "needs 901 MiB, and 800 MiB are available: 101 MiB are missing"
