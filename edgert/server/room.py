"""Who waits for memory that models in use have, in the order in which they came."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from edgert.server.errors import BusyError

if TYPE_CHECKING:
    from edgert.server.registry import Place

TURN = 5.0  # seconds that the first in the line waits before a model gets no new requests for its sake


class _Ticket:
    """One who waits; `drained` is the model that gets no new requests until it has had its turn."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.drained: Place | None = None


class Line:
    """Those who wait for a model to become idle: the first of them has it put away.

    seconds:  how long anyone waits
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._tickets: list[_Ticket] = []

    def wake(self) -> None:
        """Says that something may have become idle, or memory free."""
        for ticket in self._tickets:
            ticket.changed.set()

    def drains(self, place: Place) -> bool:
        """Whether new requests for a model have to wait, so that it comes to an end."""
        return any(ticket.drained is place for ticket in self._tickets)

    async def turn(self, attempt: Callable[[], Awaitable[bool]], busy: Callable[[], Place | None]) -> None:
        """Waits for one's turn and until `attempt` says that there is room.

        attempt:  makes room if it can now; may raise where waiting is of no use
        busy:     the model that will be idle first; None: none is in memory yet

        Raises: BusyError after so many seconds; what `attempt` raises.
        """
        ticket, end = _Ticket(), time.monotonic() + self._seconds
        due: float | None = None  # when a model has to give way: being woken does not put it off
        self._tickets.append(ticket)
        try:
            while True:
                ticket.changed.clear()
                first = self._tickets[0] is ticket
                if first and await attempt():
                    return
                now = time.monotonic()
                if now >= end:
                    raise BusyError(f"No model became idle in {self._seconds:.0f} seconds: try again.", retry_after=5)
                if first and (due is None or now >= due):
                    if due is not None:
                        ticket.drained = ticket.drained or busy()
                    due = now + TURN
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ticket.changed.wait(), min(end, due or end) - now)
        finally:
            self._tickets.remove(ticket)
            self.wake()

    async def passed(self, place: Place) -> None:
        """Waits as long as a model gets no new requests. Raises: BusyError after so many seconds."""
        if self.drains(place):
            await self.turn(self._nothing, lambda: place)

    async def _nothing(self) -> bool:
        return True
