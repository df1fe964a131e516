"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def replace(source: Path, target: Path) -> None:
    """Puts a finished file in its place so that a power cut leaves the old one or the new one, whole."""
    with open(source, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
    if sys.platform != "win32":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
