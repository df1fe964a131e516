"""The models that a server has: loaded when asked for, put away when idle, exchanged while they answer."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgert.ending import Stop
from edgert.errors import DoesNotFitError, EdgertError, RequestError
from edgert.server.errors import ApiError, EndsError
from edgert.server.room import Line
from edgert.server.threads import Threads

if TYPE_CHECKING:
    from edgert.model import Model

logger = logging.getLogger(__name__)

FOREVER = float("inf")
LAST_SECONDS = 1.0  # in which loads that were told to end, and models that are closed, come to their end
SELF_CHECK = "The quick brown fox jumps over the lazy dog."
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Spec:
    """A model that may be served.

    name:        what requests call it, besides `aliases`
    source:      what `edgert.load` takes
    options:     and with which arguments
    keep_alive:  seconds that it stays loaded after its last request
    keys:        what a file calls those arguments, for who reads an error
    """

    name: str
    source: str | Path
    options: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    keep_alive: float = FOREVER
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Loaded:
    """A model in memory and how many requests use it."""

    model: Model
    source: str | Path
    users: int = 0
    retired: bool = False  # another has taken its place: closed when nobody uses it

    constrainer: Any = None  # what compiles grammars for its vocabulary, made on first use


State = Literal["unloaded", "loading", "loaded", "failed"]


class Place:
    """What is known about one name."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.loaded: Loaded | None = None
        self.state: State = "unloaded"
        self.error = ""
        self.lock = asyncio.Lock()  # one load or exchange at a time
        self.loading: asyncio.Task[None] | None = None  # goes on when those who asked for it have left
        self.wanted = 0  # requests that are about to use it
        self.last_use = time.monotonic()
        self.keep_alive = spec.keep_alive
        self.created = int(time.time())

    @property
    def expires(self) -> float:
        """When it may be put away, on the monotonic clock."""
        return self.last_use + self.keep_alive


