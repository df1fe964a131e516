"""How the quantizer tells what it is doing."""

from __future__ import annotations

from collections.abc import Callable

# Called with the stage, the tensor or text in work, and how much of the stage's total is done.
OnProgress = Callable[[str, str, float, float], object]


def silent(stage: str, name: str, done: float, total: float) -> None:
    """For those who do not want to know."""
