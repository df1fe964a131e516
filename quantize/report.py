"""What a quantization did: for the user's eye, as JSON, and as keys of the file itself."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from edgert.quantize.divergence import Evaluation
from edgert.quantize.formats import FORMATS

PREFIX = "edgert.quantize."
# How a tensor was rounded: by its values alone, by importance, with error feedback, on a grid that it was trained for;
# or it kept the bytes of a source that was quantized before.
METHODS = ("plain", "weighted", "feedback", "grid", "kept", "float")


@dataclass(frozen=True)
class Fallback:
    """A tensor that did not get the type that was meant for it."""

    tensor: str
    asked: str
    used: str
    reason: str
    bits_added: float  # per weight of this tensor


@dataclass(frozen=True)
class Domain:
    """How far the result is from its source on one held-out text; KLD in nats."""

    n_tokens: int
    kld_mean: float
    kld_99: float
    kld_999: float
    same_top: float  # share of places where both find the same token likeliest
    perplexity_ratio: float

    @classmethod
    def of(cls, evaluation: Evaluation) -> Domain:
        """The figures of a comparison."""
        found = evaluation.against
        assert found is not None
        return cls(evaluation.n_tokens, found.kld_mean, found.kld_99, found.kld_999, found.same_top, found.ratio)


@dataclass
class Report:
    """What was made of what.

    types:    the type of every tensor, in the order of the file
    shapes:   their shapes, rows first
    methods:  how each was rounded, one of METHODS
    """

    source: str
    source_types: tuple[str, ...]
    requantized: bool
    types: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    n_bytes: int = 0
    paths: tuple[str, ...] = ()
    methods: dict[str, str] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    calibration: tuple[str, ...] = ()
    calibration_tokens: int = 0
    predicted_kld: float | None = None
    domains: dict[str, Domain] = field(default_factory=dict)
    seconds: float = 0.0
    peak_memory: int = 0

    @property
    def n_weights(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def bits_per_weight(self) -> float:
        """Over all tensors, metadata left out."""
        return 8 * self.tensor_bytes / self.n_weights

    @property
    def tensor_bytes(self) -> int:
        return sum(self.bytes_of(name) for name in self.types)

    def bytes_of(self, name: str) -> int:
        shape = self.shapes[name]
        return FORMATS[self.types[name]].row_bytes(shape[-1]) * math.prod(shape[:-1])

    def _left_out(self) -> list[str]:
        """A sentence for each reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.skipped:
            by_reason.setdefault(reason, []).append(name)
        return [
            f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {reason}"
            for reason, names in by_reason.items()
        ]

    def by_type(self) -> dict[str, tuple[int, int, int]]:
        """Type -> how many tensors, weights and bytes, the largest share first."""
        sums: dict[str, list[int]] = {}
        for name, type_name in self.types.items():
            row = sums.setdefault(type_name, [0, 0, 0])
            for i, value in enumerate((1, math.prod(self.shapes[name]), self.bytes_of(name))):
                row[i] += value
        ordered = sorted(sums.items(), key=lambda item: -item[1][2])
        return {type_name: (row[0], row[1], row[2]) for type_name, row in ordered}

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self) | {"bits_per_weight": self.bits_per_weight, "n_weights": self.n_weights}

    def metadata(self) -> dict[str, Any]:
        """What the file says of its own making, but for the quality; the lengths of texts do not depend on the plan."""
        facts: dict[str, Any] = {
            "source_types": ", ".join(self.source_types),
            "requantized": self.requantized,
            "bits_per_weight": float(self.bits_per_weight),
            "fallbacks": len(self.fallbacks),
            "calibration": ", ".join(self.calibration),
            "calibration_tokens": self.calibration_tokens,
        }
        counts = Counter(self.methods.values())
        facts |= {f"rounded_{method}": counts[method] for method in METHODS}
        return {PREFIX + name: value for name, value in facts.items()}

    def lines(self) -> list[tuple[str, str]]:
        """Names and texts for reading."""
        rows = [("source", f"{self.source} ({', '.join(self.source_types)})")]
        if self.requantized:
            n_kept = list(self.methods.values()).count("kept")
            kept = f"; {n_kept} of {len(self.types)} tensors keep their bytes" if n_kept else ""
            rows.append(("", f"was quantized before: what was lost then is not in these figures{kept}"))
        rows += [("file", path) for path in self.paths]
        rows.append(
            ("size", f"{self.n_bytes / 1e6:,.2f} MB, {self.bits_per_weight:.3f} bits per weight over all tensors")
        )
        for type_name, (n_tensors, n_weights, n_bytes) in self.by_type().items():
            rows.append(
                ("", f"{type_name:<8}{tensor_count(n_tensors)} {n_weights / 1e6:>10,.2f} M {n_bytes / 1e6:>10,.2f} MB")
            )
        if self.methods:
            counts = Counter(self.methods.values())
            rows.append(("rounding", ", ".join(f"{name} {count}" for name, count in counts.most_common())))
        if self.calibration:
            rows.append(("calibration", f"{self.calibration_tokens:,} tokens of {', '.join(self.calibration)}"))
        rows += fallback_lines(self.fallbacks)
        rows += [("left out", text) for text in self._left_out()]
        rows += [("note", text) for text in self.notices]
        if self.predicted_kld is not None:
            rows.append(("predicted", f"mean KLD {self.predicted_kld:.5f}"))
        rows += quality_lines(self.domains)
        if self.seconds:
            rows.append(("took", f"{self.seconds:,.1f} s, {self.peak_memory / 1e6:,.0f} MB at most"))
        return rows


