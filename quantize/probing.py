"""Measures what the output of a running model loses when some of its tensors are rounded, and predicts the rest.

Groups of tensors are rounded coarsely, one group at a time, and the KL divergence of the model's output is taken; the
errors of their products with each format need no running model. See `edgert.quantize.sensitivity` for what is made of
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgert.errors import EdgertError
from edgert.quantize import feedback, grid, rounding
from edgert.quantize.divergence import log_softmax
from edgert.quantize.engine import Engine
from edgert.quantize.feedback import Curvature
from edgert.quantize.formats import FORMATS, Format
from edgert.quantize.memory import Limits
from edgert.quantize.rounding.grids import GRIDS
from edgert.quantize.sensitivity import Probe, Sensitivity
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
    values = tensor.sample(SAMPLE_ROWS)
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
            for logits in _pieces(engine, chunk):
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
            for logits in _pieces(self._engine, chunk):
                likely, log_p, rest_p = next(kept)
                log_q = np.take_along_axis(log_softmax(logits), likely, axis=1)
                total += float((np.exp(log_p) * (log_p - log_q)).sum(dtype=np.float64))
                total += float((rest_p * (np.log(rest_p) - np.log(_rest(log_q)))).sum(dtype=np.float64))
        return total / self.n_tokens


def _pieces(engine: Engine, chunk: Tokens) -> Iterator[Floats]:
    """The logits of a chunk's second half, a few rows at a time: what is worked out of them takes less than they do."""
    for logits in engine.pieces(chunk, len(chunk) // 2):
        step = max(1, PIECE_LOGITS // logits.shape[1])
        for start in range(0, len(logits), step):
            yield logits[start : start + step]


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
    n_bytes: int = Limits.rows,
    known: Iterable[Probe] = (),
    on_probe: Callable[[list[Probe], int], object] | None = None,
) -> tuple[list[Probe], int]:
    """Rounds group after group coarsely and measures the output; the model is as before afterwards.

    tensors:     the matrices of the engine's model that may be rounded, their rows a multiple of 32
    curvatures:  by name
    chunks:      int32 (n,) each; their second halves are scored
    n_bytes:     of float32 rows that are rounded at a time
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
                error += _round(engine, tensors[name], format, curvatures(name), with_feedback, n_threads, n_bytes)
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


def _round(
    engine: Engine,
    tensor: SourceTensor,
    format: Format,
    curvature: Curvature,
    with_feedback: bool,
    n_threads: int,
    n_bytes: int,
) -> float:
    """Gives a tensor of the engine's model the values that the format leaves; their relative output error."""
    error = whole = 0.0
    for start, stop in tensor.slabs(n_bytes):
        values = tensor.rows(start, stop)
        if with_feedback:
            data = feedback.quantize(values, format, curvature, n_threads=n_threads)
        else:
            data = rounding.quantize(values, format, curvature.importance, n_threads=n_threads)
        rounded = format.dequantize(data)
        engine.replace(tensor.name, rounded, start)
        whole += feedback.output_error(values, curvature.hessian)
        error += feedback.output_error(rounded - values, curvature.hessian)
    return error / max(whole, 1e-30)


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
    n_bytes: int = Limits.rows,
    fingerprint: str = "",
    known: Sensitivity | None = None,
    on_step: Callable[[Sensitivity, str, int, int], object] | None = None,
) -> Sensitivity:
    """Probes the model and works out the errors of every tensor in every format that it is offered.

    formats:  what is offered to a tensor
    known:    what a run that was stopped had found: it is not measured again
    on_step:  called with (all that is found so far, stage, steps done, all), probes being the steps of the first stage
              and tensors those of the second

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
            on_step(found, "probing", len(probes), n_probes)

    found.probes, found.n_tokens = probe(
        engine,
        probed,
        curvatures,
        chunks,
        with_feedback=with_feedback,
        max_groups=max_groups,
        n_threads=n_threads,
        n_bytes=n_bytes,
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
            on_step(found, "measuring", i + 1, len(probed))
    return found
