"""The running model that the quantizer measures: `edgert.quantize.engine.Engine` on a backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgert import backends
from edgert.backends.base import Batch, OnInput
from edgert.errors import ContextFullError, RequestError
from edgert.quantize.gguf_file import GGUFFile
from edgert.template import ChatTemplate
from edgert.tokenizer import Tokenizer


def open_engine(
    path: str | os.PathLike[str],
    *,
    n_ctx: int = 512,
    n_threads: int | None = None,
    weights_as: str | None = "bf16",
    progress: Callable[[int, int], None] | None = None,
) -> CalibrationEngine:
    """Loads a file for measurements on texts of up to n_ctx tokens.

    weights_as:  the float type that holds the matrices, whatever the file's: "bf16" is the fastest where processors
                 have tiles, and rounds replaced values to 8 bits; "f32" is exact; None keeps quantized types as they
                 are, which cannot be replaced
    progress:    called with (done, all) while kernels are compiled

    Raises: EdgertError and its subclasses, when the file, the machine or an option is at fault.
    """
    return CalibrationEngine(Path(path), n_ctx, n_threads, weights_as, progress)


class CalibrationEngine:
    """A model file on the cpu backend; methods as in `edgert.quantize.engine.Engine`."""

    def __init__(
        self,
        path: Path,
        n_ctx: int,
        n_threads: int | None,
        weights_as: str | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.path = path
        self._file = GGUFFile.open(path)
        try:
            self.tokenizer = Tokenizer.from_gguf(self._file)
            self._template: ChatTemplate | None = None
            self._backend = backends.load(
                path, backend="cpu", n_ctx=n_ctx, n_threads=n_threads, weights_as=weights_as, progress=progress
            )
        except BaseException:
            self._file.close()
            raise
        self.n_vocab, self.n_ctx = self._backend.n_vocab, self._backend.n_ctx

    def tokenize(self, text: str, *, add_special: bool = True) -> NDArray[np.int32]:
        return np.asarray(self.tokenizer.encode(text, add_special=add_special), np.int32)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> NDArray[np.int32]:
        if self._template is None:
            self._template = ChatTemplate.from_gguf(self._file, tokenizer=self.tokenizer)
        if self._template is None:
            raise RequestError("messages", f"{self.path} has no chat template: give plain text")
        return np.asarray(self._template.encode(self.tokenizer, messages, add_generation_prompt=False), np.int32)

    def observe(self, tokens: NDArray[np.int32], on_input: OnInput) -> None:
        for batch in self._batches(tokens):
            batch.wanted[:] = True
            self._backend.observe(batch, on_input)

    def logits(self, tokens: NDArray[np.int32], first: int = 0) -> NDArray[np.float32]:
        out = np.empty((len(tokens) - first, self.n_vocab), np.float32)
        for batch in self._batches(tokens):
            wanted = batch.wanted[:] = batch.positions >= first
            places = batch.positions[wanted] - first
            result = self._backend.forward(batch)
            if len(places):
                out[places[0] : places[-1] + 1] = result
        return out

    def _batches(self, tokens: NDArray[np.int32]) -> list[Batch]:
        """The steps of a text that starts an empty context."""
        if len(tokens) > self.n_ctx:
            raise ContextFullError(len(tokens), self.n_ctx)
        self._backend.free(0)
        step = self._backend.n_batch
        return [
            Batch.of(tokens[start : start + step].tolist(), start, wanted="none")
            for start in range(0, len(tokens), step)
        ]

    def replace(self, name: str, values: NDArray[np.float32] | None) -> None:
        if values is None:
            values = self._file.tensor(name).dequantize()
        self._backend.replace(name, values)

    def close(self) -> None:
        self._backend.close()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
