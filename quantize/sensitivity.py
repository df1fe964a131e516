"""How much a model's predictions suffer from each tensor in each format.

A few groups of tensors are rounded coarsely, one group at a time, and the KL divergence of the model's output is
measured. It grows in proportion to the relative output errors e = tr(dW H dW^T) / tr(W H W^T) of the group's tensors,
H being the Hessian of their inputs; so one probe gives the factor, and e, which needs no running model, the rest.
Groups are rounded as the model will be, with error feedback or without: what feedback leaves of an error weighs more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import EdgertError, ModelFileError
from edgert.quantize import feedback, grid, rounding
from edgert.quantize.divergence import log_softmax
from edgert.quantize.engine import Engine
from edgert.quantize.feedback import Curvature
from edgert.quantize.formats import FORMATS, Format
from edgert.quantize.rounding.grids import GRIDS
from edgert.quantize.source_tensor import SourceTensor

Floats = NDArray[np.float32]
Tokens = NDArray[np.int32]

# What groups are rounded to, by whether blocks of 256 divide their rows: with errors far above the engine's own.
PROBES = {True: "Q4_K", False: "IQ4_NL"}
LARGE_PROBES = {True: "Q5_K", False: "Q5_0"}  # of a tensor that holds more than LARGE of all weights
LARGE = 0.1
MAX_GROUPS = 64
SAMPLE_ROWS = 512  # of a tensor, whose errors stand for all
N_LIKELY = 512  # tokens of a prediction that are compared one by one; the others count together
PIECE_LOGITS = 1 << 20  # compared at a time
VERSION = 1
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Probe:
    """What rounding some tensors to a format did to the output: KL divergence, beside their summed errors."""

    tensors: tuple[str, ...]
    format: str
    kld: float
    error: float


@dataclass
class Sensitivity:
    """Predicted KL divergence of a model's output by tensor and format.

    fingerprint:  of the source that was measured
    errors:       relative output errors by tensor and format
    factors:      by tensor, KL divergence (nats a token) for each unit of error
    probes:       what was measured
    n_tokens:     on how many predictions
    """

    fingerprint: str = ""
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    probes: list[Probe] = field(default_factory=list)
    n_tokens: int = 0

    def loss(self, name: str, format: Format | str) -> float:
        """The predicted divergence when only this tensor is rounded; floats that were not measured lose nothing.

        Raises: EdgertError for what was not measured.
        """
        errors = self.errors.get(name, {})
        if str(format) not in errors and str(format) in FLOATS:
            return 0.0
        if str(format) not in errors:
            raise EdgertError(f"The sensitivities do not hold {name} as {format}: measure them again for this model.")
        return self.factors[name] * errors[str(format)]

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        content = {"kind": "edgert sensitivity", "version": VERSION, **asdict(self)}
        part = Path(f"{path}.part")  # a stop meanwhile leaves what was there
        part.write_text(json.dumps(content, indent=1), encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Sensitivity:
        """Reads what save() wrote. Raises: ModelFileError for anything else."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["kind"] != "edgert sensitivity" or content["version"] != VERSION:
                raise ValueError(f"kind {content['kind']!r}, version {content['version']!r}")
            made = cls(
                str(content["fingerprint"]),
                {name: {f: float(e) for f, e in every.items()} for name, every in content["errors"].items()},
                {name: float(factor) for name, factor in content["factors"].items()},
                [
                    Probe(tuple(p["tensors"]), p["format"], float(p["kld"]), float(p["error"]))
                    for p in content["probes"]
                ],
                int(content["n_tokens"]),
            )
            numbers = [*made.factors.values(), *(e for every in made.errors.values() for e in every.values())]
            if not all(np.isfinite(x) and x >= 0 for x in numbers):
                raise ValueError("numbers that are negative or not finite")
            if not set(made.factors) >= set(made.errors) or not {f for e in made.errors.values() for f in e} <= set(
                FORMATS
            ):
                raise ValueError("tensors or formats that do not agree")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelFileError(
                f"{path} holds no sensitivities of edgert's version {VERSION} ({error}): measure them again."
            ) from None
        return made


