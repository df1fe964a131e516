"""A loaded model: text or messages in, text out."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, Self, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Backend, Verdict
from edgert.constraint import Constrainer, Constraint, Grammar
from edgert.errors import BackendUnavailableError, EdgertError, QueueFullError, RequestError
from edgert.generation import Engine, Generation, Limits, Reading, Scoring, Snapshot, Task, Weighing
from edgert.options import Options, Params, SamplingParams, function, integer, named, string
from edgert.reply import Progress, Reply, TokenLogprob
from edgert.sampler import Sampler
from edgert.stream import Stream
from edgert.tokenizer.limit import at_most

if TYPE_CHECKING:
    from edgert.backends.cpu.sampling import SampleKernel
    from edgert.session import Session
    from edgert.speculation import Speculator
    from edgert.template import ChatTemplate
    from edgert.tokenizer import Tokenizer

Pooling = Literal["mean", "cls", "last", "none"]
Message = Mapping[str, Any]
OnProgress = Callable[[Progress], object]


class Model:
    """A model ready to answer; any number of threads may use it at once, their requests share the steps."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        defaults: SamplingParams | None = None,
        sample_kernel: SampleKernel | None = None,
        speculator: Speculator | None = None,
        limits: Limits | None = None,
        pooling: Pooling = "mean",
    ) -> None:
        self.backend = backend
        self.pooling = pooling
        self.tokenizer = tokenizer
        self.template = template
        self.defaults = defaults or SamplingParams()
        self._sample_kernel = sample_kernel
        self._constrainer = Constrainer(tokenizer, backend.n_vocab)
        self._engine = Engine(backend, speculator, limits)
        self._finalizer = weakref.finalize(self, self._engine.close)  # runs at exit of the program as well

    @property
    def verdict(self) -> Verdict:
        """Which backend runs the model, on what device, and why."""
        return self.backend.verdict

    @property
    def speculator(self) -> Speculator | None:
        """What guesses tokens ahead, if anything does."""
        return self._engine.speculator

    @property
    def engine(self) -> str:
        """The verdict in a line, and where guesses come from, if anything guesses."""
        guesses = f" · guesses from {self.speculator.name}" if self.speculator else ""
        return f"{self.verdict}{guesses}"

    @property
    def n_ctx(self) -> int:
        """Positions that one conversation may have."""
        return self.backend.n_ctx

    @property
    def n_vocab(self) -> int:
        """Size of the vocabulary."""
        return self.backend.n_vocab

    @property
    def limits(self) -> Limits:
        """How many requests run at once and may wait, and what the prefix cache keeps."""
        return self._engine.limits

    def snapshot(self) -> Snapshot:
        """What the engine does at this moment and has done; cheap, and any thread may ask."""
        return self._engine.snapshot()

    def close(self) -> None:
        """Gives back memory and threads; requests that run end with an error."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Never:
        raise TypeError("A model cannot be copied or pickled: load it in each process, and share it among threads.")

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        stream: Literal[False] = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
        **params: Unpack[Params],
    ) -> Reply: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        stream: Literal[True],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
        **params: Unpack[Params],
    ) -> Stream: ...

    def chat(
        self,
        messages: Sequence[Message],
        stream: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
        **params: Unpack[Params],
    ) -> Reply | Stream:
        """Answers a conversation, rendered with the model's own template.

        messages:     OpenAI's: [{"role": "user", "content": "Hi"}, ...]
        on_progress:  called by the thread that reads the reply while the prompt is computed
        params:       the fields of SamplingParams and Options

        Raises: RequestError naming the field; ContextFullError when the conversation is too long, DoesNotFitError when
        the cache could never hold it; QueueFullError, and later QueueTimeoutError from the reply.
        """
        extra = named("chat_template_kwargs", {} if chat_template_kwargs is None else chat_template_kwargs)
        if taken := {"self", "tokenizer", "messages", "tools"}.intersection(extra):
            raise RequestError("chat_template_kwargs", f"cannot set {min(taken)}")
        with at_most(self.n_ctx):
            ids = self.render(messages, tools=tools, **extra)
        reply = self._start(ids, on_progress, params)
        return reply if stream else reply.reply()

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        stream: Literal[False] = False,
        *,
        on_progress: OnProgress | None = None,
        **params: Unpack[Params],
    ) -> Reply: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        stream: Literal[True],
        *,
        on_progress: OnProgress | None = None,
        **params: Unpack[Params],
    ) -> Stream: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        stream: bool = False,
        *,
        on_progress: OnProgress | None = None,
        **params: Unpack[Params],
    ) -> Reply | Stream:
        """Continues a text or token ids as they are, without a template; arguments as in `chat`.

        Raises: RequestError naming the field; ContextFullError when the prompt is too long.
        """
        with at_most(self.n_ctx):
            ids = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        reply = self._start(ids, on_progress, params)
        return reply if stream else reply.reply()

    async def achat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
        **params: Unpack[Params],
    ) -> Reply:
        """As `chat`, for event loops; for pieces, `async for` over `chat(..., stream=True)`."""
        options: dict[str, Any] = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        return await self.chat(messages, True, on_progress=on_progress, **options, **params)

    async def agenerate(
        self, prompt: str | Sequence[int], *, on_progress: OnProgress | None = None, **params: Unpack[Params]
    ) -> Reply:
        """As `generate`, for event loops; for pieces, `async for` over `generate(..., stream=True)`."""
        return await self.generate(prompt, True, on_progress=on_progress, **params)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """The token ids that `chat` gives the model for a conversation.

        Raises: RequestError when the template refuses the messages.
        """
        if self.template is None:
            raise RequestError("messages", "the file has no chat template: use `generate`")
        return self.template.encode(self.tokenizer, messages, tools=tools, **template_kwargs)

    def save_session(
        self,
        path: str | os.PathLike[str],
        text: Sequence[Message] | Sequence[int],
        *,
        transcript: Mapping[str, Any] | None = None,
    ) -> int:
        """Writes what is cached of a conversation to a file, so that another run goes on without reading it again.

        text:        messages as `chat` takes them, or token ids
        transcript:  what `load_session` shall return besides; anything that JSON holds

        Returns: how many tokens are in the file. Raises: SessionError where nothing of the text is cached, or the
        backend cannot save; a file of the name stays as it was.
        """
        from edgert import session

        messages = bool(len(text)) and isinstance(text[0], Mapping)
        ids = self._ids(self.render(text) if messages else text)  # type: ignore[arg-type]
        n, facts, chunks = self._engine.save(ids)
        session.write(Path(path), ids[:n], transcript or {}, facts, chunks)
        return n

    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """Takes what `save_session` wrote into the cache; a prompt that begins with its tokens finds them there.

        Raises: SessionError for a file that is damaged, or of another model or type of cache: nothing has changed then.
        """
        from edgert import session

        found = session.read(Path(path))
        self.restore_session(found)
        return found

    def restore_session(self, session: Session) -> None:
        """The second half of `load_session`: takes what has been read from a file into the cache."""
        self._engine.restore(session.tokens, session.facts, session.data)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of a text.

        add_special:    put the begin token first, if the model wants one
        parse_special:  let names of control tokens in the text become these tokens

        Raises: RequestError for anything but a text.
        """
        return self.tokenizer.encode(string("text", text), add_special=add_special, parse_special=parse_special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens left out. Raises: RequestError for ids outside the vocabulary."""
        return self.tokenizer.decode(self._checked("ids", ids).tolist())

    def logits(self, prompt: str | Sequence[int]) -> NDArray[np.float32]:
        """float32 (n, n_vocab): what the model says after each of the n tokens.

        Raises: RequestError for no token, or ids outside the vocabulary; ContextFullError.
        """
        self._check_writes()
        with at_most(self.n_ctx):
            ids = self._checked("prompt", self.tokenize(prompt) if isinstance(prompt, str) else prompt)
        result = self._whole(Scoring(ids, self.backend.n_vocab))
        assert isinstance(result, np.ndarray)
        return result

    def prompt_logprobs(self, prompt: str | Sequence[int], top: int = 0, user: str = "") -> list[TokenLogprob]:
        """How likely each token of a text is after those before it, from the second on.

        top:  how many of the likeliest tokens in each place come with it

        Raises: RequestError for no token, or ids outside the vocabulary; ContextFullError.
        """
        with at_most(self.n_ctx):
            ids = self._checked("prompt", self.tokenize(prompt) if isinstance(prompt, str) else prompt)
        result = self._whole(Weighing(ids, integer("top", top, 0, self.n_vocab), user))
        assert isinstance(result, list)
        return result

    def _whole(self, task: Task) -> object:
        """What a task gives in the end. Raises: what has ended it."""
        self._engine.submit(task)
        try:
            result = task.output.get()
        except BaseException:  # Ctrl+C
            task.cancelled = True
            raise
        if isinstance(result, BaseException):
            raise result
        return result

    def embed(
        self,
        texts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        pooling: Pooling | None = None,
        *,
        normalize: bool = True,
        user: str = "",
    ) -> NDArray[np.float32]:
        """Where texts stand among others, by the model's last hidden states: float32 (n_embd,), of a list (n, n_embd).

        With the pooling "none" the states themselves: float32 (tokens, n_embd), as they are.

        texts:      a text, the ids of one, or a list of either; those of a list share steps
        pooling:    "mean" of all tokens' states, or that of the "last" or first ("cls") one, or "none"; None: what the
                    file says, else the mean
        normalize:  whether vectors have the length 1
        user:       who asks, as in Options: users get equal parts of the machine

        Raises: RequestError for no token, ids outside the vocabulary, or the states of several texts at once;
        ContextFullError; BackendUnavailableError where the backend does not show its hidden states.
        """
        if not isinstance(texts, str | Sequence | np.ndarray):
            raise RequestError.wrong("input", "a text, a list of texts or a list of ids", texts)
        several = not isinstance(texts, str) and len(texts) > 0 and isinstance(texts[0], str | Sequence | np.ndarray)
        if several and pooling == "none":
            raise RequestError("pooling", '"none" gives the states of one text: embed each by itself')
        given: Sequence[Any] = texts if several else [texts]
        found = self._read_texts([self._text_ids(text) for text in given], string("user", user))
        pooled = (self._pooled(states, pooling or self.pooling, normalize) for states in found)
        return np.stack(list(pooled)) if several else next(pooled)

    def _text_ids(self, text: str | Sequence[int]) -> NDArray[np.int32]:
        with at_most(self.n_ctx):
            ids = self._checked("input", self.tokenizer.encode_whole(text) if isinstance(text, str) else text)
        if not len(ids):
            raise RequestError("input", "is empty: give at least one token")
        return ids

    def _read_texts(self, texts: Sequence[NDArray[np.int32]], user: str) -> Iterator[NDArray[np.float32]]:
        """The states of texts, in their order; of some more than the engine reads at once, the next are submitted."""
        if "states" not in self.backend.capabilities:
            raise BackendUnavailableError(
                f"The {self.verdict.backend} backend does not show hidden states: embeddings need cpu or llama."
            )
        waiting, left = deque[Reading](), deque(Reading(ids, user) for ids in texts)
        try:
            while waiting or left:
                while left and len(waiting) < 2 * self._engine.n_parallel:
                    try:
                        self._engine.submit(left[0])
                    except QueueFullError:
                        if not waiting:
                            raise
                        break
                    waiting.append(left.popleft())
                states = waiting[0].output.get()
                if isinstance(states, BaseException):
                    raise states
                waiting.popleft()
                assert isinstance(states, np.ndarray)
                yield states
        finally:
            for task in waiting:
                task.cancelled = True

    @staticmethod
    def _pooled(states: NDArray[np.float32], kind: Pooling, normalize: bool) -> NDArray[np.float32]:
        if kind == "none":
            return states.astype(np.float32)
        pooled = states.mean(axis=0) if kind == "mean" else states[0 if kind == "cls" else -1]
        length = float(np.linalg.norm(pooled))
        if not np.isfinite(length):
            raise EdgertError("The model's hidden states are not finite numbers: the file's weights are damaged.")
        return (pooled / (length if normalize and length else 1.0)).astype(np.float32)

    def compile(self, grammar: Grammar) -> Constraint:
        """A grammar made ready for this model's tokens, which may take a second the first time; it is kept.

        Raises: RequestError for one that cannot be enforced.
        """
        return self._constrainer.compile(grammar)

    def _start(self, prompt: Sequence[int], on_progress: OnProgress | None, params: Mapping[str, Any]) -> Stream:
        self._check_writes()
        function("on_progress", on_progress)
        options = Options.of(self.defaults, **params)
        end_ids = self.tokenizer.end_ids
        banned = end_ids if options.ignore_eos else ()
        sampler = Sampler(options.sampling, self.backend.n_vocab, banned, self._sample_kernel)
        constraint = self.compile(options.grammar) if options.grammar else None
        decoder = self.tokenizer.stream_decoder(special=options.visible)
        task = Generation(self._ids(prompt), options, sampler, decoder, end_ids, constraint)
        self._engine.submit(task)
        return Stream(task, on_progress, self)

    def _check_writes(self) -> None:
        if "encoder" in self.backend.capabilities:
            raise RequestError("model", "is an encoder, which writes no text: it is for embeddings (edgert embed)")

    def _ids(self, prompt: str | Sequence[int]) -> NDArray[np.int32]:
        """int32 (n,): the ids, checked. An empty text is the begin token, where the vocabulary has one."""
        ids = self._checked("prompt", self.tokenize(prompt) if isinstance(prompt, str) else prompt)
        if len(ids):
            return ids
        bos = self.tokenizer.bos_id
        if bos is None:
            raise RequestError("prompt", "is empty, and the model has no begin token to start from")
        return np.array([bos], np.int32)

    def _checked(self, field: str, ids: Sequence[int]) -> NDArray[np.int32]:
        """int32 (n,): ids of the vocabulary. Raises: RequestError naming the field for anything else."""
        try:
            given = np.asarray(ids)
        except (ValueError, OverflowError):
            given = np.empty((0, 0))
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise RequestError.wrong(field, "a list of token ids" + (" or a text" if field == "prompt" else ""), ids)
        if given.size and (given.min() < 0 or given.max() >= self.backend.n_vocab):
            raise RequestError(field, f"has token ids outside the vocabulary of {self.backend.n_vocab}")
        return given.astype(np.int32)
