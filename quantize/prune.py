"""Depth pruning: layers leave a model one by one, always those without which its predictions change least.

Source: the idea of ShortGPT (2403.03853) and of Gromov et al. (2403.17887), with the divergence measured at each step
on the model as it is by then, in place of a guess from the similarity of a layer's input and output. Experimental:
what is lost is lost without a training afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from edgert.errors import RequestError
from edgert.quantize import encoding
from edgert.quantize.architecture import Architecture, Layer, describe
from edgert.quantize.encoding import Inputs
from edgert.quantize.engine import Engine, open_engine
from edgert.quantize.formats import FORMATS
from edgert.quantize.gguf_file import Metadata, Model
from edgert.quantize.gguf_layout import TensorPlan
from edgert.quantize.gguf_value import Kind, Value
from edgert.quantize.gguf_writer import Writer
from edgert.quantize.planning import Plan
from edgert.quantize.probing import Baseline
from edgert.quantize.progress import OnProgress, silent
from edgert.quantize.source import Source, open_source
from edgert.quantize.source_tensor import SourceTensor
from edgert.quantize.target import check_target
from edgert.quantize.text_parts import TextParts

CHUNK = 512  # tokens that the model reads at a time
CHUNKS = 8  # of the text that decides, and as many of the text that only judges
OUTPUTS = ("attn_output.weight", "ffn_down.weight")  # what a layer adds to the residual stream goes through these
REMOVED = "edgert.prune.removed"  # the key of a file that tells which layers of the source it lacks

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Step:
    """Layers that went together, by the source's numbers, and the mean KLD (nats) from the source since then.

    kld:       on the text that decided
    held_out:  on text that did not
    """

    layers: tuple[int, ...]
    kld: float
    held_out: float


@dataclass
class Pruned:
    """steps: in the order in which they were taken; n_layer: how many layers are left."""

    paths: tuple[str, ...] = ()
    n_bytes: int = 0
    n_layer: int = 0
    steps: list[Step] = field(default_factory=list)

    @property
    def removed(self) -> list[int]:
        return sorted(layer for step in self.steps for layer in step.layers)


def prune(
    source: str | Path | Source,
    out: str | Path,
    n_layers: int,
    *,
    calibration: Sequence[str] | None = None,
    n_threads: int | None = None,
    allow_requantize: bool = False,
    progress: OnProgress = silent,
    on_step: Callable[[Step], object] | None = None,
) -> Pruned:
    """Writes a GGUF file without n_layers of the source's layers; what stays keeps its type.

    source:       a Hugging Face folder, or a GGUF file
    calibration:  files and names of text sets; None: those that come with the package
    progress:     called with (stage, layers on trial, done, total)
    on_step:      called when layers have gone

    Raises: RequestError for a number of layers that cannot go; EdgertError and its subclasses, when the source, the
        disk or a text is at fault.
    """
    if not isinstance(source, Source):
        with open_source(source, allow_requantize=allow_requantize) as opened:
            return prune(opened, out, n_layers, calibration=calibration, n_threads=n_threads, progress=progress,
                         on_step=on_step)  # fmt: skip
    out = Path(out)
    check_target(out, [*source.files, *(calibration or ())])
    architecture = source.describe()
    n_steps, units = _steps(architecture, n_layers)
    _check_alike(source, architecture, list(range(n_layers)))  # whatever goes: what stays is numbered anew
    result = Pruned(n_layer=architecture.n_layer - n_layers)
    with open_engine(source, n_ctx=CHUNK, n_threads=n_threads) as engine:
        texts = TextParts.read(engine, calibration, (), CHUNK, 2 * CHUNKS * CHUNK)
        result.steps = _choose(engine, architecture, units, n_steps, texts, progress, on_step)
    result.paths, result.n_bytes = write_without(source, out, result.removed, progress)
    return result


def write_without(
    source: Source, out: Path, removed: Collection[int], progress: OnProgress = silent
) -> tuple[tuple[str, ...], int]:
    """Writes the source without some of its layers, whole units of `units_of`: the files and their bytes.

    Raises: RequestError for a family in which the number of layers decides something else; ModelFileError.
    """
    _check_alike(source, source.describe(), removed)
    return _write(source, out, removed, progress)


def units_of(layers: Sequence[Layer]) -> list[tuple[int, ...]]:
    """What can go without changing which kind of layer comes where: single layers, or whole periods of them."""
    n = len(layers)
    period = next(p for p in range(1, n + 1) if all(layers[i] == layers[i + p] for i in range(n - p)))
    return [tuple(range(first, first + period)) for first in range(0, n - period + 1, period)]


def _steps(architecture: Architecture, n_layers: int) -> tuple[int, list[tuple[int, ...]]]:
    """How many units go, and all of them."""
    units = units_of(architecture.layers)
    period = len(units[0])
    if not 1 <= n_layers < architecture.n_layer:
        raise RequestError.wrong("layers", f"from 1 to {architecture.n_layer - 1}", n_layers)
    if n_layers % period or n_layers // period >= len(units):
        room = period * (len(units) - 1)
        allowed = f"a multiple of {period}, {room} at most" if room else "0: there is only one such series"
        raise RequestError(
            "layers",
            f"is {n_layers}: {architecture.name}'s layers differ with a period of {period} (windows of attention), of "
            f"which only whole ones can go, so it must be {allowed}",
        )
    return n_layers // period, units


def _check_alike(source: Source, before: Architecture, removed: Collection[int]) -> None:
    """Whether the file to be written describes the same layers, as those it keeps were.

    Raises: RequestError for a family in which the number of layers decides something else.
    """
    after = describe(_View(source, removed))
    kept = tuple(layer for i, layer in enumerate(before.layers) if i not in removed)
    if after != replace(before, n_layer=len(kept), layers=kept):
        raise RequestError(
            "layers",
            f"cannot be taken from {source.path}: {before.name} derives other properties from the number of layers",
        )


def _choose(
    engine: Engine,
    architecture: Architecture,
    units: list[tuple[int, ...]],
    n_steps: int,
    texts: TextParts,
    progress: OnProgress,
    on_step: Callable[[Step], object] | None,
) -> list[Step]:
    """Takes away, n_steps times, the unit that is missed least. The engine is as before afterwards."""
    shapes = architecture.tensors()

    def bypass(unit: tuple[int, ...], on: bool) -> None:
        for name in (f"blk.{layer}.{output}" for layer in unit for output in OUTPUTS):
            engine.replace(name, np.zeros(shapes[name], np.float32) if on else None)

    deciding = Baseline(engine, texts.training[:CHUNKS])
    judging = Baseline(engine, (texts.judging or texts.training)[:CHUNKS])
    steps: list[Step] = []
    gone: list[tuple[int, ...]] = []
    try:
        for number in range(n_steps):
            losses = {}
            left = [unit for unit in units if unit not in gone]
            for i, unit in enumerate(left):
                progress(f"step {number + 1} of {n_steps}", name_of(unit), i, len(left))
                bypass(unit, True)
                losses[unit] = deciding.divergence()
                bypass(unit, False)
            best = min(losses, key=lambda unit: losses[unit])
            bypass(best, True)
            gone.append(best)
            steps.append(Step(best, losses[best], judging.divergence()))
            if on_step:
                on_step(steps[-1])
    finally:
        for unit in gone:
            bypass(unit, False)
    return steps


def name_of(unit: Sequence[int]) -> str:
    """As a user reads it."""
    return f"layer {unit[0]}" if len(unit) == 1 else f"layers {unit[0]} to {unit[-1]}"


def _renumbered(names: Collection[str], removed: Collection[int]) -> dict[str, str]:
    """Name in the source -> name in the result, for the tensors that stay."""
    found = {}
    for name in names:
        layer = _LAYER.fullmatch(name)
        if layer is None:
            found[name] = name
        elif int(layer[1]) not in removed:
            number = int(layer[1]) - sum(gone < int(layer[1]) for gone in removed)
            found[name] = f"blk.{number}.{layer[2]}"
    return found


def _metadata(source: Source, removed: Collection[int]) -> dict[str, Value]:
    """The source's keys for fewer layers: the count, and lists that have a value for each layer."""
    prefix = f"{source.architecture}."
    n_layer = int(source.metadata[f"{prefix}block_count"].decode())
    kept = [i for i in range(n_layer) if i not in removed]
    found = dict(source.metadata)
    for key, value in source.metadata.items():
        if key == f"{prefix}block_count":
            found[key] = Value.number(value.kind, len(kept))
        elif key.startswith(prefix) and value.kind == Kind.ARRAY:
            items = value.decode()
            if isinstance(items, np.ndarray) and len(items) == n_layer:
                found[key] = Value.array(items[kept])
    return found


