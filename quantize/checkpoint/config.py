"""The small JSON files beside the weights, read so that each complaint names the file and the key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgert.errors import ModelFileError

_MAX_BYTES = 1 << 28  # tokenizer.json, the largest of them, has some ten megabytes
_REQUIRED: Any = object()


def load_json(path: Path) -> dict[str, Any]:
    """The object in the file, {} when there is no such file.

    Raises: ModelFileError when it is no JSON object.
    """
    try:
        if not path.exists():
            return {}
        if path.stat().st_size > _MAX_BYTES:
            raise ModelFileError(f"{path} has {path.stat().st_size:,} bytes, too many for a file of its kind.")
        value = json.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise ModelFileError(f"{path} is not JSON: download it again.") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} should hold a JSON object: download it again.")
    return value


def _text_part(outer: dict[str, Any]) -> dict[str, Any]:
    """What describes the text model, {} where config.json describes nothing else."""
    thinker = outer.get("thinker_config")
    outer = thinker if isinstance(thinker, dict) else outer
    return next((outer[key] for key in ("text_config", "llm_config") if isinstance(outer.get(key), dict)), {})


def _texts(value: Any) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


class Config:
    """config.json's values by key; those of the text part, where it describes several parts, come first.

    classes:   `architectures`, the outer ones first
    kind:      `model_type`, of the text part where there are several
    is_part:   whether it describes other parts than the text model
    defaults:  of keys that it lacks
    settings:  keys that it calls otherwise
    """

    def __init__(self, path: Path, defaults: dict[str, Any] | None = None) -> None:
        self.path = path
        if not path.is_file():
            raise ModelFileError(
                f"{path.parent} has no config.json: a folder in Hugging Face's format has one beside its weights."
            )
        outer = load_json(path)
        inner = _text_part(outer)
        self.values: dict[str, Any] = {**outer, **inner}
        if inner.get("tie_word_embeddings") is not True and outer.get("tie_word_embeddings") is not None:
            self.values["tie_word_embeddings"] = outer["tie_word_embeddings"]  # of the whole, which ties the text's too
        self.classes = [name for part in (outer, inner) for name in _texts(part.get("architectures"))]
        self.kind = str((inner or outer).get("model_type", ""))
        self.is_part = bool(inner) or any(f"{part}_config" in outer for part in ("vision", "audio"))
        self.defaults: dict[str, Any] = defaults or {}
        self.settings: Mapping[str, str] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """The value, the family's default, or `default`; null counts as absent."""
        value = self.values.get(self.settings.get(key, key))
        if value is None:
            value = self.values.get(key)
        if value is None:
            value = self.defaults.get(key)
        return default if value is None else value

    def integer(self, key: str, default: Any = _REQUIRED, least: int = 1) -> int:
        value = self._needed(key, default)
        if type(value) is not int or not least <= value < 1 << 31:
            raise self.error(key, value, f"an integer of {least} or more")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        value = self._needed(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, value, "a positive number")
        return float(value)

    def _needed(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is _REQUIRED:
            raise ModelFileError(f"{self.path} lacks {key!r}.")
        return value

    def error(self, key: str, value: Any, wanted: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {key!r} is {value!r} and should be {wanted}.")
