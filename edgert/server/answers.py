"""The answers to one request while they are made, side by side."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from edgert.constraint import Grammar
from edgert.errors import DoesNotFitError
from edgert.options import Bias
from edgert.reply import Chunk, Progress, Reply, Stats
from edgert.server.errors import ApiError
from edgert.server.sse import in_thread

if TYPE_CHECKING:
    from edgert.model import Model
    from edgert.server.service import Service
    from edgert.stream import Stream

SEEDS = 1 << 64


class Answers:
    """One or more answers to each of some prompts, all queued at once; the engine lets the further answers to a
    prompt share the cache of the first.

    prompts:   token ids
    n:         answers to each
    params:    fields of SamplingParams and Options
    user:      whose they are
    key:       what the replies are kept under; None: they are not kept

    Raises: RequestError naming the field; ContextFullError.
    """

    def __init__(
        self,
        service: Service,
        model: Model,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: Mapping[str, Any],
        user: str = "",
        key: bytes | None = None,
    ) -> None:
        settings = service.settings
        self._key = key
        self._error: ApiError | None = None  # what has ended them from outside
        limits = {"timeout": settings.timeout or None, "queue_timeout": settings.queue_timeout or None}
        self._service, self._n = service, n
        self._began = time.monotonic()
        self._progress: asyncio.Queue[tuple[int, Chunk | Progress | BaseException]] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._read: dict[int, tuple[Progress, float]] = {}  # how far prompts have been read, and when that was told
        self._made: Counter[int] = Counter()  # tokens that have come
        self._first: dict[int, int] = {}  # and those of them that came at once
        self._streams: list[Stream] = []
        self.count = n * len(prompts)
        self.stats: dict[int, Stats] = {}
        given = {"max_tokens": settings.max_tokens} | limits | dict(params) | {"user": user}
        first = model.defaults.seed if params.get("seed") is None else params["seed"]
        try:
            for index in range(self.count):
                prompt, answer = divmod(index, n)
                if answer and first not in (None, -1):
                    given["seed"] = (first + answer) % SEEDS
                on_progress = partial(self._on_progress, index)
                self._streams.append(model.generate(prompts[prompt], True, on_progress=on_progress, **given))
                given["seed"] = params.get("seed")
        except DoesNotFitError as error:
            self.close()
            raise ApiError(400, str(error), param="max_tokens", code="context_length_exceeded") from None
        except BaseException:
            self.close()
            raise
        service.answers.add(self)

    def end(self, error: ApiError) -> None:
        """Ends what still runs, with an error for who waits."""
        self._error = error
        for stream in self._streams:
            stream.cancel()

    def _on_progress(self, index: int, progress: Progress) -> None:
        self._read[index] = progress, time.perf_counter()
        if self._progress is not None:
            self._progress.put_nowait((index, progress))

    def close(self) -> None:
        """Ends what still runs."""
        for stream in self._streams:
            stream.cancel()
        for task in self._tasks:
            task.cancel()

    async def pieces(self, progress: bool = False) -> AsyncGenerator[tuple[int, Chunk | Progress], None]:
        """The pieces of all answers as they come, each with its answer's index.

        progress:  whether reports of how far the prompts have been read come as well

        Raises: what ended an answer.
        """
        try:
            if self.count == 1 and not progress:
                async for chunk in self._timed(0):
                    yield 0, chunk
                return
            queue: asyncio.Queue[tuple[int, Chunk | Progress | BaseException]] = asyncio.Queue()
            self._progress = queue if progress else None
            self._each(partial(self._copy, queue))
            left = self.count
            while left:
                index, item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                left -= isinstance(item, Chunk) and item.finish_reason is not None
                yield index, item
        finally:
            self.close()

    async def replies(self) -> list[Reply]:
        """All answers, whole. Raises: what ended one of them."""
        replies: asyncio.Queue[tuple[int, Reply | BaseException]] = asyncio.Queue()
        found: dict[int, Reply] = {}
        try:
            self._each(partial(self._whole, replies))
            while len(found) < self.count:
                index, reply = await replies.get()
                if isinstance(reply, BaseException):
                    raise reply
                found[index] = reply
            replies_ = [found[index] for index in sorted(found)]
            self._service.results.put(self._key, replies_)
            return replies_
        finally:
            self.close()

    def _each(self, work: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Does `work` for every answer, side by side."""
        self._tasks += [asyncio.ensure_future(work(index)) for index in range(self.count)]

    async def _copy(self, queue: asyncio.Queue[tuple[int, Chunk | Progress | BaseException]], index: int) -> None:
        try:
            async for chunk in self._timed(index):
                queue.put_nowait((index, chunk))
        except Exception as error:
            queue.put_nowait((index, error))

    async def _whole(self, replies: asyncio.Queue[tuple[int, Reply | BaseException]], index: int) -> None:
        try:
            reply = await self._streams[index]
            metrics, stats = self._service.metrics, reply.stats
            self._end(index, reply.finish_reason, stats)
            metrics.first_token.observe(max(0.0, time.monotonic() - self._began - stats.predicted_ms / 1e3))
            if stats.timed_n:
                metrics.between_tokens.observe(1 / stats.predicted_per_second)
            replies.put_nowait((index, reply))
        except Exception as error:
            replies.put_nowait((index, error))

    async def _timed(self, index: int) -> AsyncGenerator[Chunk, None]:
        """One answer's pieces, measured."""
        metrics, last, first = self._service.metrics, self._began, True
        async for chunk in self._streams[index]:
            now = time.monotonic()
            self._made[index] += len(chunk.tokens)
            self._first.setdefault(index, len(chunk.tokens))
            if chunk.finish_reason is not None:
                self._end(index, chunk.finish_reason, chunk.stats)
            if first or chunk.text:
                (metrics.first_token if first else metrics.between_tokens).observe(now - last)
                last, first = now, False
            yield chunk

    def _end(self, index: int, reason: str, stats: Stats | None) -> None:
        assert stats
        self.stats[index] = stats
        self._service.metrics.count(stats, reason)
        if self._error and reason == "cancelled":
            raise self._error
        if reason == "timeout":
            raise ApiError(504, "The answer took too long.", kind="server_error", code="timeout")

    def so_far(self, index: int) -> Stats | None:
        """The counts and times of an answer that is not whole yet; None before its prompt has been read."""
        if index not in self._read:
            return None
        progress, told = self._read[index]
        seconds, read, made = time.perf_counter() - told, progress.processed - progress.cache, self._made[index]
        return Stats.of(progress.cache, read, progress.time_ms / 1e3, made, seconds, first_n=self._first.get(index, 1))

    def usage(self) -> dict[str, Any]:
        """OpenAI's counts; each prompt counts once, whatever number of answers it has."""
        firsts = [stats for index, stats in self.stats.items() if index % self._n == 0]
        prompt = sum(stats.cache_n + stats.prompt_n for stats in firsts)
        predicted = sum(stats.predicted_n for stats in self.stats.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": predicted,
            "total_tokens": prompt + predicted,
            "prompt_tokens_details": {"cached_tokens": sum(stats.cache_n for stats in firsts)},
        }


