"""What a provider wants of a graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """A provider's habits, as one row of the table of providers names them.

    fused_norm:      SimplifiedLayerNormalization, else the same of plain operators
    accuracy_level:  of MatMulNBits: 4 rounds activations to int8 in blocks, 0 leaves the choice to the provider
    outside:         weights of every graph lie in one file; else small graphs bring theirs along (OpenVINO compiles a
                     graph of one node from memory, and then looks for the file in the working directory)
    """

    fused_norm: bool = True
    accuracy_level: int = 4
    outside: bool = True

    @property
    def key(self) -> str:
        """For names of files."""
        return f"n{int(self.fused_norm)}a{self.accuracy_level}" + ("" if self.outside else "i")
