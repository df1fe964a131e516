"""Threads for what may take long: a server that ends does not wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextvars import copy_context
from typing import TypeVar
from weakref import WeakSet

from edgert import ending

LOOK_SECONDS = 0.01

Result = TypeVar("Result")


class Threads:
    """Runs calls in threads of their own. `asyncio.to_thread` is for what is short: Python waits for its threads."""

    def __init__(self) -> None:
        self._all: WeakSet[threading.Thread] = WeakSet()

    async def run(self, call: Callable[[], Result], unwanted: Callable[[Result], object] | None = None) -> Result:
        """What a call returns. Raises: what it raises.

        unwanted:  gets, in the call's thread, what it returns when nobody waits for it any more
        """
        future: Future[Result] = Future()
        context = copy_context()

        def work() -> None:
            try:
                result = context.run(call)
            except BaseException as error:
                with contextlib.suppress(InvalidStateError):  # nobody waits
                    future.set_exception(error)
                return
            try:
                future.set_result(result)
            except InvalidStateError:
                if unwanted:
                    unwanted(result)

        self._all.add(ending.begin(work, "edgert-server"))
        return await asyncio.wrap_future(future)

    async def settle(self, seconds: float) -> None:
        """Waits until all calls have ended, but not longer than so many seconds."""
        end = time.monotonic() + seconds
        while any(thread.is_alive() for thread in self._all) and time.monotonic() < end:
            await asyncio.sleep(LOOK_SECONDS)
