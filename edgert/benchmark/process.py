"""An engine in a process of its own that is told over a pipe what to run: both sides of the pipe.

So its peak memory is its own, a crash of one does not end the others, and only one computes at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from edgert import ending
from edgert.benchmark.runner import Runner, Test
from edgert.errors import BackendUnavailableError, EdgertError

if TYPE_CHECKING:
    from edgert.backends.base import Backend, Verdict


class EngineProcess:
    """An engine in a process of its own. Use it in a `with`, or call close()."""

    def __init__(self, path: Path, backend: str, n_ctx: int, n_threads: int | None, **options: Any) -> None:
        """Starts loading; `engine` waits for it.

        options:  what the backend's class takes besides
        """
        request = {
            "path": str(path),
            "backend": backend,
            "n_ctx": n_ctx,
            "n_threads": n_threads,
            "options": options,
        }
        self._name = backend
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from edgert.benchmark.process import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._send(request)
        self._engine: dict[str, Any] | None = None

    @property
    def engine(self) -> dict[str, Any]:
        """What runs: backend, device, version, n_threads, n_batch, n_ubatch, flash_attn, cpu_info.

        Raises: EdgertError when the model could not be loaded.
        """
        return self.load()

    def load(self, progress: Callable[[int, int], object] = lambda done, of: None) -> dict[str, Any]:
        """As `engine`; progress: called with (kernels compiled, kernels to compile) until it is there."""
        while self._engine is None:
            answer = self._receive()
            if "compiled" in answer:
                progress(*answer["compiled"])
            else:
                self._engine = answer
        return self._engine

    def run(self, test: Test, warm_up: bool = False) -> int:
        """Runs a test once: nanoseconds. Raises: EdgertError when the engine fails."""
        self._send({"test": asdict(test), "warm_up": warm_up})
        while "compiled" in (answer := self._receive()):  # a shape of step that loading did not prepare
            pass
        return int(answer["ns"])

    def peak_rss(self) -> int:
        """Bytes that the process held at most so far."""
        self._send({"peak_rss": True})
        return int(self._receive()["peak_rss"])

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EdgertError(self._epitaph()) from None

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EdgertError(self._epitaph())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kind = BackendUnavailableError if answer["unavailable"] else EdgertError
            raise kind(answer["error"])
        return answer

    def _epitaph(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"The process of the {self._name} engine ended with {how}" + (f": {words[-1]}" if words else ".")

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The other side of the pipe.


def serve() -> None:
    """Runs what an EngineProcess asks for over standard input and output, until the input ends."""
    ending.with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not come between the answers

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    backend = None
    try:
        request = json.loads(sys.stdin.readline())
        backend, facts = _load(request, lambda done, of: answer({"compiled": [done, of]}))
        answer(facts)
        runner = Runner(backend)
        for line in sys.stdin:
            message = json.loads(line)
            if "test" in message:
                test = Test(**message["test"])
                if message["warm_up"]:
                    runner.warm_up(test)
                    answer({"ns": 0})
                else:
                    answer({"ns": runner.run(test)})
            else:
                from edgert.devices import probe

                answer({"peak_rss": probe.process_memory()[1]})
    except EdgertError as error:
        answer({"error": str(error), "unavailable": isinstance(error, BackendUnavailableError)})
    except KeyboardInterrupt:
        pass
    finally:
        if backend is not None:
            backend.close()


def _load(request: dict[str, Any], progress: Callable[[int, int], None]) -> tuple[Backend, dict[str, Any]]:
    from importlib.metadata import version

    from edgert import backends
    from edgert.devices import probe

    n_threads = probe.check_threads(request["n_threads"] or probe.default_threads())
    backend = backends.load(
        request["path"],
        backend=request["backend"],
        n_ctx=request["n_ctx"],
        n_threads=n_threads,
        progress=progress,
        **request["options"],
    )
    details = backend.verdict.details
    name = backend.verdict.backend
    return backend, {
        "backend": name,
        "device": backend.verdict.device,
        "verdict": str(backend.verdict),
        "n_gpu_layers": int(details.get("n_gpu_layers", 0)),
        "version": version("llama-cpp-python" if name == "llama" else "edgert"),
        "build": _build(backend.verdict),
        "n_threads": n_threads,
        "n_batch": backend.n_batch,
        "n_ubatch": int(details.get("n_ubatch", backend.n_batch)),
        "flash_attn": details.get("flash_attn", "on"),
        "isa": details.get("isa", ""),
        "type_k": details.get("type_k", "f16"),
        "type_v": details.get("type_v", "f16"),
        "cpu_info": probe.probe().model_name,
    }


def _build(verdict: Verdict) -> str:
    """What was built, and for what."""
    details = verdict.details
    if verdict.backend == "llama":
        parts = [verdict.reason, details["buffers"], *([f"AMX {details['amx']}"] if "amx" in details else [])]
        return "; ".join(parts)
    return verdict.reason
