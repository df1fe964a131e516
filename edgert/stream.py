"""A reply while it is made: an iterator for threads and for event loops."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from queue import Empty
from types import TracebackType
from typing import ClassVar, Never, Self
from weakref import WeakKeyDictionary, ref

from edgert.generation import Generation
from edgert.reply import Chunk, Progress, Reply

_PATIENCE = 0.2 if sys.platform == "win32" else None  # seconds; a wait without an end hears no Ctrl+C there


class Stream:
    """The pieces of one reply, by `for` or `async for`; the last one carries finish_reason and stats.

    `cancel()` may be called from any thread: within one step a last piece with finish_reason "cancelled"
    comes. Leaving the loop early and dropping or closing the stream ends the request as well.
    """

    def __init__(
        self, task: Generation, on_progress: Callable[[Progress], object] | None = None, owner: object = None
    ) -> None:
        self._task = task
        self._on_progress = on_progress
        self._owner = owner  # a model that nobody else holds must not close while its reply is read
        self._chunks: list[Chunk] = []
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self._task.sampler.seed

    def cancel(self) -> None:
        """Ends the request; what was generated so far stays readable."""
        self._task.cancelled = True

    def close(self) -> None:
        """Ends the request and the iteration."""
        self.cancel()
        self._ended = True

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    def reply(self) -> Reply:
        """Reads what is left and puts the whole reply together."""
        self._task.whole = True
        for _ in self:
            pass
        return self._reply()

    def __await__(self) -> Generator[object, None, Reply]:
        async def whole() -> Reply:
            self._task.whole = True
            async for _ in self:
                pass
            return self._reply()

        return whole().__await__()

    def _reply(self) -> Reply:
        last = self._chunks[-1] if self._chunks else None
        if last is None or last.finish_reason is None or last.stats is None:
            raise ValueError("the stream was closed before its reply ended")
        return Reply(
            "".join(chunk.text for chunk in self._chunks),
            [token for chunk in self._chunks for token in chunk.tokens],
            last.finish_reason,
            last.stats,
            self.seed,
            [score for chunk in self._chunks for score in chunk.logprobs],
        )

    def _take(self, item: object) -> Chunk | None:
        """What the loop's user gets of an item of the queue."""
        if isinstance(item, Chunk):
            self._ended = self._ended or item.finish_reason is not None
            self._chunks.append(item)
        self._ended = self._ended or isinstance(item, BaseException)
        if self._ended:
            self._owner = None
            self._task.output.put(None)  # wakes the next thread that reads this stream too
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, Progress) and self._on_progress:
            self._on_progress(item)
        return item if isinstance(item, Chunk) else None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            while not self._ended:
                try:
                    item = self._task.output.get(timeout=_PATIENCE)
                except Empty:
                    continue
                if chunk := self._take(item):
                    return chunk
        except BaseException:  # Ctrl+C, or an error of `on_progress`: nobody waits any more
            self.cancel()
            raise
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._event = loop, asyncio.Event()
            self._task.wake = partial(_Waker.of(loop).wake, self._event)
        while not self._ended:
            self._event.clear()
            try:
                item = self._task.output.get_nowait()
            except Empty:
                try:
                    await self._event.wait()
                except asyncio.CancelledError:
                    self.cancel()
                    raise
                continue
            if chunk := self._take(item):
                return chunk
        raise StopAsyncIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.cancel()

    def __reduce__(self) -> Never:
        raise TypeError("A stream cannot be copied or pickled: pass on its reply.")


class _Waker:
    """Sets events of an event loop from other threads; those of one step wake the loop once.

    Waking it is a write to a pipe, in which the loop's thread may take the interpreter from the one that calls.
    """

    _known: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, _Waker]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._events: deque[asyncio.Event] = deque()
        self._called = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Waker:
        """The one of a loop; to be called by the loop's thread."""
        found = cls._known.get(loop)
        if found is None:
            found = cls._known[loop] = cls(loop)
        return found

    def wake(self, event: asyncio.Event) -> Callable[[], None]:
        """Takes in an event; what it returns has all of these set soon."""
        self._events.append(event)
        return self._ring

    def _ring(self) -> None:
        """Raises: RuntimeError when the loop has been closed."""
        if not self._called:
            loop = self._loop()
            if loop is None or loop.is_closed():
                raise RuntimeError("the event loop is closed")
            self._called = True
            loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        self._called = False  # first, so that an event that comes meanwhile calls again
        while self._events:
            self._events.popleft().set()
