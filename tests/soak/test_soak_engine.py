"""Mixed load with faults for as long as EDGERT_SOAK_SECONDS says (20 minutes: 1200): memory and descriptors stay flat.

Clients of four users ask, leave early, run out of time and find the queue full, while steps fail, memory ends and the
backend is slow now and then. Every reply is compared with what it must be.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
from fake import FakeTokenizer, hashed
from paged_fake import PagedFake

from edgert.devices import probe
from edgert.errors import DoesNotFitError, QueueFullError, QueueTimeoutError
from edgert.generation import Limits
from edgert.model import Model

SECONDS = float(os.environ.get("EDGERT_SOAK_SECONDS", "15"))
N_CLIENTS = 16


class Outcomes(Counter[str]):
    """How requests ended, told by many threads."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def note(self, outcome: str) -> None:
        with self._lock:
            self[outcome] += 1


def client(model: Model, seed: int, end: float, outcomes: Outcomes, wrong: list[str]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < end:
        beginning = [(7 * i * (rng.randrange(3) + 1)) % 90 for i in range(rng.randrange(120))]
        prompt = [*beginning, seed, *(rng.randrange(200) for _ in range(rng.randrange(1, 20)))]
        tokens: list[int] = []
        patience = rng.choice([None, None, None, rng.randrange(1, 20)])
        try:
            stream = model.generate(
                prompt,
                True,
                max_tokens=rng.randrange(1, 40),
                temperature=0,
                user=f"user {seed % 4}",
                priority=rng.randrange(3),
                timeout=rng.choice([None, None, 0.05, 5]),
                queue_timeout=rng.choice([None, 0.02, 5]),
                cache_prompt=rng.random() < 0.9,
            )
            for n, chunk in enumerate(stream):
                tokens += chunk.tokens
                if n == patience:
                    break
            outcomes.note(chunk.finish_reason or "left")
            del stream
        except QueueFullError:
            outcomes.note("refused")
            time.sleep(0.005)
        except (QueueTimeoutError, DoesNotFitError, OSError) as error:
            outcomes.note(type(error).__name__)
        told = list(prompt)
        for token in tokens:
            if token != hashed(told):
                wrong.append(f"{prompt} {tokens}")
                break
            told.append(token)


def descriptors() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


@pytest.mark.slow
def test_hours_of_load_leave_nothing_behind() -> None:
    logging.getLogger("edgert").setLevel(logging.CRITICAL + 1)
    backend = PagedFake(n_ctx=200, n_batch=64, n_seq_max=12, n_cached=700)
    backend.batches = deque(maxlen=10)  # type: ignore[assignment]
    rng = random.Random(0)

    def fault(batch: Any) -> None:
        luck = rng.random()
        if luck < 0.002:
            raise OSError("fault")
        if luck < 0.004:
            raise DoesNotFitError("fault")
        if luck < 0.01:
            time.sleep(0.01)

    backend.before_forward = fault
    outcomes = Outcomes()
    wrong: list[str] = []
    tokenizer: Any = FakeTokenizer()
    with Model(backend, tokenizer, limits=Limits(n_parallel=5, n_queue=9, patience=0.05)) as model:
        begin, samples = time.monotonic(), []
        threads = [
            threading.Thread(target=client, args=(model, seed, begin + SECONDS, outcomes, wrong))
            for seed in range(N_CLIENTS)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(min(1.0, SECONDS / 20))
            samples.append((time.monotonic() - begin, probe.process_memory()[0], descriptors()))
        for thread in threads:
            thread.join()
        end = time.monotonic() + 60
        while (counts := model.snapshot()).n_running and time.monotonic() < end:
            time.sleep(0.01)
        engine = model._engine
        assert wrong == []
        assert (counts.n_running, counts.n_waiting) == (0, 0)
        assert not engine._queue._active and not engine._outbox
        ended = counts.finished + counts.cancelled + counts.failed + counts.timed_out
        assert (ended, counts.refused) == (outcomes.total() - outcomes["refused"], outcomes["refused"])
        expected = {"length", "left", "timeout", "refused", "QueueTimeoutError", "OSError"}
        assert expected <= set(outcomes), outcomes
        for slot in engine._slots._slots:
            assert slot.task is None
            engine._slots._clear(slot)
        assert backend.n_pages == 0
        gc.collect()
    warm = [sample for sample in samples if sample[0] > SECONDS / 3]
    growth = warm[-1][1] - warm[0][1]
    print(f"{SECONDS:.0f} s: {dict(outcomes)}; memory grew by {growth / 1e6:.1f} MB")
    print(f"descriptors {warm[0][2]} -> {warm[-1][2]}, {counts.preempted} set aside, {counts.prefix_hits} prefix hits")
    assert growth < 8e6
    assert warm[-1][2] <= warm[0][2]
