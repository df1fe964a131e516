"""One tensor of floats -> the bytes of its type, in the way that loses least."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgert.quantize import feedback, grid, rounding
from edgert.quantize.feedback import Curvature
from edgert.quantize.formats import Format
from edgert.quantize.memory import Limits
from edgert.quantize.rounding import GRIDS
from edgert.quantize.source_tensor import SourceTensor

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

SLAB_BYTES = 1 << 22  # of float32 rows in work at a time


@dataclass(frozen=True)
class Inputs:
    """What is known of the inputs that a matrix multiplies.

    importance:  mean squares by column, float32 (n_cols,), or (n_mat, n_cols) for experts
    curvature:   their correlations; None: no error feedback
    held_out:    those of other text, to judge by; None: error feedback without a question
    of_expert:   what is known of the inputs of each one of a stack of experts; None: no more than the importance
    n_bytes:     of float32 rows in work at a time, where each is multiplied by a matrix of all columns
    """

    importance: Floats | None = None
    curvature: Curvature | None = None
    held_out: Curvature | None = None
    of_expert: Callable[[int], Inputs] | None = None
    n_bytes: int = Limits.rows


def slabs(tensor: SourceTensor, n_bytes: int = SLAB_BYTES) -> Iterator[tuple[int, Floats]]:
    """(index of the matrix, rows) of a tensor, a few rows of one matrix at a time."""
    rows_of_matrix = tensor.shape[-2] if len(tensor.shape) > 1 else 1
    step = max(1, n_bytes // (4 * tensor.n_cols))
    for first in range(0, tensor.n_rows, rows_of_matrix):
        for start in range(first, first + rows_of_matrix, step):
            yield first // rows_of_matrix, tensor.rows(start, min(start + step, first + rows_of_matrix))


def lies_on_grid(tensor: SourceTensor) -> bool:
    """Whether the tensor's floats are multiples of Q4_0 scales, as training for that type leaves them."""
    few = tensor.rows(0, min(grid.FEW_ROWS, tensor.n_rows))
    return grid.may_lie_on_q4_0(few) and grid.lies_on_q4_0(values for _, values in slabs(tensor))


def encode(tensor: SourceTensor, format: Format, inputs: Inputs, n_threads: int) -> tuple[list[str], Iterator[Bytes]]:
    """The methods taken, of report.METHODS, and the tensor's bytes in pieces, uint8 (rows, row_bytes) each.

    Of a stack of experts there may be several methods, one for each expert, which are known when the bytes are.
    """
    if format is tensor.format:
        way = "kept" if tensor.is_quantized else "float"
        return [way], (tensor.stored(start, stop) for start, stop in tensor.slabs(SLAB_BYTES))
    if format.name not in GRIDS:
        return ["float"], (rounding.quantize(values, format) for _, values in slabs(tensor))
    if format.name == "Q4_0" and lies_on_grid(tensor):
        return ["grid"], (
            grid.encode(values, rounding.quantize(values, format, n_threads=n_threads)) for _, values in slabs(tensor)
        )
    return _on_grid(tensor, format, inputs, n_threads)


def _on_grid(tensor: SourceTensor, format: Format, inputs: Inputs, n_threads: int) -> tuple[list[str], Iterator[Bytes]]:
    """As encode(), by what is known of the inputs."""
    if inputs.of_expert is not None:
        ways: list[str] = []
        return ways, _expert_by_expert(tensor, format, inputs.of_expert, n_threads, ways)
    if inputs.curvature is not None:
        way, pieces = _with_feedback(tensor, format, inputs, inputs.curvature, n_threads)
        return [way], pieces
    return ["plain" if inputs.importance is None else "weighted"], (
        rounding.quantize(values, format, _row(inputs.importance, matrix), n_threads=n_threads)
        for matrix, values in slabs(tensor)
    )


def _expert_by_expert(
    tensor: SourceTensor, format: Format, of_expert: Callable[[int], Inputs], n_threads: int, ways: list[str]
) -> Iterator[Bytes]:
    """Rounds each by what it reads itself; adds to `ways` how."""
    for number in range(tensor.shape[0]):
        way, pieces = _on_grid(tensor.matrix(number), format, of_expert(number), n_threads)
        ways += way
        yield from pieces


def _row(importance: Floats | None, matrix: int) -> Floats | None:
    return importance[matrix] if importance is not None and importance.ndim == 2 else importance


def _with_feedback(
    tensor: SourceTensor, format: Format, inputs: Inputs, curvature: Curvature, n_threads: int
) -> tuple[str, Iterator[Bytes]]:
    """Rounds with error feedback; or without, if held-out inputs tell that it errs less on them.

    Which it is, rows from all over the tensor decide.
    """
    way = partial(feedback.quantize, format=format, curvature=curvature, n_threads=n_threads)
    ways = {"feedback": way, "weighted": partial(way, feeds=False)}
    best = "feedback"
    if inputs.held_out is not None:
        values = tensor.sample(max(64, inputs.n_bytes // (4 * tensor.n_cols)))
        tried = {name: round(values) for name, round in ways.items()}
        errors = {name: feedback.error_of(data, format, values, inputs.held_out) for name, data in tried.items()}
        best = min(errors, key=lambda name: errors[name])
        if len(values) == tensor.n_rows:
            return best, iter([tried[best]])
    return best, (ways[best](values) for _, values in slabs(tensor, inputs.n_bytes))
