"""Where things are kept: what can be made again, what cannot, and what a path that someone wrote means."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from edgert.errors import EdgertError


def cache_root() -> Path:
    """The folder of all that can be made again: EDGERT_CACHE, or edgert's part of the user's cache folder.

    Raises: EdgertError for a user without a home folder.
    """
    import platformdirs

    if chosen := os.environ.get("EDGERT_CACHE"):
        return written(chosen)
    return _at_home(lambda: platformdirs.user_cache_dir("edgert"))


def data_root() -> Path:
    """The folder of models and conversations. Raises: EdgertError for a user without a home folder."""
    import platformdirs

    return _at_home(lambda: platformdirs.user_data_dir("edgert", appauthor=False))


def written(path: str) -> Path:
    """The path that someone wrote; one in the home of a user that there is not stays as it is."""
    return Path(os.path.expanduser(path))


def _at_home(find: Callable[[], str]) -> Path:
    try:
        path = Path(find())
    except RuntimeError:
        path = Path()
    if not path.is_absolute():
        raise EdgertError(
            "This user has no home folder: set HOME, or EDGERT_CACHE and EDGERT_MODELS, to folders that can be written."
        )
    return path
