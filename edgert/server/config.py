"""The file after --config: what flags say, and models by name."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgert.errors import EdgertError, RequestError, shown
from edgert.generation import Limits
from edgert.options import SamplingParams, named
from edgert.server import typed
from edgert.server.choice import Choice
from edgert.server.registry import Spec, duration

# Key of a model's table -> argument of `edgert.load`.
ARGUMENTS = {
    "ctx-size": "n_ctx",
    "threads": "n_threads",
    "backend": "backend",
    "device": "device",
    "n-gpu-layers": "n_gpu_layers",
    "split-mode": "split_mode",
    "tensor-split": "tensor_split",
    "main-gpu": "main_gpu",
    "rpc": "rpc",
    "cache-type-k": "cache_type_k",
    "cache-type-v": "cache_type_v",
    "chat-template": "chat_template",
    "model-draft": "draft",
    "spec-type": "spec",
    "spec-max": "spec_max",
    "cache-tokens": "n_cached",
    "prefix-cache": "prefix_cache",
    "prefix-quota": "prefix_quota",
    "parallel": "n_parallel",
    "window": "window",
    "stall": "stall",
    "comfort": "comfort",
    "patience": "patience",
    "sampling": "sampling",
}
OTHERS = ("model", "aliases", "keep-alive")


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Choice]]:
    """The flags that the file sets, by their names with underscores, the tables of its models, and its choices.

    Raises: EdgertError for a file that is no TOML.
    """
    try:
        content = tomllib.loads(Path(path).read_text("utf-8-sig"))
    except OSError as error:
        raise EdgertError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise EdgertError(f"{path} is no text in UTF-8, from byte {error.start} on: write it as TOML.") from None
    except tomllib.TOMLDecodeError as error:
        raise EdgertError(f"{path} is not TOML: {error}.") from error
    models = content.pop("models", {})
    if not isinstance(models, dict) or not all(isinstance(table, dict) for table in models.values()):
        raise EdgertError(f"{path}: models must be tables such as [models.NAME], not {shown(models)}.")
    choices = content.pop("choice", {})
    if not isinstance(choices, dict) or not all(isinstance(table, dict) for table in choices.values()):
        raise EdgertError(f"{path}: choice must be tables such as [choice.NAME], not {shown(choices)}.")
    flags = {name.replace("-", "_"): value for name, value in content.items()}
    return flags, models, {name: _choice(name, table, path) for name, table in choices.items()}


def _choice(name: str, table: Mapping[str, Any], path: str | Path) -> Choice:
    try:
        return typed.convert({**table, "name": name}, Choice, closed=True)
    except RequestError as error:
        raise EdgertError(f"{path}: choice.{name}.{error.field} {error.reason}.") from None


def specs(
    models: Mapping[str, Mapping[str, Any]],
    where: str,
    value_of: Callable[[str, object], object] = lambda key, value: value,
) -> list[Spec]:
    """The models of a file, in its order.

    value_of:  what a flag makes of the file's value for a key; raises RequestError

    Raises: EdgertError naming the key that is not known, or whose value is wrong.
    """
    found = []
    for name, table in models.items():
        place = f"{where}: models.{name}"
        if unknown := next((key for key in table if key not in ARGUMENTS and key not in OTHERS), None):
            raise EdgertError(f"{place}.{unknown} is not known; known are {', '.join(_KNOWN)}.")
        keys = {argument: f"{place}.{key}" for key, argument in ARGUMENTS.items()}
        keys |= {field: f"{place}.{field}" for field in OTHERS} | {"keep_alive": f"{place}.keep-alive"}
        try:
            options = {ARGUMENTS[key]: value_of(key, value) for key, value in table.items() if key in ARGUMENTS}
            _check(options)
            keep_alive, source = duration(table.get("keep-alive", -1)), table.get("model", name)
            if not isinstance(source, str):
                raise RequestError.wrong("model", "a text", source)
            aliases = table.get("aliases", [])
            if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
                raise RequestError.wrong("aliases", "a list of texts", aliases)
        except RequestError as error:
            key = keys.get(error.field) or f"{place}.{error.field}"
            raise EdgertError(f"{key} {error.reason}.") from error
        found.append(Spec(name, source, options, tuple(aliases), keep_alive, keys))
    return found


def _check(options: Mapping[str, Any]) -> None:
    """Says now what the model's load would say. Raises: RequestError."""
    from edgert.speculation.loading import Settings

    Limits(**{field: options[field] for field in _LIMITS if field in options})
    Settings(**{field: options[name] for name, field in _GUESSES.items() if name in options})
    try:
        SamplingParams().changed(named("sampling", options.get("sampling", {})))
    except RequestError as error:
        inside = error.field != "sampling"
        raise RequestError(f"sampling.{error.field}" if inside else "sampling", error.reason) from error


_LIMITS = ("n_parallel", "window", "stall", "comfort", "patience", "prefix_cache", "prefix_quota")
_GUESSES = {"spec": "kind", "spec_max": "most"}
_KNOWN = (*OTHERS, *ARGUMENTS)
