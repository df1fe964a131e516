"""How much a model's predictions suffer from each tensor in each format, and the file that keeps it.

A few groups of tensors are rounded coarsely, one group at a time, and the KL divergence of the model's output is
measured. It grows in proportion to the relative output errors e = tr(dW H dW^T) / tr(W H W^T) of the group's tensors,
H being the Hessian of their inputs; so one probe gives the factor, and e, which needs no running model, the rest.
Groups are rounded as the model will be, with error feedback or without: what feedback leaves of an error weighs more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgert.errors import EdgertError, ModelFileError
from edgert.quantize.formats import FORMATS, Format

VERSION = 1


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
        """The predicted divergence when only this tensor is rounded.

        Raises: EdgertError for what was not measured.
        """
        errors = self.errors.get(name, {})
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
