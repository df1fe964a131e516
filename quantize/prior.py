"""What a type costs a tensor, when nothing was measured: its rounding error by experience of such tensors."""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from edgert.quantize import grid, rounding
from edgert.quantize.formats import FORMATS, Format
from edgert.quantize.source import Source

ROWS = 64  # of a tensor that are rounded to see how well a type suits it
# How much more the output loses by an error of a part than by the same relative error of attn_q.
WEIGHTS = {
    "token_embd": 8.0,
    "output": 8.0,
    "attn_v": 3.0,
    "attn_output": 2.0,
    "ffn_down": 3.0,
    "ffn_gate": 1.5,
    "ffn_up": 2.0,
}


class Prior:
    """Losses of one source's tensors in arbitrary units: they order types, and are no divergence."""

    def __init__(self, source: Source, n_threads: int) -> None:
        self._source = source
        self._n_threads = n_threads
        self.loss = cache(self._loss)

    def _loss(self, name: str, format: Format) -> float:
        """The relative squared error of some rows, weighed by the part that the tensor plays."""
        tensor = self._source.tensors[name]
        n_rows = min(ROWS, tensor.n_rows)
        middle = (tensor.n_rows - n_rows) // 2
        values = tensor.rows(middle, middle + n_rows)
        power = float(np.square(values).mean())
        if power == 0:
            return 0.0
        data = rounding.quantize(values, format, n_threads=self._n_threads)
        if format.name == "Q4_0" and grid.lies_on_q4_0([values]):
            data = grid.encode(values, data)
        error = float(np.square(values - FORMATS[format.name].dequantize(data)).mean())
        part = re.sub(r"^blk\.\d+\.|\.weight$", "", name)
        return WEIGHTS.get(part, 1.0) * error / power
