"""How far a quantized model's predictions are from its source's, on held-out text."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.quantize.divergence import Evaluation, Tally
from edgert.quantize.engine import Engine


def compare(
    base: Engine,
    model: Engine,
    chunks: Sequence[NDArray[np.int32]],
    on_chunk: Callable[[int, int], object] | None = None,
) -> Evaluation:
    """The divergence of a model from its base on the second half of each piece of text.

    chunks:    int32 (n,) each, run from an empty context
    on_chunk:  called with (pieces done, all)
    """
    tally = Tally()
    for i, chunk in enumerate(chunks):
        first, targets = len(chunk) // 2, chunk[1:]
        for ours, theirs in zip(model.pieces(chunk[:-1], first), base.pieces(chunk[:-1], first), strict=True):
            tally.add(ours, targets[first : first + len(ours)], theirs)
            first += len(ours)
        if on_chunk:
            on_chunk(i + 1, len(chunks))
    return tally.result(len(chunks), max(len(chunk) for chunk in chunks))


def under_a_name(files: Sequence[Path], names: Sequence[Path], folder: Path) -> Path:
    """The first of a model's files under links that bear its final names, by which the parts of a model are found."""
    for file, name in zip(files, names, strict=True):
        link = folder / name.name
        link.unlink(missing_ok=True)
        try:
            os.link(file, link)
        except OSError:  # a file system without hard links
            link.symlink_to(file.resolve())
    return folder / names[0].name
