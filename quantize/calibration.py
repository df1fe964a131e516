"""What a model's matrices read while it reads a calibration text: mean squares by column, and Hessians."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgert.errors import EdgertError
from edgert.quantize.engine import Engine, Expert, sums_of_squares

if TYPE_CHECKING:
    from edgert.quantize.engine import OnInput

Floats = NDArray[np.float32]
Tokens = NDArray[np.int32]


@dataclass
class Statistics:
    """Sums of squared inputs of matrices, column by column.

    sums:        by tensor, float64 (n_mat, n_cols); n_mat is the number of experts, 1 for all other tensors
    counts:      by tensor, int64 (n_mat,): the tokens that were summed over
    datasets:    names of the texts
    n_chunks:    how many pieces of chunk_size tokens were run
    """

    sums: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    n_chunks: int = 0
    chunk_size: int = 512

    def add(self, names: Iterable[str], inputs: Floats, expert: Expert | None = None) -> None:
        """Adds inputs that these tensors share, float32 (n_tokens, n_cols); expert: which of theirs reads them.

        Raises: EdgertError when they are not finite.
        """
        self.add_squares(names, sums_of_squares(inputs), len(inputs), expert)

    def add_squares(self, names: Iterable[str], squares: Floats, n_tokens: int, expert: Expert | None = None) -> None:
        """The same of inputs of which only the sums of the squares are known, float32 (n_cols,).

        Raises: EdgertError when they are not finite.
        """
        row, n_mat = expert or (0, 1)
        finite = np.isfinite(squares).all()
        for name in names:
            if not finite:
                raise EdgertError(
                    f"The input of {name} is NaN, infinite or too large to be squared: the model's weights are damaged."
                )
            if name not in self.sums:
                self.sums[name] = np.zeros((n_mat, len(squares)))
                self.counts[name] = np.zeros(n_mat, np.int64)
            self.sums[name][row] += squares
            self.counts[name][row] += n_tokens

    def importance(self, name: str) -> Floats | None:
        """Mean squared input: float32 (n_cols,), (n_mat, n_cols) for experts; None for a tensor without statistics.

        Experts that no token reached have the mean of the others.
        """
        joint = self.joint(name)
        if joint is None:
            return None
        sums, counts = self.sums[name], self.counts[name][:, None]
        means = np.where(counts > 0, sums / np.maximum(counts, 1), joint)
        return (means if len(means) > 1 else means[0]).astype(np.float32)

    def joint(self, name: str) -> Floats | None:
        """As importance(), over the inputs of all experts together: float32 (n_cols,)."""
        if name not in self.sums or not self.counts[name].any():
            return None
        joint: Floats = (self.sums[name].sum(0) / self.counts[name].sum()).astype(np.float32)
        return joint

    def unreached(self, name: str) -> int:
        """How many experts of the tensor no token reached."""
        return int((self.counts[name] == 0).sum())

    def merge(self, other: Statistics) -> None:
        """Adds what was collected elsewhere. Raises: EdgertError when a tensor has other sizes there."""
        for name, sums in other.sums.items():
            if name not in self.sums:
                self.sums[name], self.counts[name] = sums.copy(), other.counts[name].copy()
                continue
            if self.sums[name].shape != sums.shape:
                raise EdgertError(
                    f"The statistics of {name} have the shapes {self.sums[name].shape} and {sums.shape}: "
                    "they are of different models."
                )
            self.sums[name] += sums
            self.counts[name] += other.counts[name]
        self.datasets += [name for name in other.datasets if name not in self.datasets]
        self.n_chunks += other.n_chunks


def unreached(statistics: Statistics, names: Iterable[str]) -> str:
    """A sentence on the experts that no token reached, "" where all were."""
    found = {name: statistics.unreached(name) for name in names if name in statistics.sums}
    lacking = [name for name, n in found.items() if n]
    if not lacking:
        return ""
    worst = max(lacking, key=lambda name: found[name])
    n, of = sum(found.values()), sum(len(statistics.counts[name]) for name in found if len(statistics.counts[name]) > 1)
    return (
        f"no token of the calibration text reached {n:,} of the {of:,} experts' matrices, most of them in {worst} "
        f"({found[worst]} of {len(statistics.counts[worst])}); these are rounded by the importance of the other "
        "experts' inputs: give more text"
    )


def matrix_of(name: str, number: int | None) -> str:
    """What one of the experts that stand in a tensor goes by; None: the tensor holds one matrix, which has its name."""
    return name if number is None else f"{name}.{number}"


class Hessians:
    """Sums of x x^T over the inputs x of some matrices; those that share an input share the sum."""

    def __init__(self, names: Collection[str]) -> None:
        """names: of tensors, or of experts in them as `matrix_of` has them"""
        self._names = frozenset(names)
        self._sums: dict[str, Floats] = {}
        self._counts: dict[str, int] = {}

    def add(self, names: Iterable[str], inputs: Floats, expert: Expert | None = None) -> None:
        """Adds inputs that these tensors share, float32 (n_tokens, n_cols)."""
        number = expert.number if expert else None
        chosen = [matrix for name in names if (matrix := matrix_of(name, number)) in self._names]
        if not chosen:
            return
        product = inputs.T @ inputs
        known = self._sums.get(chosen[0])
        if known is not None:
            known += product
        for name in chosen:
            self._sums.setdefault(name, product)
            self._counts[name] = self._counts.get(name, 0) + len(inputs)

    def __getitem__(self, name: str) -> Floats:
        """float32 (n_cols, n_cols), read only since it may be shared. Raises: KeyError."""
        view = self._sums[name].view()
        view.flags.writeable = False
        return view

    def __contains__(self, name: object) -> bool:
        return name in self._sums

    def count(self, name: str) -> int:
        """Tokens that were summed over."""
        return self._counts[name]

    def mean(self, name: str) -> Floats:
        """The sum over the tokens that were summed over, in its place: nothing can be added any more."""
        self._sums[name] /= np.float32(self._counts[name])
        return self._sums[name]


def calibrate(
    engine: Engine,
    chunks: Sequence[Tokens] | Tokens,
    *,
    datasets: Sequence[str] = (),
    on_chunk: Callable[[int, int], object] | None = None,
) -> Statistics:
    """Runs pieces of text, each from an empty context, and collects the mean squares of what the matrices read.

    chunks:    int32 (n_chunks, n_ctx), or a list of int32 (n,)
    datasets:  names of the texts, for the record
    on_chunk:  called with (chunks done, all)

    Raises: EdgertError when the model's values are not finite.
    """
    statistics = Statistics(datasets=list(datasets))
    for _ in hessian_passes(engine, chunks, (), 0, statistics, on_chunk):
        pass
    return statistics


def inputs_of(engine: Engine) -> dict[tuple[str, ...], int]:
    """The columns of each input, by the matrices that share it, in the order of the computation.

    Experts go by the names that `matrix_of` gives them, the unused ones too.
    """
    found: dict[tuple[str, ...], int] = {}

    def note(names: tuple[str, ...], inputs: Floats, expert: Expert | None = None) -> None:
        for number in range(expert.of) if expert else [None]:
            found[tuple(matrix_of(name, number) for name in names)] = inputs.shape[1]

    engine.observe(np.zeros(1, np.int32), note)
    return found


def hessian_passes(
    engine: Engine,
    chunks: Sequence[Tokens] | Tokens,
    names: Collection[str],
    max_bytes: int,
    statistics: Statistics | None = None,
    on_chunk: Callable[[int, int], object] | None = None,
) -> Iterator[Hessians]:
    """The Hessians of many matrices, in as many passes over the text as keep those of one pass within max_bytes.

    Matrices come in the order of the computation; one that exceeds max_bytes alone has a pass of its own.

    names:       of tensors, or of experts in them as `matrix_of` has them
    statistics:  collects too, of all tensors, during the first pass; there is then one at least
    """
    sets: list[list[str]] = []
    room = 0
    for shared, n_cols in inputs_of(engine).items() if names else ():
        chosen = [name for name in shared if name in names]
        if not chosen:
            continue
        n_bytes = n_cols * n_cols * 4
        if n_bytes > room:
            sets.append([])
            room = max_bytes
        sets[-1] += chosen
        room -= n_bytes
    if statistics is not None:
        statistics.chunk_size = max((len(chunk) for chunk in chunks), default=0)
        sets = sets or [[]]
    done = 0
    for i, chosen in enumerate(sets):
        hessians = Hessians(chosen)
        reads: list[OnInput] = [hessians.add] if statistics is None or i else [statistics.add, hessians.add]

        def on_input(
            names: tuple[str, ...],
            inputs: Floats,
            expert: Expert | None = None,
            reads: Sequence[OnInput] = reads,
        ) -> None:
            for read in reads:
                read(names, inputs, expert)

        for chunk in chunks:
            if chosen or statistics is None:
                engine.observe(chunk, on_input)
            else:
                engine.squares(chunk, statistics.add_squares)
            if statistics is not None and not i:
                statistics.n_chunks += 1
            done += 1
            if on_chunk:
                on_chunk(done, len(sets) * len(chunks))
        yield hessians
