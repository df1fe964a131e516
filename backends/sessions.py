"""What every backend asks of a saved session before it takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgert.errors import SessionError


def check_facts(own: Mapping[str, Any], facts: Mapping[str, Any], n_tokens: int, n_ctx: int) -> None:
    """Compares what a session says of itself with what a backend would have written.

    own:       what must be equal, by name
    n_tokens:  of the file; n_ctx: positions that a sequence may have

    Raises: SessionError that says what differs.
    """
    for name, value in own.items():
        if facts.get(name) != value:
            what = "another model" if name == "model" else f"another {name.replace('_', ' ')}"
            raise SessionError(f"The session was saved with {what}: {facts.get(name)!r}, not {value!r}.")
    if facts.get("length") != n_tokens or not 0 < n_tokens <= n_ctx:
        raise SessionError(
            f"The session has {n_tokens} tokens, and the context holds {n_ctx}: load the model with a larger."
        )
