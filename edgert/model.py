"""A loaded model: text or messages in, text out."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, Self, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Backend, Verdict
from edgert.constraint import Constrainer, Constraint, Grammar
from edgert.errors import BackendUnavailableError, EdgertError, RequestError
from edgert.generation import Engine, Generation, Limits, Reading, Scoring, Snapshot, Task, Weighing
from edgert.generation.limits import PARALLEL, PATIENCE, STALL
from edgert.options import Options, Params, SamplingParams, function, integer, named, string
from edgert.reply import Progress, Reply, TokenLogprob
from edgert.sampler import Sampler
from edgert.stream import Stream

if TYPE_CHECKING:
    from edgert.backends.cpu.sampling import SampleKernel
    from edgert.session import Session
    from edgert.speculation import Speculator
    from edgert.template import ChatTemplate
    from edgert.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_N_CTX = 4096
KEPT_PREFIXES = 12  # sequences beyond those that run, for beginnings of prompts
Pooling = Literal["mean", "cls", "last", "none"]
POOLINGS: dict[object, Pooling] = {1: "mean", 2: "cls", 3: "last"}  # by the numbers of GGUF's pooling_type
Message = Mapping[str, Any]
OnProgress = Callable[[Progress], object]


def load(
    model: str | os.PathLike[str],
    *,
    n_ctx: int | None = None,
    n_threads: int | None = None,
    backend: str = "auto",
    device: str | None = None,
    n_gpu_layers: int | None = None,
    require: bool = False,
    cache_type_k: str | None = None,
    cache_type_v: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    draft: str | os.PathLike[str] | None = None,
    spec: str | None = None,
    spec_max: int | None = None,
    spec_min: int | None = None,
    spec_p_min: float | None = None,
    n_parallel: int | None = None,
    n_queue: int | None = None,
    prefix_cache: str = "shared",
    prefix_quota: int | None = None,
    window: float = 0.0,
    stall: float = STALL,
    comfort: float | None = None,
    patience: float = PATIENCE,
    progress: Callable[[int, int], None] | None = None,
    **backend_options: Any,
) -> Model:
    """Loads a model file.

    model:            a path, or a name that `edgert ls` shows
    n_ctx:            positions that one conversation may have; 0: as many as the model was trained on;
                      None: the same, but at most 4096
    n_threads:        None: what suits this machine
    backend:          "cpu", "llama" or "onnx"; "auto": the fastest that is here and gives the cpu backend's answers,
                      tried once and remembered; `model.verdict` tells
    device:           where it runs: "cpu", "gpu", "npu" or a name that `edgert devices` shows; None: wherever
    n_gpu_layers:     layers that llama.cpp gives to GPUs; -1: all; None: as many as fit
    require:          an error when what was asked for cannot run the whole model, in place of running it elsewhere
    cache_type_k:     how keys are cached: "f16", "q8_0" or "q4_0"; None: what suits the model and the backend
    cache_type_v:     and values
    sampling:         defaults of this model's requests, over those that the file recommends
    chat_template:    a Jinja template in place of the file's
    draft:            a small model of the same vocabulary that guesses tokens, which this one checks; None: the one
                      that was made for this model: smollm2's comes with edgert
    spec:             which guesses are tried: "draft", "ngram" (what was already said), "auto" (both take turns, as
                      it pays), "off"; the replies are the same with all of them; None: "auto" with a draft, else "off"
    spec_max:         most tokens guessed for a step; None: 15, of which as many are guessed as pay
    spec_min:         tokens always guessed, whether it pays or not
    spec_p_min:       the draft's tokens below this probability are not guessed
    n_parallel:       requests computed at once; None: 4
    n_queue:          requests that may wait besides, beyond which `QueueFullError` is raised; None: any number
    prefix_cache:     whose cached beginnings a prompt may use: "shared": anybody's, "user": those of the same `user`,
                      "off": none
    prefix_quota:     cached tokens that a user keeps whatever others do; None: a quarter of the cache
    window:           seconds in which an idle engine gathers requests before it begins
    stall, comfort:   while a prompt is read, replies that run wait for a token at most so many times as long as usual,
                      or so many seconds, whichever is more; comfort None: what suits the backend
    patience:         seconds after which a user of whom nothing runs takes a place from one who has several
    progress:         called with (done, all) while kernels are compiled, which happens once on a machine
    backend_options:  passed on to the backend; "n_cached": positions that all requests and the beginnings kept of
                      earlier ones may have together, without it those of one context

    Raises: EdgertError and its subclasses, when the file, the machine or an option is at fault.
    """
    from edgert import backends, context, store
    from edgert.quantize.gguf_file import GGUFFile
    from edgert.speculation import loading
    from edgert.template import ChatTemplate
    from edgert.tokenizer import Tokenizer

    given = {"kind": spec, "draft": draft, "most": spec_max, "least": spec_min, "p_min": spec_p_min}
    speculation = loading.Settings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    if n_ctx is not None:
        n_ctx = integer("n_ctx", n_ctx, 0, 2**31 - 1)
    if chat_template is not None:
        string("chat_template", chat_template)
    function("progress", progress)
    string("backend", backend)
    path = store.resolve(model)
    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
        template = ChatTemplate.from_gguf(file, chat_template, tokenizer)
        defaults = SamplingParams.from_metadata(file.metadata)
        n_ctx = min(DEFAULT_N_CTX, context.trained(file)) if n_ctx is None else n_ctx or context.trained(file)
        context.warn_beyond(file, n_ctx)
        pooling = POOLINGS.get(file.metadata.get(f"{file.architecture}.pooling_type"), "mean")
        if sampling is not None:
            defaults = defaults.changed(named("sampling", sampling))
        limits = Limits(
            n_parallel=PARALLEL if n_parallel is None else n_parallel,
            n_queue=n_queue,
            window=window,
            stall=stall,
            comfort=comfort,
            patience=patience,
            prefix_cache=prefix_cache,
            prefix_quota=prefix_quota,
        )
        # Requests at once share the memory of one context; who lacks room waits.
        n_seq_max = (limits.n_parallel or PARALLEL) + (0 if prefix_cache == "off" else KEPT_PREFIXES)
        backend_options = {"n_seq_max": n_seq_max, "n_cached": n_ctx} | backend_options
        engine = backends.load(
            file,
            backend=backend,
            device=device,
            n_gpu_layers=n_gpu_layers,
            require=require,
            n_ctx=n_ctx,
            n_threads=n_threads,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            progress=progress,
            **backend_options,
        )
        try:
            if n_parallel is not None:
                engine.prepare(n_parallel)
            speculator = loading.speculator(
                file, engine, speculation, n_threads=n_threads, n_parallel=limits.n_parallel, progress=progress
            )
        except BaseException:
            engine.close()
            raise
    return Model(engine, tokenizer, template, defaults, _sample_kernel(progress), speculator, limits, pooling)


def _sample_kernel(progress: Callable[[int, int], None] | None) -> SampleKernel | None:
    """The compiled sampler, or None where it cannot be had: then NumPy samples."""
    try:
        from edgert.backends.cpu.sampling import SampleKernel

        return SampleKernel(progress=progress)
    except (ImportError, OSError, RuntimeError, EdgertError) as error:
        logger.warning("sampling runs in NumPy, because its kernel cannot be compiled: %s", error)
        return None


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
        ids = self._checked("prompt", self.tokenize(prompt) if isinstance(prompt, str) else prompt)
        result = self._whole(Scoring(ids, self.backend.n_vocab))
        assert isinstance(result, np.ndarray)
        return result

    def prompt_logprobs(self, prompt: str | Sequence[int], top: int = 0, user: str = "") -> list[TokenLogprob]:
        """How likely each token of a text is after those before it, from the second on.

        top:  how many of the likeliest tokens in each place come with it

        Raises: RequestError for no token, or ids outside the vocabulary; ContextFullError.
        """
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
        self, texts: str | Sequence[int] | Sequence[str], pooling: Pooling | None = None, *, normalize: bool = True
    ) -> NDArray[np.float32]:
        """Where texts stand among others, by the model's last hidden states: float32 (n_embd,), of a list (n, n_embd).

        With the pooling "none" the states themselves: float32 (tokens, n_embd), as they are.

        texts:      a text, the ids of one, or a list of texts
        pooling:    "mean" of all tokens' states, or that of the "last" or first ("cls") one, or "none"; None: what the
                    file says, else the mean
        normalize:  whether vectors have the length 1

        Raises: RequestError for no token, ids outside the vocabulary, or the states of several texts at once;
        ContextFullError; BackendUnavailableError where the backend does not show its hidden states.
        """
        if isinstance(texts, str):
            return self._embed(self.tokenizer.encode_whole(texts), pooling, normalize)
        if len(texts) and all(isinstance(text, str) for text in texts):
            if pooling == "none":
                raise RequestError("pooling", '"none" gives the states of one text: embed each by itself')
            whole = [self.tokenizer.encode_whole(string("input", text)) for text in texts]
            return np.stack([self._embed(ids, pooling, normalize) for ids in whole])
        return self._embed(texts, pooling, normalize)  # type: ignore[arg-type]

    def _embed(self, given: Sequence[int], pooling: Pooling | None, normalize: bool) -> NDArray[np.float32]:
        ids = self._checked("input", given)
        if not len(ids):
            raise RequestError("input", "is empty: give at least one token")
        if "states" not in self.backend.capabilities:
            raise BackendUnavailableError(
                f"The {self.verdict.backend} backend does not show hidden states: embeddings need cpu or llama."
            )
        states = self._whole(Reading(ids))
        assert isinstance(states, np.ndarray)
        kind = pooling or self.pooling
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
        task = Generation(self._ids(prompt), options, sampler, self.tokenizer.stream_decoder(), end_ids, constraint)
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
            raise RequestError(field, "must be a list of token ids" + (" or a text" if field == "prompt" else ""))
        if given.size and (given.min() < 0 or given.max() >= self.backend.n_vocab):
            raise RequestError(field, f"has token ids outside the vocabulary of {self.backend.n_vocab}")
        return given.astype(np.int32)
