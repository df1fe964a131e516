"""What is measured of a source by running it: what its matrices read, and what their rounding costs the output."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.errors import DoesNotFitError
from edgert.quantize import probing
from edgert.quantize.calibration import Statistics, matrix_of
from edgert.quantize.calibration_text import BUILT_IN, MUCH
from edgert.quantize.calibration_text import check as check_text
from edgert.quantize.curvatures import Curvatures
from edgert.quantize.encoding import Inputs
from edgert.quantize.engine import Engine, Running, memory_of, open_engine
from edgert.quantize.feedback import TIED_DAMPING
from edgert.quantize.forecast import Forecast
from edgert.quantize.formats import Format
from edgert.quantize.imatrix import check_of, read_imatrix, write_imatrix
from edgert.quantize.kernels_ahead import Job, compile_ahead, n_lacking
from edgert.quantize.memory import PLAIN, TEXT_BYTE, Limits, Work, megabytes, resident
from edgert.quantize.progress import OnProgress
from edgert.quantize.rounding import GRIDS
from edgert.quantize.sensitivity import Sensitivity
from edgert.quantize.settings import DEFAULT, Settings
from edgert.quantize.source import Source
from edgert.quantize.source_tensor import SourceTensor
from edgert.quantize.text_parts import MOST, PERIOD, Chunks, TextParts, tokens_read

CHUNK = 512  # tokens that the model reads at a time, as llama.cpp's imatrix has them
EXPERT_PASSES = 8  # over the text for the Hessians of experts; those that these do not hold are not made
LEAST_JUDGED = 32  # tokens of held-out text by which an expert's rounding is judged
BYTES = 3.3  # of a text for each token, roughly
PROBE_CHUNKS = 8  # that the model reads for each probe of its sensitivity

Shapes = Mapping[str, tuple[int, ...]]


class Measuring:
    """Measurements of an open source, each made when it is asked for first.

    shapes:    of the matrices that may be rounded
    folder:    where they lie, so that a resumed run finds them
    """

    def __init__(
        self,
        source: Source,
        settings: Settings,
        shapes: Shapes,
        folder: Callable[[], Path],
        progress: OnProgress,
    ) -> None:
        self.source, self.settings = source, settings
        self.notices: list[str] = []
        self.forecast = Forecast(progress, settings.n_threads)
        self._shapes, self._folder, self._progress = shapes, folder, self.forecast
        self._resources = ExitStack()

    def close(self) -> None:
        self._resources.close()

    @property
    def feeds_back(self) -> bool:
        return self.settings.gptq != "off" and bool(self.settings.calibration)

    @property
    def probes(self) -> bool:
        """Whether types are chosen by what the running model loses."""
        settings = self.settings
        return settings.budget.mix is None and settings.sensitivity is None and bool(settings.calibration)

    @cached_property
    def known(self) -> Sensitivity | None:
        """What was measured before, if a file of it is given."""
        return None if self.settings.sensitivity is None else Sensitivity.load(self.settings.sensitivity)

    # Memory.

    @cached_property
    def _running(self) -> Running:
        return memory_of(self.source, CHUNK)

    @property
    def _work(self) -> Work:
        settings, running = self.settings, self._running
        widest = max((shape[-1] for shape in self._shapes.values()), default=0)
        n_weights = sum(tensor.n_rows * tensor.n_cols for tensor in self.source.tensors.values())
        result = running.other + settings.budget.about(n_weights) if settings.report else 0
        return Work(widest if self.probes or self.feeds_back else 0, running.logits, result)

    @property
    def _text_bytes(self) -> int:
        """What reading the texts leaves."""
        settings = self.settings
        most = MUCH * tokens_read(CHUNK, settings.calibration_tokens)
        names = BUILT_IN if settings.calibration == DEFAULT else (*settings.calibration, *settings.report_text)
        files = [path for path in (BUILT_IN.get(name, Path(name)) for name in names) if path.is_file()]
        return TEXT_BYTE * sum(min(path.stat().st_size, most) for path in files)

    @cached_property
    def limits(self) -> Limits:
        """What may be held at a time beside the running model."""
        most = self.settings.max_memory
        if most is None:
            return Limits()
        assert self.engine  # which counts as resident
        return self._work.within(most - resident())

    def check(self, *, needs_model: bool = False) -> None:
        """Refuses files that cannot be used and a bound that cannot be kept, before the work.

        needs_model:  nothing can be done without running the source

        Raises: DoesNotFitError, EdgertError.
        """
        settings = self.settings
        for name in () if settings.calibration == DEFAULT else settings.calibration:
            check_text(name)
        for name in settings.report_text:
            check_text(name)
        if settings.imatrix is not None:
            _ = self.statistics
        _ = self.known
        most = settings.max_memory
        if most is None:
            return
        from edgert.quantize import feedback_kernels  # noqa: F401 - brings Numba, a part of the program

        remedy, parts, least = "Allow that much", "", resident()
        if self.settings.calibration or self.settings.report:
            model = self._running.weights + self._running.other
            least += model + self._text_bytes + self._work.n_bytes(self._work.least)
            parts = f", {model / 1e6:,.0f} MB of them for the running model"
            if not needs_model:
                remedy += f", or go without calibration and report, in {megabytes(resident() + PLAIN)}"
        else:
            least += PLAIN
        if least > most:
            raise DoesNotFitError(
                f"{self.source.path} cannot be quantized within the {most / 1e6:,.0f} MB of max_memory: it takes "
                f"{megabytes(least)} at least{parts}. {remedy}."
            )

    # Time.

    def foretell(self, types: Collection[str], *, rounds: bool = True, max_groups: int = probing.MAX_GROUPS) -> None:
        """Says how long all will take, before it begins.

        types:   that tensors may take
        rounds:  whether a file is written
        """
        settings = self.settings
        n_weights = sum(math.prod(shape) for shape in self._shapes.values())
        in_layers = sum(math.prod(shape) for name, shape in self._shapes.items() if name.startswith("blk."))
        names = BUILT_IN if settings.calibration == DEFAULT else settings.calibration
        training = min(sum(map(_n_tokens, names)) * (PERIOD - 2) / PERIOD, settings.calibration_tokens)
        decided = training / PERIOD
        work: dict[str, float] = {}
        if settings.calibration and settings.imatrix is None:
            work["calibrating"] = in_layers * training
            work["judging"] = in_layers * decided * (self.feeds_back and (self.probes or settings.gptq == "auto"))
        if self.probes:
            n_probes = len(probing.groups_of(self._shapes, max_groups))
            work["probing"] = n_weights * n_probes * min(decided, PROBE_CHUNKS * CHUNK)
            rows = (min(math.prod(shape[:-1]), probing.SAMPLE_ROWS) * shape[-1] for shape in self._shapes.values())
            work["measuring"] = sum(rows) * len(types)
        if rounds:
            work["quantizing" if self.feeds_back else "quantizing plainly"] = n_weights
        way = "plain" if settings.fast else "feedback" if self.feeds_back else "search"
        work["compiling"] = n_lacking((name, way) for name in types if name in GRIDS)
        if rounds and settings.report:
            held_out, share = (settings.report_text, 1) if settings.report_text else (names, PERIOD)
            work["comparing"] = n_weights * sum(min(_n_tokens(name) / share, MOST * CHUNK) for name in held_out)
        self.forecast.begin(work)

    # Reading.

    @cached_property
    def engine(self) -> Engine:
        """The source, running."""
        self._progress("loading", "", 0, 1)
        engine = open_engine(
            self.source,
            n_ctx=CHUNK,
            n_threads=self.settings.n_threads,
            progress=partial(self._progress, "compiling", "the engine"),
        )
        self._resources.callback(engine.close)
        return engine

    @cached_property
    def texts(self) -> TextParts:
        settings = self.settings
        texts = None if settings.calibration == DEFAULT else settings.calibration
        return TextParts.read(
            self.engine, texts, settings.report_text, CHUNK, settings.calibration_tokens, settings.seed
        )

    @cached_property
    def statistics(self) -> Statistics | None:
        """The importance of columns: from a file, or by letting the model read."""
        if self.settings.imatrix is not None:
            statistics = read_imatrix(self.settings.imatrix)
            self.notices += check_of(statistics, self.settings.imatrix, self._shapes)
            return statistics
        return self._training[0] if self.settings.calibration else None

    @cached_property
    def _training(self) -> tuple[Statistics, Curvatures]:
        """What all matrices read of the calibration text: mean squares, and correlations where they will be wanted."""
        path = self._folder() / "imatrix.gguf"
        known = self.settings.resume and path.exists()
        statistics = read_imatrix(path) if known else Statistics(datasets=self.texts.names)
        curvatures = self._collected("calibrating", self.texts.training, None if known else statistics)
        if not known:
            write_imatrix(path, statistics)
        curvatures.weigh(statistics)
        self._collect_experts(curvatures, "calibrating", self.texts.training, self._well_read(statistics))
        return statistics, curvatures

    @property
    def _curvatures(self) -> Curvatures:
        return self._training[1]

    @cached_property
    def _held_out(self) -> Curvatures:
        """The correlations in the text to judge by."""
        statistics, training = self._training
        curvatures = self._collected("judging", self.texts.judging, None)
        curvatures.weigh(statistics)
        known = [matrix for matrix in self._well_read(statistics) if matrix in training]
        self._collect_experts(curvatures, "judging", self.texts.judging, known, LEAST_JUDGED)
        return curvatures

    def _collected(self, stage: str, chunks: Chunks, statistics: Statistics | None) -> Curvatures:
        tied = {"token_embd.weight": TIED_DAMPING} if "output.weight" not in self.source.tensors else {}
        n_cols = {name: shape[-1] for name, shape in self._shapes.items()}
        curvatures = Curvatures(self._folder() / stage, tied, n_cols, self.limits.curvatures)
        curvatures.collect(
            self.engine,
            chunks,
            self._shapes if self.feeds_back or self.probes else (),
            self.limits.hessians,
            statistics=statistics,
            resume=self.settings.resume,
            on_chunk=partial(self._progress, stage, ""),
        )
        return curvatures

    def _well_read(self, statistics: Statistics) -> list[str]:
        """The experts, as `matrix_of` has them, that read as many tokens as they have columns.

        Of fewer the Hessian is singular, and what it says of the columns mostly chance.
        """
        if not self.feeds_back:
            return []
        return [
            matrix_of(name, number)
            for name, shape in self._shapes.items()
            if len(shape) == 3 and name in statistics.counts and len(statistics.counts[name]) == shape[0]
            for number, count in enumerate(statistics.counts[name])
            if count >= shape[-1]
        ]

    def _collect_experts(
        self, curvatures: Curvatures, stage: str, chunks: Chunks, matrices: Sequence[str], least: int = 1
    ) -> None:
        """Collects the correlations in what these experts read, as far as time and the disk allow.

        least:  tokens that one must have read
        """
        if not matrices:
            return
        curvatures.collect(
            self.engine,
            chunks,
            matrices,
            self.limits.hessians,
            least=least,
            most=min(EXPERT_PASSES * self.limits.hessians, shutil.disk_usage(self._folder()).free // 2),
            resume=self.settings.resume,
            on_chunk=partial(self._progress, stage, ""),
        )

    # Rounding.

    def ways(self, name: str) -> tuple[str, ...]:
        """How a tensor is going to be rounded, of kernels_ahead.WAYS."""
        if self.statistics is None or self.statistics.importance(name) is None:
            return ("plain",)
        if self._experts(name):
            return ("feedback", "search")
        return ("feedback",) if self.feeds_back and name in self._curvatures else ("search",)

    def inputs(self, name: str) -> Inputs:
        """What is known of what a matrix multiplies."""
        importance = self.statistics.importance(name) if self.statistics is not None else None
        if not self.feeds_back:
            return Inputs(importance)
        if self._experts(name):
            assert importance is not None
            return Inputs(importance, of_expert=lambda number: self._known(matrix_of(name, number), importance[number]))
        return self._known(name, importance)

    def _known(self, matrix: str, importance: NDArray[np.float32] | None) -> Inputs:
        """What is known of the inputs of one matrix, of an expert only if there is text to judge by."""
        judged = self.settings.gptq != "on"
        if matrix not in self._curvatures or (judged and matrix not in self._held_out):
            return Inputs(importance)
        held_out = self._held_out(matrix) if judged else None
        return Inputs(importance, self._curvatures(matrix), held_out, n_bytes=self.limits.rows)

    def _experts(self, name: str) -> bool:
        """Whether error feedback is possible for experts of the tensor."""
        shape = self._shapes[name]
        return (
            self.feeds_back
            and len(shape) == 3
            and any(matrix_of(name, number) in self._curvatures for number in range(shape[0]))
        )

    def compile(self, jobs: Iterable[Job]) -> None:
        """Has the kernels at hand that round to these formats in these ways."""
        needed = sorted({job for job in jobs if job[0] in GRIDS})
        compile_ahead(needed, self.settings.n_threads, partial(self._progress, "compiling"))

    def forget(self) -> None:
        """Gives back what only rounding needs."""
        for name in ("_training", "_held_out"):
            curvatures = vars(self).get(name)
            if curvatures is not None:
                (curvatures[1] if isinstance(curvatures, tuple) else curvatures).forget()

    def sensitivity(
        self,
        tensors: Mapping[str, SourceTensor],
        offered: Callable[[SourceTensor], list[Format]],
        max_groups: int = probing.MAX_GROUPS,
    ) -> Sensitivity:
        """What each of these tensors costs the output in each type that it is offered."""
        path = self._folder() / "sensitivity.json"
        curvatures, held_out = self._curvatures, self._held_out
        possible = {format.name for tensor in tensors.values() for format in offered(tensor)}
        self.compile((name, "feedback" if self.feeds_back else "search") for name in possible)

        def on_step(found: Sensitivity, stage: str, done: int, of: int) -> None:
            found.save(path)  # so that a run that is killed goes on from here
            self._progress(stage, "", done, of)

        return probing.measure(
            self.engine,
            tensors,
            curvatures,
            self.texts.judging[:PROBE_CHUNKS],
            offered,
            held_out=held_out,
            with_feedback=self.feeds_back,
            max_groups=max_groups,
            n_bytes=self.limits.rows,
            n_threads=self.settings.n_threads,
            fingerprint=self.source.fingerprint,
            known=Sensitivity.load(path) if self.settings.resume and path.exists() else None,
            on_step=on_step,
        )


def _n_tokens(name: str | os.PathLike[str]) -> float:
    """How many tokens a text has, roughly: it is not read yet."""
    path = BUILT_IN.get(os.fspath(name), Path(name))
    return path.stat().st_size / BYTES
