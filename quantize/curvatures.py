"""The Hessians of all matrices' inputs, kept on disk: together they can take more memory than the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.quantize import calibration
from edgert.quantize.calibration import Statistics
from edgert.quantize.engine import Engine
from edgert.quantize.feedback import DAMPING, Curvature
from edgert.quantize.memory import Limits


class Curvatures:
    """Called with a tensor's name, it gives the curvature of its inputs.

    Each expert in a tensor, by the name that `calibration.matrix_of` gives it, may have one of its own. That of the
    tensor has no correlations: a column matters as the mean square of what all of its experts read there. A table
    that rows are looked up in has no inputs: all of its columns matter alike.
    """

    def __init__(
        self, folder: Path, dampings: Mapping[str, float], n_cols: Mapping[str, int], most: int = Limits.curvatures
    ) -> None:
        """What is kept where.

        folder:    of the Hessians
        dampings:  of tensors that need another one than the rest
        n_cols:    of all tensors
        most:      curvatures kept at hand: tensors with the same input are mostly asked for one after another
        """
        self._folder, self._dampings, self._n_cols, self._most = folder, dampings, n_cols, most
        self._inputs: dict[str, str] = {}  # the tensor under whose name the Hessian of a tensor's input is kept
        self._cache: dict[tuple[str, float], Curvature] = {}
        self._statistics = Statistics()

    def weigh(self, statistics: Statistics) -> None:
        """Takes the mean squares of inputs whose Hessians are not kept."""
        self._statistics = statistics

    def __contains__(self, name: object) -> bool:
        """Whether the matrix's inputs were seen."""
        return name in self._inputs

    def __call__(self, name: str) -> Curvature:
        key = self._inputs.get(name, name), self._dampings.get(name, DAMPING)
        if key not in self._cache:
            while len(self._cache) >= self._most:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = Curvature(self._hessian(name), key[1])
        return self._cache[key]

    def _hessian(self, name: str) -> NDArray[np.float32]:
        if name in self._inputs:
            kept: NDArray[np.float32] = np.load(self._path(self._inputs[name]))
            return kept
        squares = self._statistics.joint(name)
        return np.diag(np.ones(self._n_cols[name], np.float32) if squares is None else squares)

    def forget(self) -> None:
        """Keeps none at hand."""
        self._cache.clear()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npy"

    def collect(
        self,
        engine: Engine,
        chunks: Sequence[NDArray[np.int32]],
        names: Collection[str],
        max_bytes: int,
        *,
        statistics: Statistics | None = None,
        least: int = 1,
        most: int | None = None,
        resume: bool = False,
        on_chunk: Callable[[int, int], object] | None = None,
    ) -> None:
        """Lets the model read, as often as it takes to keep within max_bytes of memory.

        names:       the matrices wanted: tensors, and experts in them as `calibration.matrix_of` has them
        statistics:  collects on the way, of all tensors
        least:       tokens that a matrix must have read
        most:        bytes of all Hessians; matrices that come later in the computation are left out
        resume:      take what an earlier collect has left in the folder
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        inputs: dict[str, str] = {}
        names = frozenset(names)
        for shared, n_cols in calibration.inputs_of(engine).items():
            wanted = [name for name in shared if name in names]
            if wanted and most is not None:
                most -= 4 * n_cols**2
                if most < 0:
                    break
            inputs |= dict.fromkeys(wanted, wanted[0] if wanted else "")
        missing = {key for key in inputs.values() if not (resume and self._path(key).exists())}
        seen = set(inputs.values()) - missing
        for hessians in calibration.hessian_passes(engine, chunks, missing, max_bytes, statistics, on_chunk):
            for key in [key for key in missing if key in hessians and hessians.count(key) >= least]:
                self._save(key, hessians.mean(key))
                missing.discard(key)
                seen.add(key)
        self._inputs |= {name: key for name, key in inputs.items() if key in seen}  # text reaches not every expert

    def _save(self, name: str, hessian: NDArray[np.float32]) -> None:
        """Writes it whole or not at all."""
        part = self._path(name).with_suffix(".part")
        with open(part, "wb") as file:
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(hessian))
            file.write(np.ascontiguousarray(hessian).data)  # np.save does not tell why it failed
        part.replace(self._path(name))
