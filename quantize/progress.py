"""How the quantizer tells what it is doing."""

from __future__ import annotations

from collections.abc import Callable

# Called with the stage, the tensor or text in work, and how much of the stage's total is done.
OnProgress = Callable[[str, str, float, float], object]

# The stage that comes first: nothing is done yet, and the total is the seconds that all may take.
EXPECTED = "expected"


def silent(stage: str, name: str, done: float, total: float) -> None:
    """For those who do not want to know."""
