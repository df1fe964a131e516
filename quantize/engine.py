"""The door through which the quantizer gets a running model: what it asks of one, and who can open it.

This package imports no backend. `edgert` itself registers an opener when it is imported, which any import of this
package entails; the opener imports what it needs when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgert.quantize.source import Source

    # Called with the names of tensors that share an input, and the input: float32 (n_tokens, n_cols), valid until
    # the call returns.
    OnInput = Callable[[tuple[str, ...], NDArray[np.float32]], object]


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

        on_input sees each token once for each tensor, in one call or in several.
        """
        ...

    def logits(self, tokens: NDArray[np.int32], first: int = 0) -> NDArray[np.float32]:
        """float32 (n - first, n_vocab): what the model says after each token from `first` on.

        Valid until the next call.
        """
        ...

    def replace(self, name: str, values: NDArray[np.float32] | None) -> None:
        """Gives a matrix other values, float32 (n_rows, n_cols), or with None its own ones back."""
        ...

    def close(self) -> None:
        """Gives back threads and memory."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


_openers: list[Callable[..., Engine]] = []


def register(opener: Callable[..., Engine]) -> None:
    """Makes `open_engine` call this function."""
    _openers[:] = [opener]


def open_engine(source: str | PathLike[str] | Source, **options: Any) -> Engine:
    """A running model from a GGUF file, a folder in Hugging Face's format, or an open source.

    options:  n_ctx, n_threads, weights_as, progress, as `edgert.calibration_engine.open_engine` takes them

    Raises: EdgertError and its subclasses, when the source or the machine is at fault.
    """
    if not _openers:
        raise RuntimeError("nothing can run models here: `import edgert` registers what can")
    return _openers[0](source, **options)
