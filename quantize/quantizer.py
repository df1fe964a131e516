"""From a model of floats to one of few bits: calibrate, plan, round tensor by tensor, write, compare."""

from __future__ import annotations

import errno
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edgert.errors import DoesNotFitError, ModelFileError, RequestError, UnsupportedFormatError
from edgert.quantize import comparison, encoding, memory, work_folder
from edgert.quantize.allocation import Pins, offered
from edgert.quantize.calibration import unreached
from edgert.quantize.encoding import Inputs
from edgert.quantize.engine import open_engine
from edgert.quantize.gguf_layout import TensorPlan
from edgert.quantize.gguf_layout import plan as layout
from edgert.quantize.gguf_value import Value
from edgert.quantize.gguf_writer import Writer
from edgert.quantize.measuring import CHUNK, Measuring
from edgert.quantize.mixes import MIXES
from edgert.quantize.planning import Loss, Plan, Planner
from edgert.quantize.prior import Prior
from edgert.quantize.progress import OnProgress, silent
from edgert.quantize.report import Domain, Report, quality_metadata
from edgert.quantize.rounding import GRIDS
from edgert.quantize.settings import CALIBRATION_TOKENS, DEFAULT, Budget, Settings, n_bytes
from edgert.quantize.source import Source, open_source
from edgert.quantize.target import check_room, check_target
from edgert.quantize.text_parts import Chunks
from edgert.quantize.work_folder import WorkFolder

Names = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
FEW_TOKENS = 8192  # calibrated on less, rounding is fitted to chance


def quantize(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str] | None,
    *,
    budget: Budget | float | int | str | None = None,
    calibration: Names | None = None,
    calibration_tokens: int = CALIBRATION_TOKENS,
    imatrix: str | os.PathLike[str] | None = None,
    sensitivity: str | os.PathLike[str] | None = None,
    gptq: str = "auto",
    tensor_types: Mapping[str, str] | None = None,
    output_type: str | None = None,
    embedding_type: str | None = None,
    keep: str | Sequence[str] = (),
    dry_run: bool = False,
    resume: bool = False,
    report: bool | None = None,
    report_text: Names = (),
    seed: int = 0,
    n_threads: int | None = None,
    max_memory: int | str | None = None,
    split_max_size: int | str | None = None,
    allow_requantize: bool = False,
    progress: OnProgress = silent,
) -> Report:
    """Writes a GGUF model of few bits.

    source:        a Hugging Face folder, or a GGUF file of floats
    out:           the file to write; None together with dry_run
    budget:        bits per weight (4.8 without it), a size such as "95MB", or the name of one of llama.cpp's mixes
                   such as "q4_k_m" or of one type
    calibration:   a file or the name of a text set, or several; () for none; None for all sets
    calibration_tokens: of those texts that are read at most
    imatrix:       importances from a file, in place of calibrating
    sensitivity:   what `edgert sensitivity` measured, in place of measuring
    gptq:          "auto", "on" or "off": error feedback
    tensor_types:  {regular expression: type} for tensors by name; output_type and embedding_type likewise
    keep:          regular expressions of tensors that stay as they are, or one
    report:        compare the result with the source on held-out text; None: where there was text
    report_text:   the held-out texts, or one; () for the usual ones
    max_memory:    bytes, or a size such as "1.5GiB", that this process may take at its peak; None: what suits the work
    progress:      called with (stage, tensor or text, done, total)

    Raises: EdgertError and its subclasses, when the source, the disk or a setting is at fault. What was under the
        name `out` stays as it is until the new file is whole.
    """
    pins = Pins(tuple((tensor_types or {}).items()), _names(keep), output_type, embedding_type)
    for field, value, least in (
        ("calibration_tokens", calibration_tokens, 1), ("seed", seed, 0), ("n_threads", n_threads or 0, 0),
    ):  # fmt: skip
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise RequestError.wrong(field, f"an integer, {least} at least", value)
    if gptq not in ("auto", "on", "off"):
        raise RequestError.wrong("gptq", "auto, on or off", gptq)
    names = DEFAULT if calibration is None else _names(calibration)
    settings = Settings(
        budget=Budget.of(budget),
        calibration=() if imatrix is not None else names,
        calibration_tokens=calibration_tokens,
        imatrix=None if imatrix is None else Path(imatrix),
        sensitivity=None if sensitivity is None else Path(sensitivity),
        gptq=gptq,  # type: ignore[arg-type]
        pins=pins,
        resume=resume,
        seed=seed,
        n_threads=n_threads or _n_processors(),
        max_memory=None if max_memory is None else n_bytes(max_memory, "max_memory"),
        split_max_size=None if split_max_size is None else n_bytes(split_max_size, "split_max_size"),
        report=bool(names or report_text) if report is None else report,
        report_text=_names(report_text),
    )
    with open_source(Path(source), allow_requantize=allow_requantize) as opened:
        if dry_run or out is None:
            return Quantizer(opened, None, settings, progress).plan_only()
        return Quantizer(opened, Path(out), settings, progress).run()


