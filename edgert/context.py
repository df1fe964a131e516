"""How long a context a model was made for, and how long a one it gets."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgert.quantize.gguf_file import GGUFFile

logger = logging.getLogger(__name__)

DEFAULT_N_CTX = 4096


def trained(file: GGUFFile) -> int:
    """Positions that the model was trained on. Raises: ModelFileError when the file does not say it."""
    return file.get(f"{file.architecture}.context_length", int)


def chosen(file: GGUFFile, n_ctx: int | None) -> int:
    """The positions that are asked for; 0: as many as the model was trained on; None: the same, but at most 4096."""
    return min(DEFAULT_N_CTX, trained(file)) if n_ctx is None else n_ctx or trained(file)


def warn_beyond(file: GGUFFile, n_ctx: int) -> None:
    """Logs a warning when a model is given more positions than it was trained on."""
    if n_ctx > (n_trained := trained(file)):
        logger.warning(
            "The context of %d is longer than the %d tokens that the model was trained on: "
            "beyond them its answers may be nonsense.",
            n_ctx,
            n_trained,
        )
