"""The door through which the quantizer gets a running model: what it asks of one, and who can open it.

This package imports no backend. `edgert` itself registers an opener when it is imported, which any import of this
package entails; the opener imports what it needs when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgert.quantize.source import Source


class Expert(NamedTuple):
    """One of the experts that stand in a tensor, and of how many."""

    number: int
    of: int


class OnInput(Protocol):
    """What is told of a product."""

    def __call__(self, names: tuple[str, ...], inputs: NDArray[np.float32], expert: Expert | None = None) -> object:
        """names: tensors that share the input; inputs: float32 (n_tokens, n_cols), valid until the call returns;
        expert: which of those of the tensors read it, None: they hold one matrix"""
        ...


class OnSquares(Protocol):
    """What is told of a product where its inputs themselves are not wanted."""

    def __call__(
        self, names: tuple[str, ...], squares: NDArray[np.float32], n_tokens: int, expert: Expert | None = None
    ) -> object:
        """squares: of so many inputs summed up, float32 (n_cols,), valid until the call returns; else as OnInput"""
        ...


def sums_of_squares(inputs: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 (n, n_cols) -> float32 (n_cols,)."""
    import numpy as np

    sums: NDArray[np.float32] = np.einsum("ij,ij->j", inputs, inputs)  # half the time of squaring first
    return sums


@dataclass(frozen=True)
class Running:
    """Bytes that a running model takes.

    weights:  as floats
    other:    cache, buffers and what belongs to the vocabulary
    logits:   of one of the engine's pieces
    """

    weights: int
    other: int
    logits: int


class Engine(Protocol):
    """A running model. Every call starts from an empty context.

    n_vocab:   size of the vocabulary
    n_ctx:     tokens that one call may take
    bos:       the token that texts begin with; None: none does
    can_chat:  whether the model has a chat template
    """

    n_vocab: int
    n_ctx: int
    bos: int | None

    @property
    def can_chat(self) -> bool: ...

    def tokenize(self, text: str, *, add_special: bool = True) -> NDArray[np.int32]:
        """The ids of a text, int32 (n,); add_special puts the begin token first, if the model wants one."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]]) -> NDArray[np.int32]:
        """The ids of a conversation in the model's own chat template, int32 (n,).

        Raises: RequestError when the model has none, or it refuses the messages.
        """
        ...

    def observe(self, tokens: NDArray[np.int32], on_input: OnInput) -> None:
        """Runs tokens, int32 (n,), and shows the input of every matrix product, the head's included.

        on_input sees each token once for each tensor, in one call or in several; of experts, once for each that the
        token goes to.
        """
        ...

    def squares(self, tokens: NDArray[np.int32], on_squares: OnSquares) -> None:
        """As observe, for the sums of the squares of inputs alone, which takes less time."""
        ...

    def logits(self, tokens: NDArray[np.int32], first: int = 0) -> NDArray[np.float32]:
        """float32 (n - first, n_vocab): what the model says after each token from `first` on.

        Valid until the next call.
        """
        ...

    def pieces(self, tokens: NDArray[np.int32], first: int = 0) -> Iterator[NDArray[np.float32]]:
        """The same from row to row in pieces, each valid until the next: a large vocabulary takes little memory.

        Models of one vocabulary cut them alike.
        """
        ...

    def replace(self, name: str, values: NDArray[np.float32] | None, first: int = 0) -> None:
        """Gives rows of a matrix from `first` on, a multiple of 64, other values, float32 (n, n_cols).

        With None all rows have their own values back.
        """
        ...

    def close(self) -> None:
        """Gives back threads and memory."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


_doors: list[tuple[Callable[..., Engine], Callable[[Source, int], Running]]] = []


def register(opener: Callable[..., Engine], estimate: Callable[[Source, int], Running]) -> None:
    """Makes `open_engine` and `memory_of` call these functions."""
    _doors[:] = [(opener, estimate)]


def memory_of(source: Source, n_ctx: int) -> Running:
    """What `open_engine` will take for an open source and texts of n_ctx tokens."""
    return _door()[1](source, n_ctx)


def _door() -> tuple[Callable[..., Engine], Callable[[Source, int], Running]]:
    if not _doors:
        raise RuntimeError("nothing can run models here: `import edgert` registers what can")
    return _doors[0]


def open_engine(source: str | PathLike[str] | Source, **options: Any) -> Engine:
    """A running model from a GGUF file, a folder in Hugging Face's format, or an open source.

    options:  n_ctx, n_threads, weights_as, backend, progress, as `edgert.calibration_engine.open_engine` takes them

    Raises: EdgertError and its subclasses, when the source or the machine is at fault.
    """
    return _door()[0](source, **options)
