"""How long a context a model was made for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgert.quantize.gguf_file import GGUFFile

logger = logging.getLogger(__name__)


def trained(file: GGUFFile) -> int:
    """Positions that the model was trained on. Raises: ModelFileError when the file does not say it."""
    return file.get(f"{file.architecture}.context_length", int)


def warn_beyond(file: GGUFFile, n_ctx: int) -> None:
    """Logs a warning when a model is given more positions than it was trained on."""
    if n_ctx > (n_trained := trained(file)):
        logger.warning(
            "The context of %d is longer than the %d tokens that the model was trained on: "
            "beyond them its answers may be nonsense.",
            n_ctx,
            n_trained,
        )
