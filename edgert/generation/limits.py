"""What an engine is told at its start: how many requests at once, how many may wait, what the prefix cache may keep."""

from __future__ import annotations

from dataclasses import dataclass

from edgert.errors import RequestError
from edgert.options import integer, real

PREFIX_CACHES = ("shared", "user", "off")
STALL = 3.0
PATIENCE = 1.0  # seconds
PARALLEL = 4  # requests computed at once, unless told otherwise
MOST_PARALLEL = 1024


@dataclass(frozen=True)
class Limits:
    """Bounds of one engine, checked.

    n_parallel:    requests computed at once; None: as many as the backend has sequences
    n_queue:       requests that may wait besides; None: any number
    window:        seconds in which an idle engine gathers requests before the first step
    stall, comfort:  while a prompt is read, replies that run wait for a token at most so many times as long as usual,
                   or so many seconds, if that is longer; comfort None: 0.01 where the backend can be
                   interrupted within a step, else 0.04
    patience:      seconds after which a user of whom nothing runs takes a place from one who has several
    prefix_cache:  whose cached beginnings a prompt may use: "shared": anybody's; "user": those of the same user, so
                   that nobody learns from his times what others asked; "off": none
    prefix_quota:  cached tokens that a user keeps whatever others do; None: a quarter of the cache. Room that nobody
                   is entitled to is used by all, and taken back first from whoever exceeds his quota most.

    Raises: RequestError naming the field.
    """

    n_parallel: int | None = None
    n_queue: int | None = None
    window: float = 0.0
    stall: float = STALL
    comfort: float | None = None
    patience: float = PATIENCE
    prefix_cache: str = "shared"
    prefix_quota: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("n_parallel", 1, MOST_PARALLEL),
            ("n_queue", 0, 2**31 - 1),
            ("prefix_quota", 0, 2**31 - 1),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, integer(name, value, low, high))
        for name, least, most in (
            ("window", 0.0, 10.0),
            ("stall", 1.0, 1e6),
            ("patience", 0.0, 1e9),
        ):
            object.__setattr__(self, name, real(name, getattr(self, name), least, most))
        if self.comfort is not None:
            object.__setattr__(self, "comfort", real("comfort", self.comfort, 0.0, 10.0))
        if self.prefix_cache not in PREFIX_CACHES:
            raise RequestError.wrong("prefix_cache", f"one of {', '.join(PREFIX_CACHES)}", self.prefix_cache)
