"""Sessions, by way of the compiled graph that is kept for providers whose compilation takes long."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgert.backends.onnx.providers import Assignment, Device, open_session, runtime, session_options
from edgert.backends.onnx.store import ModelFolder
from edgert.errors import BackendUnavailableError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """A session that is ready.

    seconds:  what opening it took, compilation included
    cache:    "hit", "compiled", "damaged: compiled again", or "" for providers without blobs
    """

    session: Any
    assignment: Assignment
    seconds: float
    cache: str = ""


def compiled(folder: ModelFolder, device: Device, graph: Path, n_threads: int) -> Compiled:
    """Opens a graph, from its blob where there is one.

    Raises: BackendUnavailableError when the provider refuses it.
    """
    start = time.perf_counter()
    cache = ""
    path = graph
    if device.provider.blobs:
        path = folder.blob(graph, _circumstances(device))
        cache = "hit"
        if not path.exists():
            cache = "compiled"
            _compile(device, graph, path, n_threads)
        try:
            session, assignment = open_session(device, path, n_threads)
        except BackendUnavailableError as error:
            if cache != "hit":
                raise
            log.warning("%s does not load (%s): it is compiled again.", path, error)
            path.unlink(missing_ok=True)
            cache = "damaged: compiled again"
            _compile(device, graph, path, n_threads)
            session, assignment = open_session(device, path, n_threads)
    else:
        session, assignment = open_session(device, path, n_threads)
    return Compiled(session, assignment, time.perf_counter() - start, cache)


def _circumstances(device: Device) -> str:
    """All that a blob depends on beside the graph, whose name holds its shapes and style."""
    provider = device.provider
    driver = Path("/proc/version").read_text("utf-8") if device.kind == "npu" and Path("/proc/version").exists() else ""
    return json.dumps([provider.name, device.kind, device.version, provider.options.get(device.kind, {}), driver])


def _compile(device: Device, graph: Path, blob: Path, n_threads: int) -> None:
    part = blob.with_name(f"{os.getpid()}-{blob.name}")
    try:
        options = session_options(device, n_threads)
        compiler = runtime().ModelCompiler(options, str(graph), embed_compiled_data_into_model=True)
        compiler.compile_to_file(str(part))
        part.replace(blob)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BackendUnavailableError(f"{device.label} does not compile the model: {lines[0][:300]}") from error
    finally:
        part.unlink(missing_ok=True)
