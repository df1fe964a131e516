"""The texts of a quantization, divided: what it calibrates on, what decides, and what only judges the result."""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.errors import EdgertError
from edgert.quantize.calibration_text import cut, default_texts, read_text
from edgert.quantize.engine import Engine

Chunks = list[NDArray[np.int32]]

PERIOD = 8  # of so many pieces of a text one decides and one is held out
DECIDES, HELD_OUT = 3, 7  # which ones
MOST = 16  # held-out pieces of a text
LEAST = 16  # tokens to compare on


@dataclass
class TextParts:
    """Pieces of int32 (n_ctx,) each; `names` of the texts, and the held-out pieces by text."""

    names: list[str] = field(default_factory=list)
    training: Chunks = field(default_factory=list)
    judging: Chunks = field(default_factory=list)
    held_out: dict[str, Chunks] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        engine: Engine,
        calibration: Sequence[str | os.PathLike[str]] | None,
        report: Sequence[str | os.PathLike[str]],
        n_ctx: int,
        n_tokens: int,
        seed: int = 0,
    ) -> TextParts:
        """Divides texts for an engine's model.

        calibration:  files and names of sets; None: all sets that come with the package
        report:       texts that are held out as a whole; without them, parts of the calibration's
        n_tokens:     that are calibrated on at most, taken from the texts by turns
        seed:         of the order in which pieces of a text are divided; 0: as they come

        Raises: EdgertError for a text that cannot be read.
        """
        n_pieces = max(1, n_tokens // n_ctx)
        most = None if seed else tokens_read(n_ctx, n_tokens)
        if calibration is None:
            texts = default_texts(engine, most)
        else:
            texts = [read_text(engine, text, most) for text in calibration]
        parts = cls([Path(text.name).name for text in texts])  # a path would tell of the machine
        training, judging = [], []
        for text in texts:
            pieces = cut(engine, [text], n_ctx)
            if seed:
                random.Random(seed).shuffle(pieces)
            if len(pieces) < PERIOD:  # too little to be divided
                training.append(pieces)
                continue
            training.append([piece for i, piece in enumerate(pieces) if i % PERIOD not in (DECIDES, HELD_OUT)])
            judging.append(pieces[DECIDES::PERIOD])
            if not report:
                parts._hold_out(text.name, pieces[HELD_OUT::PERIOD][:MOST])
        parts.training = _by_turns(training)[:n_pieces]
        parts.judging = _by_turns(judging)[: max(1, n_pieces // PERIOD)] or parts.training[::PERIOD]
        for name in report:
            parts._hold_out(os.fspath(name), cut(engine, [read_text(engine, name, MOST * n_ctx)], n_ctx, MOST))
        return parts

    def _hold_out(self, name: str, pieces: Chunks) -> None:
        if sum(map(len, pieces)) < LEAST:
            raise EdgertError(f"The text {name} is too short to compare on: it has {sum(map(len, pieces))} tokens, and "
                              f"{LEAST} are the least.")  # fmt: skip
        label = _label(name)
        taken = [one for one in self.held_out if one == label or re.fullmatch(re.escape(label) + r"-\d+", one)]
        self.held_out[f"{label}-{len(taken) + 1}" if taken else label] = pieces


def tokens_read(n_ctx: int, n_tokens: int) -> int:
    """Of each text at most: pieces are taken in order, unless a seed shuffles them, and one may have to give all."""
    return n_ctx * PERIOD * max(-(-n_tokens // (n_ctx * (PERIOD - 2))) + 1, MOST)


def _by_turns(texts: Sequence[Chunks]) -> Chunks:
    return [piece for turn in itertools.zip_longest(*texts) for piece in turn if piece is not None]


def _label(name: str) -> str:
    """What a text is called in keys of a file, whose parts dots divide."""
    return Path(name).stem.replace(".", "_")
