"""What was found out about this machine and is worth knowing next time: small JSON files in the cache.

A note that is lost or damaged is found out again; so reading never fails, and writing only says that it did.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from edgert.folders import cache_root

log = logging.getLogger(__name__)

MOST = 256  # entries of a file; the oldest go


class Notes:
    """Values by name in the file NAME.json, the latest last."""

    def __init__(self, name: str) -> None:
        self.path = cache_root() / f"{name}.json"

    def all(self) -> dict[str, Any]:
        """Everything known."""
        try:
            known = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def get(self, key: str) -> Any:
        """The value, or None."""
        return self.all().get(key)

    def put(self, key: str, value: Any) -> None:
        """Keeps a value; None forgets it. The file is whole at every moment."""
        known = self.all()
        known.pop(key, None)
        if value is not None:
            known[key] = value
        known = dict(list(known.items())[-MOST:])
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(known, indent=1), encoding="utf-8")
            part.replace(self.path)
        except OSError as error:
            log.info("%s cannot be written (%s): it is found out again next time.", self.path, error)
