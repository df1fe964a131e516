"""What is counted and measured, for Prometheus and `edgert top`. No text of any request is in it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from edgert.devices import gpus

if TYPE_CHECKING:
    from edgert.reply import Stats
    from edgert.server.admission import Admission
    from edgert.server.registry import Registry

_FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_BETWEEN = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


class Metrics:
    """One server's measures."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"edgert_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "Requests answered, by route and status.", "route", "status")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens computed.")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens found in the cache.")
        self.predicted_tokens = counter("predicted_tokens", "Tokens generated.")
        self.draft_tokens = counter("draft_tokens", "Tokens guessed.")
        self.draft_accepted = counter("draft_tokens_accepted", "Guessed tokens that the model chose.")
        self.prompt_seconds = counter("prompt_seconds", "Time from a prompt's start to its logits.")
        self.predicted_seconds = counter("predicted_seconds", "Time from the prompt's logits to the last token.")
        self.finished = counter("finished", "Answers, by how they ended.", "reason")
        self.first_token = Histogram(
            "edgert_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_FIRST,
            registry=self.registry,
        )
        self.between_tokens = Histogram(
            "edgert_between_tokens_seconds",
            "From a piece of an answer to its next.",
            buckets=_BETWEEN,
            registry=self.registry,
        )

    def watch(self, registry: Registry, admission: Admission) -> None:
        """Reads the state of these whenever the measures are asked for."""
        self.registry.register(_State(registry, admission))

    def count(self, stats: Stats, reason: str) -> None:
        """Takes in an answer that has ended."""
        self.finished.labels(reason).inc()
        self.prompt_tokens.inc(stats.prompt_n)
        self.cached_tokens.inc(stats.cache_n)
        self.predicted_tokens.inc(stats.predicted_n)
        self.prompt_seconds.inc(max(0.0, stats.prompt_ms) / 1e3)
        self.predicted_seconds.inc(max(0.0, stats.predicted_ms) / 1e3)
        self.draft_tokens.inc(stats.draft_n)
        self.draft_accepted.inc(stats.draft_n_accepted)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class _State:
    """Gauges that are read when asked for."""

    def __init__(self, registry: Registry, admission: Admission) -> None:
        self._models, self._admission = registry, admission
        self._began = time.time()

    def collect(self) -> Iterable[Metric]:
        def gauge(name: str, text: str, value: float) -> Metric:
            return GaugeMetricFamily(f"edgert_{name}", text, value=value)

        loaded = {place.spec.name: entry for place in self._models.places.values() if (entry := place.loaded)}
        yield gauge("start_time_seconds", "When the server began.", self._began)
        yield gauge("uptime_seconds", "For how long it has run.", time.time() - self._began)
        yield gauge("answers_inside", "Answers in work and waiting.", self._admission.inside)
        yield gauge("answers_waiting", "Answers beyond those that the engine works on.", self._admission.waiting)
        yield gauge("answers_parallel", "Answers that the engine works on at once.", self._admission.parallel)
        yield gauge("answers_refused", "Requests refused for want of a place.", self._admission.refused)
        yield gauge("cpu_seconds", "Processor time of this process.", time.process_time())
        yield gauge("memory_bytes", "Memory of this process.", _resident())
        users = GaugeMetricFamily("edgert_model_users", "Requests that use a model.", labels=["model"])
        memory = GaugeMetricFamily("edgert_model_memory_bytes", "A model's memory.", labels=["model", "purpose"])
        engine = GaugeMetricFamily("edgert_engine", "An engine's figures, by name.", labels=["model", "figure"])
        for name, entry in loaded.items():
            users.add_metric([name], entry.users)
            try:
                for purpose, size in entry.model.backend.memory().items():
                    memory.add_metric([name, purpose], size)
            except ValueError:  # closed in between
                continue
            for figure, value in asdict(entry.model.snapshot()).items():
                engine.add_metric([name, figure], -1 if value is None else value)
        yield users
        yield memory
        yield engine
        busy = GaugeMetricFamily("edgert_gpu_percent", "How busy a GPU is, by all programs.", labels=["gpu"])
        used = GaugeMetricFamily("edgert_gpu_memory_used_bytes", "Memory of a GPU in use.", labels=["gpu"])
        for number, gpu in enumerate(gpus.gpus()):
            name = f"{number} {gpu.name}"
            if gpu.utilisation is not None:
                busy.add_metric([name], gpu.utilisation)
            if gpu.memory_total is not None and gpu.memory_free is not None:
                used.add_metric([name], gpu.memory_total - gpu.memory_free)
        yield busy
        yield used


def _resident() -> float:
    """Bytes of memory that this process has now, or had at most where the system does not tell; 0: unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)