class _View(Model[SourceTensor]):
    """The result as describe() wants to see a model, before it is written."""

    def __init__(self, source: Source, removed: Collection[int]) -> None:
        self.path = source.path
        self.metadata = Metadata({key: value.decode() for key, value in _metadata(source, removed).items()})
        names = _renumbered(source.tensors, removed)
        self.tensors = {new: source.tensors[old] for old, new in names.items()}


def _write(source: Source, out: Path, removed: Collection[int], progress: OnProgress) -> tuple[tuple[str, ...], int]:
    names = _renumbered(source.tensors, removed)
    formats = {
        old: FORMATS["F32"] if len(source.tensors[old].shape) == 1 else source.tensors[old].format for old in names
    }
    plan: list[TensorPlan] = [(new, source.tensors[old].shape, formats[old]) for old, new in names.items()]
    facts = Plan({new: formats[old] for old, new in names.items()}).metadata({new: shape for new, shape, _ in plan})
    facts[REMOVED] = Value.string(", ".join(map(str, sorted(removed))))
    with Writer(out, _metadata(source, removed) | facts, plan) as writer:
        for old, new in names.items():
            progress("writing", new, writer.n_written, writer.n_bytes)
            _, pieces = encoding.encode(source.tensors[old], formats[old], Inputs(), 1)
            for piece in pieces:
                writer.write(new, piece)
    return tuple(str(path) for path in writer.paths), writer.n_bytes
