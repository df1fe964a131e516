"""From a file and what is asked for to a model that answers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from edgert.errors import EdgertError, ModelFileError
from edgert.generation import Limits
from edgert.generation.limits import PARALLEL, PATIENCE, STALL
from edgert.model import Model, Pooling
from edgert.options import SamplingParams, function, integer, named, string

if TYPE_CHECKING:
    from edgert.backends.cpu.sampling import SampleKernel
    from edgert.quantize.gguf_file import GGUFFile

logger = logging.getLogger(__name__)

KEPT_PREFIXES = 12  # sequences beyond those that run, for beginnings of prompts
# By the numbers of GGUF's pooling_type; 0 is none of them, and 4 a judge of pairs: their texts' mean serves.
POOLINGS: dict[int, Pooling] = {0: "mean", 1: "mean", 2: "cls", 3: "last", 4: "mean"}


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
        n_ctx = context.chosen(file, n_ctx)
        context.warn_beyond(file, n_ctx)
        pooling = _pooling(file)
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


def _pooling(file: GGUFFile) -> Pooling:
    """How the file pools states. Raises: ModelFileError."""
    key = f"{file.architecture}.pooling_type"
    number = file.get(key, int, 0)
    if number not in POOLINGS:
        raise ModelFileError(f"{file.path}: {key} is {number}, and must be {min(POOLINGS)} to {max(POOLINGS)}.")
    return POOLINGS[number]
