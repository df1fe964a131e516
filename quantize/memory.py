"""How much memory a quantization takes at its peak, and how its work is cut to stay within a bound.

What can be cut is what is done at a time: the Hessians that are summed up while the model reads, those that are ready
for rounding, the rows that are rounded. The rest is the program, the running model and its widest input.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path

# What comes beside: LLVM's code, which the engine gives back and the loading of rounding's kernels brings again (52 MB
# of files), the kernels, and what the allocator keeps of what was freed. Measured on x86-64 Linux, as are the others.
SPARE = 128 << 20
ROWS_IN_WORK = 9  # times the rows' floats that rounding takes: turned, with what is still to be met, with gradients
TEXT_BYTE = 80  # what a byte of text leaves behind when it has been rendered and tokenized
PLAIN = 64 << 20  # what rounding without calibration takes beside the program


@dataclass(frozen=True)
class Limits:
    """What may be held at a time.

    hessians:    bytes of sums in one reading of the text
    curvatures:  of inputs of other tensors, ready for rounding
    rows:        bytes of float32 that are rounded with error feedback
    """

    hessians: int = 2 << 30
    curvatures: int = 4
    rows: int = 1 << 24


@dataclass(frozen=True)
class Work:
    """What measuring and rounding take beside the program and the running model.

    widest:  columns of the widest input
    logits:  bytes of those that are computed at a time
    result:  bytes of the model that is made, running beside its source
    """

    widest: int
    logits: int = 0
    result: int = 0

    @property
    def square(self) -> int:
        return 4 * self.widest**2  # bytes of a Hessian

    @property
    def least(self) -> Limits:
        return Limits(self.square, 1, 1 << 20)

    def n_bytes(self, limits: Limits) -> int:
        """The most that is held at once."""
        reading = limits.hessians + self.square  # the product of a piece of text, before it is added
        kept = 3 * self.square * limits.curvatures  # a Hessian and its factor, and the held-out Hessian
        making = kept + 5 * self.square  # the last one's factor: beside its Hessian three matrices of float64
        rounding = kept + ROWS_IN_WORK * limits.rows + self.logits
        return SPARE + max(reading, making, rounding, 2 * self.logits + self.result)

    def within(self, room: int) -> Limits:
        """The largest limits that keep to so many bytes; the least where none does."""
        usual, least = Limits(), self.least
        for curvatures in range(usual.curvatures, 0, -1):
            for rows in (usual.rows, usual.rows >> 2, least.rows):
                found = Limits(least.hessians, curvatures, rows)
                if self.n_bytes(found) <= room:
                    return replace(found, hessians=max(least.hessians, room - SPARE - self.square))
        return least


def resident() -> int:
    """Bytes of this process in memory now; where the system does not tell, the most that there were."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()
    except OSError:
        return peak()


def peak() -> int:
    """Bytes of this process in memory at most."""
    try:  # getrusage counts what the parent held before it started this program
        status = Path("/proc/self/status").read_text("utf-8")
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most


def megabytes(n_bytes: int) -> str:
    """Rounded up to tens: what is told must be enough the next time, when the program may take a little more."""
    return f"{-(-(n_bytes + 4_000_000) // 10_000_000) * 10:,} MB"