def tensor_count(number: int) -> str:
    """How many, as a column of a table."""
    return f"{number:>4} tensor{' ' if number == 1 else 's'}"


def fallback_lines(fallbacks: Sequence[Fallback]) -> list[tuple[str, str]]:
    """One line for those of a kind: for the same reason to the same type, in whatever layers."""
    kinds: dict[tuple[str, str, str, str, float], list[str]] = {}
    for row in fallbacks:
        part = re.sub(r"^blk\.\d+\.", "blk.*.", row.tensor)
        kinds.setdefault((part, row.asked, row.used, row.reason, row.bits_added), []).append(row.tensor)
    return [
        (
            "fell back",
            f"{tensors[0] if len(tensors) == 1 else f'{part} ({_numbers(tensors)})'}: {asked} -> {used} "
            f"({reason}; {added:+.2f} bits a weight)",
        )
        for (part, asked, used, reason, added), tensors in kinds.items()
    ]


def _numbers(tensors: Sequence[str]) -> str:
    """The layers of tensors, as `0-2, 5`."""
    layers = sorted(int(name.split(".")[1]) for name in tensors)
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def quality_lines(domains: Mapping[str, Domain]) -> list[tuple[str, str]]:
    """The figures of each held-out text in a line."""
    return [
        (
            "quality" if i == 0 else "",
            f"{name}: mean KLD {row.kld_mean:.5f}, 99 % {row.kld_99:.4f}, 99.9 % {row.kld_999:.4f}, "
            f"same top {100 * row.same_top:.2f} %, perplexity x{row.perplexity_ratio:.4f} ({row.n_tokens:,} tokens)",
        )
        for i, (name, row) in enumerate(domains.items())
    ]


def quality_metadata(domains: Mapping[str, Domain]) -> dict[str, float | int]:
    """The figures as keys of the file: numbers, so that they can be set when all else is written."""
    return {f"{PREFIX}{name}.{key}": value for name, row in domains.items() for key, value in asdict(row).items()}


def from_metadata(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Domain]]:
    """What `Report.metadata` and `quality_metadata` put into a file: the facts, and the domains."""
    facts: dict[str, Any] = {}
    figures: dict[str, dict[str, Any]] = {}
    for key, value in metadata.items():
        if key.startswith(PREFIX):
            name, dot, figure = key.removeprefix(PREFIX).rpartition(".")
            if dot:
                figures.setdefault(name, {})[figure] = value
            else:
                facts[figure] = value
    needed = set(Domain.__dataclass_fields__)
    return facts, {name: Domain(**row) for name, row in figures.items() if needed == row.keys()}
