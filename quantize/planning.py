"""Which type every tensor of a source gets: what stays float, what was asked for, and the rest by the budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from edgert.errors import DoesNotFitError
from edgert.quantize import encoding, mixes
from edgert.quantize.allocation import Pins, allocate, candidates, offered, padded_bytes
from edgert.quantize.convert import fits_f16
from edgert.quantize.formats import FILE_TYPES, FLOATS, FORMATS, Format
from edgert.quantize.gguf_value import Value
from edgert.quantize.report import Fallback
from edgert.quantize.settings import Budget
from edgert.quantize.source import Source

QUANTIZATION_VERSION = 2

Loss = Callable[[str, Format], float]  # what the output loses when this tensor alone takes this type


@dataclass(frozen=True)
class Plan:
    """types: of every tensor, in the order of the source; predicted_loss: the sum of the losses, where it was least."""

    types: dict[str, Format]
    fallbacks: list[Fallback] = field(default_factory=list)
    predicted_loss: float | None = None
    mix: str = ""  # by whose name llama.cpp calls the file; else by the type of most weights

    def metadata(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Value]:
        """The keys of the file that tell how it was quantized."""
        sums: Counter[str] = Counter()
        for name, shape in shapes.items():
            sums[self.types[name].name] += math.prod(shape)
        mix = self.mix or sums.most_common(1)[0][0]
        return {
            "general.file_type": Value.u32(FILE_TYPES.get(mix, 0)),
            "general.quantization_version": Value.u32(QUANTIZATION_VERSION),
        }


class Planner:
    """What can be decided about one source."""

    def __init__(self, source: Source, pins: Pins) -> None:
        self._source = source
        self.shapes = {
            name: tensor.shape for name, tensor in source.tensors.items() if mixes.is_quantizable(name, tensor.shape)
        }
        self._fallbacks: list[Fallback] = []
        self._offered: dict[str, list[Format]] = {}
        self._own = {name: source.tensors[name].format for name in self.shapes}  # which keep what the source has
        pinned = pins.resolve(self.shapes, self._own)
        pinned |= {
            name: self._own[name] for name in self.shapes if name not in pinned and source.tensors[name].is_native
        }
        self._fixed = {name: self._possible(name, format, format) for name, format in pinned.items()}
        for name, tensor in source.tensors.items():
            if name not in self.shapes:
                is_float = len(tensor.shape) == 1 or tensor.format.name in FLOATS
                self._fixed[name] = FORMATS["F32"] if is_float else tensor.format
        self.open = [name for name in self.shapes if name not in self._fixed]  # left to the budget

    def mixed(self, mix: str, calibrated: bool) -> Plan:
        """llama.cpp's choice by name and layer."""
        a = self._source.describe()
        facts = mixes.ModelFacts(
            a.n_layer,
            n_gqa=a.n_head // a.n_head_kv,
            n_expert=max(layer.experts.n_expert if layer.experts else 0 for layer in a.layers),
            has_importance=calibrated,
            is_70b=a.n_layer == 80 and a.name in ("llama", "qwen2"),
        )
        used = mixes.mix(mix, self.shapes, facts)
        # The same model with rows that every block divides shows what was meant.
        wide = {name: (*shape[:-1], 256 * -(-shape[-1] // 256)) for name, shape in self.shapes.items()}
        meant = mixes.mix(mix, wide, facts)
        return self._plan({name: self._possible(name, meant[name], used[name]) for name in self.open}, mix=mix.upper())

    def floats(self) -> Plan:
        """Everything as it is."""
        return self._plan({name: self._own[name] for name in self.open})

    def room(self, budget: Budget, n_header: int) -> int:
        """The bytes that a budget leaves the tensors that are open.

        Bits per weight that the smallest types have by themselves (4.5) are taken as a wish for these: the vectors,
        floats in any case, then come on top.

        n_header:  bytes of the file that are not tensors

        Raises: DoesNotFitError when even the smallest types take more.
        """
        n_weights = sum(math.prod(tensor.shape) for tensor in self._source.tensors.values())
        n_bytes = (budget.size or 0) - n_header if budget.bpw is None else int(budget.bpw * n_weights / 8)
        fixed = {
            name: padded_bytes(name, self._source.tensors[name].shape, format) for name, format in self._fixed.items()
        }
        n_bytes -= sum(fixed.values())
        least = sum(
            min(padded_bytes(name, self.shapes[name], format) for format in (*self.offered(name), self._own[name]))
            for name in self.open
        )
        if budget.bpw is not None:
            vectors = sum(fixed[name] for name in fixed if name not in self.shapes)
            n_bytes = max(n_bytes, min(least, n_bytes + vectors))
        if least > n_bytes:
            missing = f"{least - n_bytes:,} bytes more"
            if budget.bpw is not None:
                bpw = math.ceil(100 * 8 * (least + sum(fixed.values()) - vectors) / n_weights) / 100
                missing = f"{bpw} bits per weight"
            pinned = " or pin fewer tensors" if len(self.open) < len(self.shapes) else ""
            raise DoesNotFitError(
                f"{self._source.path} cannot be made so small: in the smallest types its matrices take {least:,} "
                f"bytes, and the budget leaves them {max(n_bytes, 0):,}. Give {missing}{pinned}, "
                "or name a mix of smaller types (--type)."
            )
        return n_bytes

    @property
    def most(self) -> int:
        """The bytes that the open tensors take as they are."""
        return sum(padded_bytes(name, self.shapes[name], self._own[name]) for name in self.open)

    def allocated(self, room: int, loss: Loss) -> Plan:
        """The types whose losses add up to the least within so many bytes; the source's own cost nothing."""
        losses = {name: {format: loss(name, format) for format in self.offered(name)} for name in self.open}
        options = {name: candidates(name, self.shapes[name], losses[name] | {self._own[name]: 0.0}) for name in losses}
        chosen = allocate(options, room)
        return self._plan(chosen.types, chosen.loss)

    def offered(self, name: str) -> list[Format]:
        """The types that a matrix may take beside the one that it has."""
        if name not in self._offered:
            tensor = self._source.tensors[name]
            types = offered(tensor.shape, on_grid=encoding.lies_on_grid(tensor))
            self._offered[name] = [format for format in types if format is not self._own[name]]
        return self._offered[name]

    def _possible(self, name: str, meant: Format, used: Format) -> Format:
        """The type to be used, with a note where it is not the one that was meant."""
        tensor = self._source.tensors[name]
        reason = f"rows of {tensor.n_cols} are no blocks of {meant.block_size}"
        if used.name == "F16" and not fits_f16(tensor):
            used = FORMATS["BF16" if tensor.format.name == "BF16" else "F32"]
            reason = "it has values beyond F16's 65504"
        if used is not meant:
            added = used.bits_per_weight - meant.bits_per_weight
            self._fallbacks.append(Fallback(name, meant.name, used.name, reason, added))
        return used

    def _plan(self, chosen: dict[str, Format], loss: float | None = None, mix: str = "") -> Plan:
        types = self._fixed | chosen
        return Plan({name: types[name] for name in self._source.tensors}, self._fallbacks, loss, mix)


def head(source: Source) -> str:
    """The matrix that makes the logits."""
    return "output.weight" if "output.weight" in source.tensors else "token_embd.weight"
