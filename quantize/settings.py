"""What a quantization is asked to do: checked once, then frozen."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edgert.errors import RequestError
from edgert.quantize.allocation import Pins
from edgert.quantize.formats import FORMATS
from edgert.quantize.mixes import MIXES

UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}
MEASURED_AS = 1  # changes whenever edgert measures in another way, so that nobody goes on with older measurements
DEFAULT_BPW = 4.8  # what Q4_K_M takes of a model whose rows are multiples of 256
CALIBRATION_TOKENS = 50_000
DEFAULT = ("default",)  # the texts that come with the package
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

Gptq = Literal["auto", "on", "off"]


def n_bytes(text: str | int, field: str = "size") -> int:
    """A size such as 95MB, 1.5GiB or 2000000 in bytes.

    Raises: RequestError naming the field.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2].lower() not in UNITS:
        raise RequestError.wrong(field, "a size such as 95MB, 1.5GiB or 2000000", text)
    value = float(match[1]) * UNITS[match[2].lower()]
    if not 1 <= value < 2**63:
        raise RequestError.wrong(field, "at least one byte and less than 2**63", text)
    return int(value)


@dataclass(frozen=True)
class Budget:
    """How large the result may be: bits per weight over all tensors, bytes of the file, or one of llama.cpp's mixes."""

    bpw: float | None = None
    size: int | None = None
    mix: str | None = None

    @classmethod
    def of(cls, value: Budget | float | int | str | None) -> Budget:
        """4.5 is bits per weight, "95MB" a file's size, "q4_k_m" a mix; None the usual bits per weight.

        Raises: RequestError.
        """
        if isinstance(value, Budget):
            return value
        if value is None:
            return cls(bpw=DEFAULT_BPW)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not (math.isfinite(value) and 1 <= value <= 32):
                raise RequestError.wrong("bpw", "from 1 to 32 bits per weight", value)
            return cls(bpw=float(value))
        if isinstance(value, str) and re.match(r"\s*-?\d", value):
            return cls(size=n_bytes(value))
        return cls.named(value)

    def about(self, n_weights: int) -> int:
        """The bytes of so many weights, not quite: a mix has more bits than the type that it is named after."""
        if self.size is not None:
            return self.size
        bits = self.bpw or FORMATS[MIXES[str(self.mix)]].bits_per_weight + 1
        return int(bits * n_weights / 8)

    @classmethod
    def named(cls, name: object) -> Budget:
        """One of llama.cpp's mixes, or one type for all. Raises: RequestError."""
        found = ALIASES.get(str(name).upper(), str(name).upper())
        if found not in MIXES:
            raise RequestError.wrong("type", f"one of {', '.join(MIXES)}", name)
        return cls(mix=found)


@dataclass(frozen=True)
class Settings:
    """All that decides the bytes of the result, and what it may cost to make them.

    calibration:  files and names of text sets; empty: none, quantize by the weights alone
    imatrix:      a file of importances to use in place of calibrating
    sensitivity:  a file that `edgert sensitivity` wrote, in place of measuring
    max_memory:   bytes that the process may take at its peak; None: what suits the work
    """

    budget: Budget
    calibration: tuple[str, ...] = ()
    calibration_tokens: int = CALIBRATION_TOKENS
    imatrix: Path | None = None
    sensitivity: Path | None = None
    gptq: Gptq = "auto"
    pins: Pins = field(default_factory=Pins)
    resume: bool = False
    seed: int = 0
    n_threads: int = 1
    max_memory: int | None = None
    split_max_size: int | None = None
    report: bool = True
    report_text: tuple[str, ...] = ()

    @property
    def fast(self) -> bool:
        return not self.calibration and self.imatrix is None

    @property
    def files(self) -> tuple[str | Path, ...]:
        """What is read beside the source; texts may be names of sets."""
        given = (*self.calibration, *self.report_text, self.imatrix, self.sensitivity)
        return tuple(name for name in given if name is not None)

    @property
    def measured(self) -> str:
        """What the measurements of a run depend on; files as they are now."""
        files = [_stamp(name) for name in self.files if name != self.sensitivity]
        return repr((MEASURED_AS, files, self.calibration_tokens, self.gptq, self.pins, self.seed))

    @property
    def decisive(self) -> str:
        """What the bytes of the result depend on."""
        sensitivity = None if self.sensitivity is None else _stamp(self.sensitivity)
        return repr((self.measured, self.budget, sensitivity, self.split_max_size))


def _stamp(name: str | Path) -> tuple[str, int, int]:
    """A name, and of a file its size and age."""
    path = Path(name)
    if not path.is_file():
        return str(name), 0, 0
    return str(name), path.stat().st_size, path.stat().st_mtime_ns