def errors_of(
    tensor: SourceTensor,
    formats: Iterable[Format | str],
    curvature: Curvature,
    held_out: Curvature | None = None,
    *,
    with_feedback: bool = True,
    n_threads: int = 1,
) -> dict[str, float]:
    """The relative output error of a tensor in each format, by rounding some of its rows.

    held_out:       of inputs other than those that rounding is given; without it the same
    with_feedback:  round as feedback.quantize does, else as rounding.quantize
    """
    values = _sample(tensor)
    judge = held_out or curvature
    whole = max(feedback.output_error(values, judge.hessian), 1e-30)
    found = {}
    for one in formats:
        format = FORMATS[str(one)]
        if format.name not in GRIDS:
            difference = format.dequantize(rounding.quantize(values, format)) - values
            found[format.name] = feedback.output_error(difference, judge.hessian) / whole
            continue
        if format.name == "Q4_0" and grid.lies_on_q4_0([values]):
            data = grid.encode(values, rounding.quantize(values, format, n_threads=n_threads))
        elif with_feedback:
            data = feedback.quantize(values, format, curvature, n_threads=n_threads)
        else:
            data = rounding.quantize(values, format, curvature.importance, n_threads=n_threads)
        found[format.name] = feedback.output_error(format.dequantize(data) - values, judge.hessian) / whole
    return found


