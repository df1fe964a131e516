"""Whether something fits into memory, what is missing if not, and the nearest remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

STEP = 16  # positions


def largest(needed: Callable[[int], int], available: int, most: int) -> int:
    """The largest context, a multiple of STEP up to `most`, whose bytes are available; 0: not even one."""
    if needed(most) <= available:
        return most
    low, high = 0, most // STEP
    while low < high:
        middle = (low + high + 1) // 2
        if needed(middle * STEP) <= available:
            low = middle
        else:
            high = middle - 1
    return low * STEP


def remedy(
    needed: Callable[[int], int],
    smaller_cache: Mapping[str, Callable[[int], int]],
    n_ctx: int,
    available: int,
    least: int = 64,
) -> str:
    """What would make it fit.

    needed:         bytes for a context
    smaller_cache:  the same with other types of cache, by name, the mildest first
    least:          a context below which none is worth having
    """
    parts = []
    for name, other in smaller_cache.items():
        if other(n_ctx) <= available:
            parts.append(f"it fits with -ctk {name} -ctv {name}")
            break
    fits = largest(needed, available, n_ctx)
    if fits >= least:
        parts.append(f"at most -c {fits} fits" + (" otherwise" if parts else ""))
    return "; ".join(parts) or "a smaller model, or one of fewer bits, may fit"


def missing(needed: int, available: int) -> str:
    """`needs 900 MiB, and 800 MiB are available: 100 MiB are missing`."""
    short = -(-(needed - available) // (1 << 20))
    return f"needs {-(-needed >> 20)} MiB, and {available >> 20} MiB are available: {short} MiB are missing"