class Kept(Answers):
    """Answers that were given before."""

    def __init__(self, replies: Sequence[Reply], n: int) -> None:
        self._replies, self._n = replies, n
        self.count = len(replies)
        self.stats = {index: reply.stats for index, reply in enumerate(replies)}

    def close(self) -> None:
        pass

    def so_far(self, index: int) -> Stats | None:
        return self.stats[index]

    async def pieces(self, progress: bool = False) -> AsyncGenerator[tuple[int, Chunk | Progress], None]:
        for index, reply in enumerate(self._replies):
            yield index, Chunk(reply.text, reply.tokens, reply.finish_reason, reply.stats, reply.logprobs)

    async def replies(self) -> list[Reply]:
        return list(self._replies)


def answers_to(
    service: Service, model: Model, prompts: Sequence[Sequence[int]], n: int, params: Mapping[str, Any], user: str
) -> Answers:
    """The answers to a request: those kept of an equal one, or new ones. Raises: as Answers."""
    key = service.results.key(model, prompts, n, params, user)
    if (found := service.results.get(key)) is not None:
        return Kept(found, n)
    return Answers(service, model, prompts, n, params, user, key)


GRAMMARS = ("grammar", "json_schema", "regex", "response_format")


async def compiled(model: Model, params: Mapping[str, Any]) -> dict[str, Any]:
    """The same fields with what takes its time made ready, which is not done in the event loop: the grammar among
    them is read and compiled, and the bias checked.

    Raises: RequestError for a grammar that cannot be enforced, or a bias that is none.
    """
    asked = {name: params[name] for name in GRAMMARS if params.get(name) is not None}
    others = {name: value for name, value in params.items() if name not in GRAMMARS}
    if others.get("logit_bias") is not None:
        others["logit_bias"] = await asyncio.to_thread(Bias.of, others["logit_bias"])
    if not asked:
        return others
    return others | {"grammar": await in_thread(_compiled, model, asked)}


def _compiled(model: Model, asked: Mapping[str, Any]) -> Grammar | None:
    given = asked.get("grammar")
    grammar = given if isinstance(given, Grammar) else Grammar.of(**asked)
    if grammar:
        model.compile(grammar)
    return grammar


def timings(stats: Stats) -> dict[str, Any]:
    """Counts and times by llama-server's names."""
    drafts = {"draft_n": stats.draft_n, "draft_n_accepted": stats.draft_n_accepted} if stats.draft_n else {}
    return {
        "cache_n": stats.cache_n,
        "prompt_n": stats.prompt_n,
        "prompt_ms": stats.prompt_ms,
        "prompt_per_token_ms": stats.prompt_ms / max(1, stats.prompt_n),
        "prompt_per_second": stats.prompt_per_second,
        "predicted_n": stats.predicted_n,
        "predicted_ms": stats.predicted_ms,
        "predicted_per_token_ms": stats.predicted_ms / max(1, stats.predicted_n),
        "predicted_per_second": stats.predicted_per_second,
    } | drafts
