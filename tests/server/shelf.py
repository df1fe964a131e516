"""Fake models by name, for servers that have several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake import fake_model, says
from harness import Server

from edgert.errors import DoesNotFitError
from edgert.model import Model
from edgert.options import SamplingParams


class Shelf:
    """Loads fake models by their source, and remembers."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.models: list[Model] = []
        self.most = 99
        self.broken: dict[str, Any] = {}

    def __call__(self, source: str | Path, **options: Any) -> Model:
        self.loads.append(str(source))
        if len([m for m in self.models if not m.backend.closed]) >= self.most:  # type: ignore[attr-defined]
            raise DoesNotFitError("There is no memory.")
        if isinstance(problem := self.broken.get(str(source)), Exception):
            raise problem
        rule = problem or says(f"I am {source}")
        model = fake_model(rule, SamplingParams(temperature=0), n_ctx=512, delay=options.get("delay", 0))
        self.models.append(model)
        return model


def names(server: Server) -> list[str]:
    return [name for name, place in server.service.registry.places.items() if place.loaded]


def text(server: Server, model: str | None = None, **fields: Any) -> str:
    reply = server.ok("/v1/completions", prompt="x\n", model=model, **fields)
    found: str = reply["choices"][0]["text"]
    return found