class Registry:
    """Models by name.

    specs:     the first is what requests that name none get
    load:      (source, **options) -> Model; called in a thread
    most:      models in memory at once; 0: as many as fit
    patience:  seconds that a request waits for a model in use to make room for its own
    """

    def __init__(
        self, specs: Sequence[Spec], load: Callable[..., Model], most: int = 0, patience: float = FOREVER
    ) -> None:
        self.places = {spec.name: Place(spec) for spec in specs}
        self._aliases = {alias: spec.name for spec in specs for alias in spec.aliases}
        self._default = specs[0].name
        self._load, self._most = load, most
        self._held = 0  # models in memory, those included that are being loaded or closed
        self._line = Line(patience)
        self._closing: set[asyncio.Task[None]] = set()
        self._freed = False  # memory of a model, since the last sweep
        self._threads = Threads()
        self._stop = Stop()  # of all loads
        self._ending = False
        self._waiting: set[asyncio.Task[Any]] = set()  # for a model, and told when the server ends

    @property
    def default(self) -> Place:
        """The model of requests that name none."""
        return self.places[self._default]

    def find(self, name: str | None) -> Place:
        """The place of a name. Raises: ApiError 404 that lists the names."""
        if not name:
            return self.default
        found = self._aliases.get(name, name)
        if found not in self.places:
            found = name.removesuffix(":latest")  # as Ollama's clients say
        if found not in self.places:
            raise ApiError(
                404,
                f"There is no model {name[:100]!r} here: choose {', '.join(sorted(self.places)[:20])}.",
                param="model",
                code="model_not_found",
            )
        return self.places[found]

    @asynccontextmanager
    async def use(self, name: str | None, keep_alive: object = None) -> AsyncIterator[Loaded]:
        """A model for one request, loaded if need be; it stays in memory at least until the block ends.

        keep_alive:  how long after it, as `duration` takes it; None: as the model's spec says

        Raises: ApiError 404; BusyError when no other makes room for it in time, or the server ends; EdgertError when
        it cannot be loaded.
        """
        place = self.find(name)
        seconds = place.spec.keep_alive if keep_alive is None else duration(keep_alive)
        with self._until_the_end(wait=not self.ready(name)):
            await self._line.passed(place)
            place.wanted += 1
            try:
                loaded = await self._get(place)
                loaded.users += 1
            finally:
                place.wanted -= 1
        try:
            yield loaded
        finally:
            loaded.users -= 1
            place.last_use, place.keep_alive = time.monotonic(), seconds
            if loaded.retired or seconds == 0:
                self._put_away(place, loaded)
            self._line.wake()

    def ready(self, name: str | None) -> bool:
        """Whether a request for a model has nothing to wait for."""
        place = self.find(name)
        return place.loaded is not None and not self._line.drains(place)

    @contextmanager
    def _until_the_end(self, wait: bool) -> Iterator[None]:
        """A block that may have to wait for a model. Raises: EndsError where it waits and the server ends."""
        if self._ending and wait:
            raise EndsError()
        task = asyncio.current_task()
        assert task
        self._waiting.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._ending and task not in self._waiting and not task.uncancel():
                raise EndsError() from None
            raise
        finally:
            self._waiting.discard(task)

    def end(self) -> None:
        """Ends what loads or waits for a model: who asked for it is told that the server ends, now and from now on."""
        self._ending = True
        self._stop.tell()
        loading = [place.loading for place in self.places.values() if place.loading]
        told, self._waiting = self._waiting, set()
        for task in (*told, *loading):
            task.cancel()

    async def _get(self, place: Place) -> Loaded:
        while not place.loaded:
            async with place.lock:
                if place.loaded:
                    break
                if place.loading is None:
                    await self._make_room()
                    self._held += 1
                    place.loading = asyncio.ensure_future(self._load_into(place))
                    place.loading.add_done_callback(_seen)  # whoever waits for it is told
                await asyncio.shield(place.loading)
        return place.loaded

    async def _load_into(self, place: Place) -> None:
        place.state, place.error = "loading", ""
        try:
            place.loaded = Loaded(await self._open(place, place.spec.source), place.spec.source)
            place.state, place.last_use = "loaded", time.monotonic()
        except BaseException as error:
            self._held -= 1
            place.state, place.error = "unloaded" if self._ending else "failed", str(error)
            raise
        finally:
            place.loading = None
            self._line.wake()

    async def _open(self, place: Place, source: str | Path) -> Model:
        """The model, after others have been put away as far as it does not fit beside them."""
        while True:
            try:
                return await self._load_from(place, source)
            except DoesNotFitError as error:
                failure = error
            except RequestError as error:  # no request's fault
                raise EdgertError(f"{place.spec.keys.get(error.field, error.field)} {error.reason}.") from error

            async def attempt(failure: DoesNotFitError = failure) -> bool:
                if self._held <= 1:  # alone, it does not fit either
                    raise failure
                return await self._evict()

            await self._line.turn(attempt, self._busy)

    async def _load_from(self, place: Place, source: str | Path) -> Model:
        load = partial(self._stop.over, self._load, source, **place.spec.options)
        return await self._threads.run(load, unwanted=lambda model: model.close())

    async def _make_room(self) -> None:
        """Waits until one more model may be in memory. Raises: BusyError."""

        async def attempt() -> bool:
            return self._held < self._most or (await self._evict() and self._held < self._most)

        if self._most:
            await self._line.turn(attempt, self._busy)

    def _idle(self) -> list[Place]:
        return [p for p in self.places.values() if p.loaded and not p.loaded.users and not p.wanted]

    def _busy(self) -> Place | None:
        """The model that will be idle first, as far as can be told: the one with the fewest requests."""
        loaded = [(place.loaded.users, place.last_use, place) for place in self.places.values() if place.loaded]
        return min(loaded, key=lambda entry: entry[:2])[2] if loaded else None

    async def _evict(self) -> bool:
        """Puts away the model that has been idle for longest; false where none is idle."""
        idle = self._idle()
        if not idle:
            return False
        oldest = min(idle, key=lambda place: place.last_use)
        logger.info("putting away %s to make room", oldest.spec.name)
        await self._close(self._take(oldest))
        return True

    def _take(self, place: Place) -> Loaded:
        assert place.loaded
        loaded, place.loaded, place.state = place.loaded, None, "unloaded"
        loaded.retired = True
        return loaded

    def _put_away(self, place: Place, loaded: Loaded) -> None:
        """Closes a model that nobody uses any more, in the background."""
        if loaded.users:
            return
        if place.loaded is loaded:
            self._take(place)
        self._in_background(self._close(loaded))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, loaded: Loaded) -> None:
        try:
            await self._threads.run(loaded.model.close)
        finally:
            self._held -= 1
            self._freed = True
            self._line.wake()

    def sweep(self) -> None:
        """Puts away what has been idle for longer than its keep_alive; what went before is the system's again."""
        if self._freed:
            self._freed = False
            self._in_background(asyncio.to_thread(give_back))
        now = time.monotonic()
        for place in self._idle():
            if place.loaded and now >= place.expires:
                logger.info("putting away %s: idle for %.0f s", place.spec.name, now - place.last_use)
                self._put_away(place, place.loaded)

    async def swap(self, name: str, source: str | Path | None = None) -> None:
        """Loads a model's file anew, or another file, and lets it take the name if it passes a self-check.

        Requests that run end on the old one, beside which the new one is in memory until then.

        Raises: EdgertError when the new one fails: the old one stays; BusyError when no other makes room for the first,
        or the server ends.
        """
        place = self.find(name)
        with self._until_the_end(wait=True):
            async with place.lock:
                if place.loading:  # for somebody who has left, else the lock would be his
                    await asyncio.wait({place.loading})
                await self._exchange(place, source or place.spec.source)

    async def _exchange(self, place: Place, source: str | Path) -> None:
        new = await self._checked(place, source)
        old, place.loaded = place.loaded, Loaded(new, source)
        place.state, place.error, place.last_use = "loaded", "", time.monotonic()
        logger.info("%s now comes from %s", place.spec.name, Path(source).name)
        if old:
            old.retired = True
            self._put_away(place, old)

    async def _checked(self, place: Place, source: str | Path) -> Model:
        """Another model for a place, held and found sound. Raises: as `swap`."""
        if not place.loaded:
            await self._make_room()
        self._held += 1
        try:
            if place.loaded:
                new = await self._load_from(place, source)
            else:
                new = await self._open(place, source)
            try:
                await self._threads.run(partial(self_check, new))
            except BaseException:
                closing = asyncio.ensure_future(self._threads.run(new.close))
                if not self._ending:
                    await closing
                raise
            return new
        except BaseException:
            self._held -= 1
            self._line.wake()
            raise

    async def close(self) -> None:
        """Closes all models; requests that still run end with an error.

        What has not ended after LAST_SECONDS is left to the end of the process.
        """
        self.end()
        for place in self.places.values():
            if place.loaded:
                self._in_background(self._close(self._take(place)))
        await asyncio.sleep(0)  # in which those threads begin
        await self._threads.settle(LAST_SECONDS)