def _sample(tensor: SourceTensor) -> Floats:
    """Rows from all over the tensor, in runs of sixteen: float32 (at most SAMPLE_ROWS, n_cols)."""
    if tensor.n_rows <= SAMPLE_ROWS:
        return tensor.rows()
    starts = np.linspace(0, tensor.n_rows - 16, SAMPLE_ROWS // 16).astype(int)
    return np.concatenate([tensor.rows(start, start + 16) for start in starts.tolist()])


def groups_of(names: Iterable[str], max_groups: int = MAX_GROUPS) -> list[tuple[str, ...]]:
    """Tensors that are probed together: each alone while they are few, else those of one kind in some layers.

    The first and the last layer, which differ most from their neighbours, stay alone.
    """
    kinds: dict[str, dict[int, str]] = {}
    groups: list[tuple[str, ...]] = []
    for name in names:
        found = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if found:
            kinds.setdefault(found[2], {})[int(found[1])] = name
        else:
            groups.append((name,))
    room = max(1, (max_groups - len(groups)) // max(1, len(kinds)))
    for layers in kinds.values():
        order = sorted(layers)
        if len(order) <= room:
            bands = [[layer] for layer in order]
        elif room < 3:
            bands = [list(band) for band in np.array_split(order, room)]
        else:
            middle = [list(band) for band in np.array_split(order[1:-1], room - 2)]
            bands = [order[:1], *middle, order[-1:]]
        groups += [tuple(layers[int(layer)] for layer in band) for band in bands]
    return groups


class Baseline:
    """What a model says on some texts before its tensors are changed.

    Of each prediction the likeliest tokens are kept; the others count as one, so that the divergence is at most the
    true one, and a large vocabulary needs no more memory than a small one.
    """

    def __init__(self, engine: Engine, chunks: Sequence[Tokens]) -> None:
        """Runs the chunks, int32 (n,) each; the second half of each is compared."""
        self._engine, self._chunks = engine, chunks
        self._kept: list[tuple[NDArray[np.int32], Floats, Floats]] = []
        for chunk in chunks:
            for logits in _pieces(engine.logits(chunk, len(chunk) // 2)):
                log_p = log_softmax(logits)
                n_likely = min(N_LIKELY, log_p.shape[1] - 1)
                likely = np.argpartition(log_p, -n_likely, axis=1)[:, -n_likely:].astype(np.int32)
                top = np.take_along_axis(log_p, likely, axis=1)
                self._kept.append((likely, top, _rest(top)))
        self.n_tokens = sum(len(top) for _, top, _ in self._kept)

    def divergence(self) -> float:
        """The mean KL divergence (base || model as it is now) of a token, in nats."""
        total, kept = 0.0, iter(self._kept)
        for chunk in self._chunks:
            for logits in _pieces(self._engine.logits(chunk, len(chunk) // 2)):
                likely, log_p, rest_p = next(kept)
                log_q = np.take_along_axis(log_softmax(logits), likely, axis=1)
                total += float((np.exp(log_p) * (log_p - log_q)).sum(dtype=np.float64))
                total += float((rest_p * (np.log(rest_p) - np.log(_rest(log_q)))).sum(dtype=np.float64))
        return total / self.n_tokens


def _pieces(logits: Floats) -> Iterator[Floats]:
    """A few rows at a time, so that what is worked out of them takes less memory than they do."""
    step = max(1, PIECE_LOGITS // logits.shape[1])
    return (logits[start : start + step] for start in range(0, len(logits), step))


def _rest(log_likely: Floats) -> Floats:
    """The probability of all other tokens; a little when rounding leaves none."""
    left: Floats = 1 - np.exp(log_likely).sum(axis=1, dtype=np.float64)
    return np.maximum(left, 1e-7)


def probe(
    engine: Engine,
    tensors: Mapping[str, SourceTensor],
    curvatures: Callable[[str], Curvature],
    chunks: Sequence[Tokens],
    *,
    with_feedback: bool = True,
    max_groups: int = MAX_GROUPS,
    n_threads: int = 1,
    known: Iterable[Probe] = (),
    on_probe: Callable[[list[Probe], int], object] | None = None,
) -> tuple[list[Probe], int]:
    """Rounds group after group coarsely and measures the output; the model is as before afterwards.

    tensors:     the matrices of the engine's model that may be rounded, their rows a multiple of 32
    curvatures:  by name
    chunks:      int32 (n,) each; their second halves are scored
    known:       probes that were made before and need not be made again
    on_probe:    called with (probes so far, how many there will be)

    Returns the probes, and how many predictions each was measured on.
    Raises: EdgertError when the model's values are not finite.
    """
    groups = groups_of(tensors, max_groups)
    n_weights = sum(tensor.n_rows * tensor.n_cols for tensor in tensors.values())
    before = {(one.tensors, one.format): one for one in known}
    baseline: Baseline | None = None
    probes: list[Probe] = []
    for group in groups:
        format = _probe_format([tensors[name] for name in group], n_weights)
        if (group, format.name) in before:
            probes.append(before[group, format.name])
            continue
        baseline = baseline or Baseline(engine, chunks)
        error = 0.0
        try:
            for name in group:
                rounded, relative = _rounded(tensors[name], format, curvatures(name), with_feedback, n_threads)
                error += relative
                engine.replace(name, rounded)
            kld = baseline.divergence()
        finally:
            for name in group:
                engine.replace(name, None)
        if not np.isfinite(kld):
            raise EdgertError(f"Rounding {', '.join(group)} made the model's output NaN: it cannot be measured.")
        probes.append(Probe(group, format.name, max(kld, 0.0), error))
        if on_probe:
            on_probe(probes, len(groups))
    return probes, sum(len(chunk) - len(chunk) // 2 for chunk in chunks)


def _probe_format(group: Sequence[SourceTensor], n_weights: int) -> Format:
    """What a group is rounded to, in a model of so many weights."""
    large = sum(tensor.n_rows * tensor.n_cols for tensor in group) > LARGE * n_weights * len(group)
    wide = all(tensor.n_cols % 256 == 0 for tensor in group)
    return FORMATS[(LARGE_PROBES if large else PROBES)[wide]]


def _rounded(
    tensor: SourceTensor, format: Format, curvature: Curvature, with_feedback: bool, n_threads: int
) -> tuple[Floats, float]:
    """A tensor's values as the format leaves them, and their relative output error."""
    rounded = np.empty((tensor.n_rows, tensor.n_cols), np.float32)
    error = whole = 0.0
    for start, stop in tensor.slabs():
        values = tensor.rows(start, stop)
        if with_feedback:
            data = feedback.quantize(values, format, curvature, n_threads=n_threads)
        else:
            data = rounding.quantize(values, format, curvature.importance, n_threads=n_threads)
        rounded[start:stop] = format.dequantize(data)
        whole += feedback.output_error(values, curvature.hessian)
        error += feedback.output_error(rounded[start:stop] - values, curvature.hessian)
    return rounded, error / max(whole, 1e-30)


def factors_of(probes: Iterable[Probe]) -> dict[str, float]:
    """KL divergence for each unit of error, by tensor."""
    return {name: probe.kld / probe.error if probe.error else 0.0 for probe in probes for name in probe.tensors}


def measure(
    engine: Engine,
    tensors: Mapping[str, SourceTensor],
    curvatures: Callable[[str], Curvature],
    chunks: Sequence[Tokens],
    formats: Callable[[SourceTensor], Iterable[Format | str]],
    *,
    held_out: Callable[[str], Curvature] | None = None,
    with_feedback: bool = True,
    max_groups: int = MAX_GROUPS,
    n_threads: int = 1,
    fingerprint: str = "",
    known: Sensitivity | None = None,
    on_step: Callable[[Sensitivity, int, int], object] | None = None,
) -> Sensitivity:
    """Probes the model and works out the errors of every tensor in every format that it is offered.

    formats:  what is offered to a tensor
    known:    what a run that was stopped had found: it is not measured again
    on_step:  called with (all that is found so far, steps done, all): first probes, then tensors

    Other arguments as in probe() and errors_of().
    Raises: as they do.
    """
    found, known = Sensitivity(fingerprint), known or Sensitivity()
    found.errors = {name: errors for name, errors in known.errors.items() if name in tensors}
    probed = {name: t for name, t in tensors.items() if t.n_cols % FORMATS[PROBES[False]].block_size == 0}

    def on_probe(probes: list[Probe], n_probes: int) -> None:
        found.probes = probes
        found.factors = dict.fromkeys(found.errors, 0.0) | factors_of(probes)
        if on_step:
            on_step(found, len(probes), n_probes + len(probed))

    found.probes, found.n_tokens = probe(
        engine,
        probed,
        curvatures,
        chunks,
        with_feedback=with_feedback,
        max_groups=max_groups,
        n_threads=n_threads,
        known=known.probes,
        on_probe=on_probe,
    )
    found.factors = factors_of(found.probes)
    for i, (name, tensor) in enumerate(probed.items()):
        wanted = [one for one in formats(tensor) if str(one) not in found.errors.get(name, {})]
        if wanted:
            found.errors[name] = found.errors.get(name, {}) | errors_of(
                tensor,
                wanted,
                curvatures(name),
                held_out(name) if held_out else None,
                with_feedback=with_feedback,
                n_threads=n_threads,
            )
        if on_step:
            on_step(found, len(found.probes) + i + 1, len(found.probes) + len(probed))
    return found


def table(found: Sensitivity, formats: Sequence[str] | None = None) -> tuple[list[str], list[dict[str, Any]]]:
    """What a user reads: one row for each probed group with its predicted divergence by format.

    Returns the formats, and rows of group, tensors and kld (by format, None where a row does not divide).
    """
    measured = {f for every in found.errors.values() for f in every}
    names = list(formats or sorted(measured, key=lambda name: (FORMATS[name].bits_per_weight, name)))
    rows = []
    for one in found.probes:
        kld: dict[str, float | None] = {}
        for format in names:
            fits = all(format in found.errors.get(name, {}) for name in one.tensors)
            kld[format] = sum(found.loss(name, format) for name in one.tensors) if fits else None
        rows.append({"group": label(one.tensors), "tensors": list(one.tensors), "kld": kld})
    return names, rows


def label(group: Sequence[str]) -> str:
    """A short name: `ffn_down 0-3`."""
    layers = [re.fullmatch(r"blk\.(\d+)\.(.+?)(?:\.weight)?", name) for name in group]
    if not all(layers):
        return group[0].removesuffix(".weight")
    numbers = [int(found[1]) for found in layers if found]
    kind = layers[0][2] if layers[0] else ""
    return f"{kind} {numbers[0]}" if len(numbers) == 1 else f"{kind} {numbers[0]}-{numbers[-1]}"