class Quantizer:
    """One quantization of an open source."""

    def __init__(self, source: Source, out: Path | None, settings: Settings, progress: OnProgress) -> None:
        self.source, self.out, self.settings = source, out, settings
        self.planner = Planner(source, settings.pins)
        self._started = time.monotonic()
        self._resources = ExitStack()
        self.measuring = Measuring(source, settings, self.planner.shapes, lambda: self._work, progress)
        self._progress = self.measuring.forecast
        self._resources.callback(self.measuring.close)

    def plan_only(self) -> Report:
        """What would be written."""
        self.measuring.check()
        self.measuring.foretell(self._types, rounds=False)
        with self._resources:
            plan = self._plan()
            report = self._final_report(plan)
            parts = layout(Path("x.gguf"), self._metadata, self._tensors(plan), self.settings.split_max_size)
            report.n_bytes = sum(part.n_bytes for part in parts)
            return report

    def run(self) -> Report:
        """Writes the file."""
        assert self.out is not None
        check_target(self.out, [*self.source.files, *self.settings.files])
        self.measuring.check()
        if not self.settings.resume:  # much of it may be done
            self.measuring.foretell(self._types)
        try:
            with self._resources:
                report = self._run(self.out)
        except (ModelFileError, RequestError, UnsupportedFormatError):
            self._forget()  # going on would meet the same again
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DoesNotFitError(
                    f"The disk became full while {self.out} was made: make room and run the same again with --resume, "
                    f"or delete {self.out}.work."
                ) from error
            raise
        if not self.settings.resume:
            self.measuring.forecast.end()
        self._forget()
        work_folder.remove_left(self.out)
        report.seconds = time.monotonic() - self._started
        report.peak_memory = memory.peak()
        return report

    def _run(self, out: Path) -> Report:
        plan = self._plan()
        report = self._final_report(plan)
        with Writer(
            out,
            self._metadata,
            self._tensors(plan),
            split_max_size=self.settings.split_max_size,
            resume=self.settings.resume,
            fingerprint=f"{self.source.fingerprint} {self.settings.decisive}",
        ) as writer:
            self._write(writer, plan, report)
            if self._domains:
                report.domains = self._compare(writer)
            figures = report.metadata() | quality_metadata(report.domains)
            writer.update(plan.metadata(self._shapes) | _values(figures))
        report.paths, report.n_bytes = tuple(str(path) for path in writer.paths), writer.n_bytes
        return report

    def _forget(self) -> None:
        """Removes what a later run could have used again."""
        if "_work_folder" in vars(self):
            self._work_folder.remove()

    # What is known before a type is chosen.

    @property
    def _types(self) -> set[str]:
        """That tensors may take."""
        if (mix := self.settings.budget.mix) is not None:
            return {MIXES[mix]}
        return {format.name for shape in self.planner.shapes.values() for format in offered(shape)}

    @cached_property
    def _work(self) -> Path:
        """Where what a resumed run may use again lies: beside the result, or nowhere lasting where there is none."""
        if self.out is None:
            return Path(self._resources.enter_context(TemporaryDirectory(prefix="edgert-")))
        return self._work_folder.path

    @cached_property
    def _work_folder(self) -> WorkFolder:
        assert self.out is not None
        made_for = f"{self.source.fingerprint} {self.settings.measured}"
        folder = WorkFolder(work_folder.beside(self.out), made_for, resume=self.settings.resume)
        self._resources.callback(folder.close)
        return folder

    # Which type each tensor takes.

    def _plan(self) -> Plan:
        settings = self.settings
        if settings.budget.mix is not None:
            return self.planner.mixed(settings.budget.mix, calibrated=not settings.fast)
        # What is too little is refused before all measuring: the budget, and the disk.
        room = self.planner.room(settings.budget, self._n_header(self.source.metadata))
        if self.out is not None and not settings.resume:
            check_room(Path(os.path.realpath(self.out)), min(room, self.planner.most))
        plan = self.planner.allocated(self.planner.room(settings.budget, self._n_header(self._metadata)), self._loss())
        if self._guesses:
            return replace(plan, predicted_loss=None)
        if n_pinned := len(self.planner.shapes) - len(self.planner.open):
            self.measuring.notices.append(
                f"the prediction leaves out the {n_pinned} tensor{'s' * (n_pinned > 1)} whose types were given"
            )
        return plan

    def _n_header(self, metadata: Mapping[str, Value]) -> int:
        return len(layout(Path("x.gguf"), metadata, self._tensors(self.planner.floats()))[0].header)

    @property
    def _guesses(self) -> bool:
        """Whether losses come from experience and are no divergence."""
        return self.settings.sensitivity is None and not self.settings.calibration

    def _loss(self) -> Loss:
        """How much each tensor's type costs: measured, or by experience."""
        settings = self.settings
        if settings.sensitivity is not None:
            measured = self.measuring.known
            assert measured is not None
            if measured.fingerprint != self.source.fingerprint:
                self.measuring.notices.append(
                    f"{settings.sensitivity} was measured on another copy or version of the source"
                )
            return measured.loss
        tensors = {name: self.source.tensors[name] for name in self.planner.open}
        if self._guesses:
            possible = {format.name for name in tensors for format in self.planner.offered(name)}
            self.measuring.compile((name, "plain") for name in possible)
            return Prior(self.source, settings.n_threads).loss
        return self.measuring.sensitivity(tensors, lambda tensor: self.planner.offered(tensor.name)).loss

    # The file.

    @property
    def _domains(self) -> dict[str, Chunks]:
        """The held-out texts that the result is compared with its source on."""
        return self.measuring.texts.held_out if self.settings.report else {}

    @cached_property
    def _metadata(self) -> dict[str, Value]:
        """The keys of the file, with room for what is known only at the end."""
        unknown = dict.fromkeys(self._domains, Domain(0, 0.0, 0.0, 0.0, 0.0, 0.0))
        facts = self._report(self.planner.floats()).metadata() | quality_metadata(unknown)
        return self.source.metadata | self.planner.floats().metadata(self._shapes) | _values(facts)

    def _tensors(self, plan: Plan) -> list[TensorPlan]:
        """The tensors in the order of the file."""
        return [(name, self.source.tensors[name].shape, format) for name, format in plan.types.items()]

    def _write(self, writer: Writer, plan: Plan, report: Report) -> None:
        """Rounds and writes what is still missing."""
        sizes = {name: math.prod(shape) for name, shape in report.shapes.items()}
        total, pending = sum(sizes.values()), list(writer.pending)
        done = total - sum(sizes[name] for name in pending)
        rounded = {name for name in pending if plan.types[name] is not self.source.tensors[name].format}
        self.measuring.compile(
            (plan.types[name].name, way) for name in pending if name in rounded for way in self.measuring.ways(name)
        )
        experts: Counter[str] = Counter()
        for name in pending:
            self._progress("quantizing", name, done, total)
            tensor, format = self.source.tensors[name], plan.types[name]
            inputs = self.measuring.inputs(name) if name in rounded and format.name in GRIDS else Inputs()
            try:
                methods, pieces = encoding.encode(tensor, format, inputs, self.settings.n_threads)
                for piece in pieces:
                    writer.write(name, piece)
            except ModelFileError:
                writer.discard()  # a damaged tensor stays damaged
                raise
            report.methods[name] = "feedback" if "feedback" in methods else methods[0]
            if inputs.of_expert is not None:
                experts.update(methods)
            done += sizes[name]
        if experts:
            report.notices.append(
                f"error feedback was taken for {experts['feedback']:,} of the {experts.total():,} experts' matrices; "
                "the others read too little of the text, or erred less without it"
            )
        self._progress("quantizing", "", total, total)

    def _compare(self, writer: Writer) -> dict[str, Domain]:
        """How far what was written is from its source."""
        self.measuring.forget()
        path = comparison.under_a_name(writer.written(), writer.paths, self._work)
        found = {}
        with open_engine(path, n_ctx=CHUNK, n_threads=self.settings.n_threads, weights_as=None) as result:
            for name, chunks in self._domains.items():
                tell = partial(self._progress, "comparing", name)
                found[name] = Domain.of(comparison.compare(self.measuring.engine, result, chunks, tell))
        return found

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.source.tensors.items()}

    def _final_report(self, plan: Plan) -> Report:
        """With a notice of tensors that fill more than a file by themselves."""
        report, most = self._report(plan), self.settings.split_max_size
        large = [name for name in report.types if most is not None and report.bytes_of(name) > most]
        if large:
            others = f" and {len(large) - 1} others" if len(large) > 2 else f" and {large[1]}" if large[1:] else ""
            report.notices.append(
                f"{large[0]}{others} alone exceed{'' if others else 's'} the {most:,} bytes of a file, "
                "and no tensor is cut"
            )
        return report

    def _report(self, plan: Plan) -> Report:
        source, statistics = self.source, self.measuring.statistics
        types = sorted({tensor.format.name for tensor in source.tensors.values()})
        n_tokens = statistics.n_chunks * statistics.chunk_size if statistics else 0
        if statistics and self.settings.calibration and n_tokens < FEW_TOKENS:
            self.measuring.notices.append(
                f"calibrated on {n_tokens:,} tokens only: {FEW_TOKENS:,} or more tell what matters"
            )
        if statistics and (lacking := unreached(statistics, self.planner.shapes)):
            self.measuring.notices.append(lacking)
        return Report(
            source=str(source.path),
            source_types=tuple(types),
            requantized=source.is_quantized,
            types={name: format.name for name, format in plan.types.items()},
            shapes=self._shapes,
            fallbacks=list(plan.fallbacks),
            skipped=list(source.skipped),
            notices=[*source.notices, *dict.fromkeys(self.measuring.notices)],
            calibration=tuple(Path(name).name for name in statistics.datasets) if statistics else (),
            calibration_tokens=n_tokens,
            predicted_kld=plan.predicted_loss,
        )


def _values(facts: Mapping[str, Any]) -> dict[str, Value]:
    """Facts as values of a file."""
    return {key: _value(fact) for key, fact in facts.items()}


def _value(fact: bool | int | float | str) -> Value:
    if isinstance(fact, bool):
        return Value.boolean(fact)
    if isinstance(fact, int):
        return Value.u32(fact)
    return Value.f32(fact) if isinstance(fact, float) else Value.string(fact)


def _names(given: Names) -> tuple[str, ...]:
    """One or several as text."""
    return tuple(os.fspath(item) for item in ([given] if isinstance(given, str | os.PathLike) else given))


def _n_processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