def _seen(task: asyncio.Task[None]) -> None:
    """Takes note of how a task has ended, which asyncio would else complain of."""
    if not task.cancelled():
        task.exception()


def give_back() -> None:
    """Gives the system what this process has freed.

    glibc keeps it for the threads that have loaded models, each of them another one: with every exchange of a file the
    process would hold more that it does not use.
    """
    gc.collect()  # a model that ended with an error hangs on the error
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def self_check(model: Model) -> None:
    """Whether a model reads and writes: finite logits that are not all alike, the same greedy tokens twice.

    Raises: EdgertError that says what is wrong.
    """
    import numpy as np

    ids = model.tokenize(SELF_CHECK)[: max(1, model.n_ctx // 2)]
    if not ids:
        raise EdgertError("Its tokenizer gives no tokens for a text.")
    logits = model.logits(ids)
    if not np.isfinite(logits).all():
        raise EdgertError("Its output is not finite: the file's weights are damaged.")
    if float(np.ptp(logits, axis=1).max()) < 1e-3:
        raise EdgertError("Its output is the same for every token: the file's weights are damaged.")
    first, second = (model.generate(ids, temperature=0.0, max_tokens=8, ignore_eos=True).tokens for _ in range(2))
    if first != second or not first:
        raise EdgertError("It answers the same prompt differently each time.")


def duration(value: object) -> float:
    """Seconds of a number, or of a text such as "5m" or "1h30m"; negative: without end. Raises: RequestError."""
    import re

    if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
        return FOREVER if value < 0 else float(value)
    if isinstance(value, str):
        text = value.strip()
        sign, text = text.startswith("-"), text.removeprefix("-")
        parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text)
        if parts and "".join(a + b for a, b in parts) == text:
            return FOREVER if sign else sum(float(number) * _UNITS[unit] for number, unit in parts)
        with suppress(ValueError):
            if not math.isnan(seconds := float(text)):
                return FOREVER if sign else seconds
    raise RequestError.wrong("keep_alive", 'seconds, or a text such as "5m"', value)
