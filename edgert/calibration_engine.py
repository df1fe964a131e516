"""The running model that the quantizer measures: `edgert.quantize.engine.Engine`, on the cpu backend if not told."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import Batch, OnInput, OnSquares
from edgert.backends.cpu.layouts import WINDOW
from edgert.errors import ContextFullError, RequestError
from edgert.quantize.engine import Running
from edgert.quantize.gguf_file import GGUFFile, Model
from edgert.quantize.source import Source, open_source
from edgert.template import ChatTemplate
from edgert.tokenizer import Tokenizer

Tokens = NDArray[np.int32]

PIECE_BYTES = 1 << 26  # of logits, or of a matrix that is replaced, at a time


def open_engine(
    source: str | os.PathLike[str] | Source,
    *,
    n_ctx: int = 512,
    n_threads: int | None = None,
    weights_as: str | None = "bf16",
    backend: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> CalibrationEngine:
    """Loads a model for measurements on texts of up to n_ctx tokens.

    source:      a GGUF file, a folder in Hugging Face's format, or an open source, which stays open and must do so
    weights_as:  the float type that holds the matrices, whatever the source's: "bf16" is the fastest where processors
                 have tiles, and rounds replaced values to 8 bits; "f32" is exact; None keeps a GGUF file's quantized
                 types as they are, and these cannot be replaced
    backend:     "llama" or "onnx" run a GGUF file as it is, which can be observed, and nothing of it replaced
    progress:    called with (done, all) while kernels are compiled
    options:     of such a backend: device, n_gpu_layers, require and what its class takes

    Raises: EdgertError and its subclasses, when the source, the machine or an option is at fault.
    """
    if backend != "cpu":
        if isinstance(source, Source) or os.path.isdir(source):
            raise RequestError("backend", f"{backend} runs GGUF files alone: convert the folder first, or choose cpu")
        return _elsewhere(os.fspath(source), backend, n_ctx=n_ctx, n_threads=n_threads, progress=progress, **options)
    if options:
        raise RequestError(next(iter(options)), "is for another backend: name it, llama or onnx, and not auto or cpu")
    opened: GGUFFile | Source | None = None
    model: Model[Any]
    if weights_as is None:
        if isinstance(source, Source):
            raise ValueError("an open source holds floats: weights_as says which")
        model = opened = GGUFFile.open(os.fspath(source))
    else:
        if not isinstance(source, Source):
            source = opened = open_source(os.fspath(source), allow_requantize=True)
        model = source.model
    try:
        from edgert.backends.cpu.backend import CpuBackend

        tokenizer = Tokenizer.from_gguf(model)
        running = CpuBackend(
            model,
            n_ctx=n_ctx,
            n_threads=n_threads,
            cache_type_k="f16",
            cache_type_v="f16",
            weights_as=weights_as,
            tile_head=True,
            progress=progress,
        )
    except BaseException:
        if opened is not None:
            opened.close()
        raise
    return CalibrationEngine(model, running, tokenizer, opened)


def _elsewhere(path: str, backend: str, **options: Any) -> CalibrationEngine:
    from edgert import backends

    model = GGUFFile.open(path)
    try:
        running = backends.load(model, backend=backend, observable=True, **options)
        return CalibrationEngine(model, running, Tokenizer.from_gguf(model), model)
    except BaseException:
        model.close()
        raise


def estimate(source: Source, n_ctx: int) -> Running:
    """What a source takes, running as bf16."""
    from edgert.backends.cpu.footprint import PROGRAM_PER_TOKEN, footprint

    a = source.describe()
    found = footprint(source.model, a, n_ctx, types=("f16", "f16"), weights_as="bf16", with_program=False)
    logits = 4 * a.n_vocab * min(_rows(a.n_vocab), n_ctx // 2)
    return Running(found.weights, found.kv + found.buffers + PROGRAM_PER_TOKEN * a.n_vocab, logits)


def _rows(n_cols: int) -> int:
    """How many rows of float32 are handled at a time: whole windows."""
    return max(WINDOW, PIECE_BYTES // (4 * n_cols) // WINDOW * WINDOW)


class CalibrationEngine:
    """A model on a backend that can observe and replace; methods as in `edgert.quantize.engine.Engine`.

    opened:  what to close in the end
    """

    def __init__(self, model: Model[Any], backend: Any, tokenizer: Tokenizer, opened: GGUFFile | Source | None) -> None:
        self.tokenizer = tokenizer
        self.n_vocab, self.n_ctx = backend.n_vocab, backend.n_ctx
        self.bos = tokenizer.bos_id if tokenizer.add_bos else None
        self._model, self._backend, self._opened = model, backend, opened

    def tokenize(self, text: str, *, add_special: bool = True) -> Tokens:
        return np.asarray(self.tokenizer.encode(text, add_special=add_special), np.int32)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return ChatTemplate.from_gguf(self._model, tokenizer=self.tokenizer)  # warns where there is none

    @property
    def can_chat(self) -> bool:
        return self._template is not None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> Tokens:
        if self._template is None:
            raise RequestError("messages", f"{self._model.path} has no chat template: give plain text")
        return np.asarray(self._template.encode(self.tokenizer, messages, add_generation_prompt=False), np.int32)

    def observe(self, tokens: Tokens, on_input: OnInput) -> None:
        for batch in self._steps(tokens):
            self._backend.observe(batch, on_input)

    def squares(self, tokens: Tokens, on_squares: OnSquares) -> None:
        for batch in self._steps(tokens):
            self._backend.squares(batch, on_squares)

    def logits(self, tokens: Tokens, first: int = 0) -> NDArray[np.float32]:
        n = len(tokens)
        steps = list(self._steps(self._padded(tokens)))
        for batch in steps:
            batch.wanted[:] = (batch.positions >= first) & (batch.positions < n)
        if len(steps) == 1:
            return self._backend.forward(steps[0])
        return np.concatenate([self._backend.forward(batch).copy() for batch in steps])

    def pieces(self, tokens: Tokens, first: int = 0) -> Iterator[NDArray[np.float32]]:
        rows = _rows(self.n_vocab)
        n, padded = len(tokens), self._padded(tokens)
        if n - first <= rows:  # in one step, which is faster
            yield self.logits(tokens, first)
            return
        before = first // WINDOW * WINDOW
        for batch in self._steps(padded, [*range(before, len(padded), rows), len(padded)]):
            batch.wanted[:] = (batch.positions >= first) & (batch.positions < n)
            if batch.wanted.any():
                yield self._backend.forward(batch)
            else:
                self._backend.forward(batch)

    def _padded(self, tokens: Tokens) -> Tokens:
        """A whole window takes less time than the end of a text, token by token."""
        padding = -len(tokens) % WINDOW
        return np.pad(tokens, (0, padding)) if len(tokens) + padding <= self.n_ctx else tokens

    def _steps(self, tokens: Tokens, ends: Sequence[int] = ()) -> Iterator[Batch]:
        """The steps of a text in an empty context; ends: where some must end."""
        if len(tokens) > self.n_ctx:
            raise ContextFullError(len(tokens), self.n_ctx)
        self._backend.free(0)
        most, start = self._backend.n_batch, 0
        for end in [*ends, len(tokens)]:
            while start < end:
                stop = min(start + most, end)
                yield Batch.of(tokens[start:stop].tolist(), start, wanted="all")
                start = stop

    def replace(self, name: str, values: NDArray[np.float32] | None, first: int = 0) -> None:
        if values is not None:
            self._backend.replace(name, values, first)
            return
        tensor = self._model.tensor(name)
        n, rows = math.prod(tensor.shape[:-1]), _rows(tensor.shape[-1])
        for start in range(0, n, rows):
            self._backend.replace(name, tensor.rows(start, min(start + rows, n)), start)

    def close(self) -> None:
        self._backend.close()
        if self._opened is not None:
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
