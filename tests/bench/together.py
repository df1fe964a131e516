"""Requests beside each other: what a long prompt costs a running reply, many clients, a beginning that is known.

`python tests/bench/together.py [MODEL] [-t THREADS] [--only stall|clients|prefix] [--comfort S]` prints

stall    the gaps between the pieces of a reply, alone and while another's prompt of 4,000 tokens is read; of these the
         worst without the time in which threads were ready and had no core (Linux)
clients  tokens a second of one client and of eight at once, 126 tokens of prompt and 128 of reply each
prefix   the time to the first token after a system prompt of 2,000 tokens, cold, warm, and for eight who share it
"""

from __future__ import annotations

import argparse
import statistics
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import edgert
from edgert.generation.limits import STALL

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
WORDS = ["lighthouse", "keeper", "old", "stone", "wall", "ships", "water", "birds", "rain", "west", "night", "lamps"]


def prompt(model: edgert.Model, n_tokens: int, seed: int) -> list[int]:
    """Words that no other seed begins with, cut to so many tokens."""
    rng = np.random.default_rng(seed)
    return model.tokenize(" ".join(rng.choice(WORDS, n_tokens).tolist()))[:n_tokens]


def times(stream: Any) -> Iterator[float]:
    for _ in stream:
        yield perf_counter()


def waited() -> dict[str, float]:
    """Seconds that each thread of this process has waited for a core; empty where the system does not tell."""
    threads = Path("/proc/self/task").glob("*/schedstat")
    return {path.parent.name: int(path.read_text().split()[1]) / 1e9 for path in threads}


def stall(model: edgert.Model) -> None:
    """Gaps in milliseconds; a reply runs from before the prompt comes until after its first token."""
    for seed in range(2):
        stream = model.generate(prompt(model, 60, 10 + seed), True, max_tokens=3500, **GREEDY)
        moments: list[float] = []
        waits: list[dict[str, float]] = []

        def read(stream: Any = stream, moments: list[float] = moments, waits: list[dict[str, float]] = waits) -> None:
            for moment in times(stream):
                moments.append(moment)
                waits.append(waited())

        reader = threading.Thread(target=read)
        reader.start()
        wait(1.0)
        began = perf_counter()
        first = next(iter(times(model.generate(prompt(model, 4000, 20 + seed), True, max_tokens=1, **GREEDY))))
        wait(0.5)
        stream.cancel()
        reader.join()
        gaps = [(a, 1e3 * (b - a)) for a, b in pairwise(moments)]
        alone = [gap for at, gap in gaps if at < began - 0.01 and at > moments[0] + 0.1]
        beside = [gap for at, gap in gaps if began <= at < first]
        held = [max((v - u.get(thread, v) for thread, v in after.items()), default=0.0) for u, after in pairwise(waits)]
        own = [gap - 1e3 * late for (_, gap), late in zip(gaps, held, strict=True)]
        own = [gap for gap, (at, _) in zip(own, gaps, strict=True) if began <= at < first]
        usual, median, worst = statistics.median(alone), statistics.median(beside), max(beside)
        print(
            f"gap alone {usual:.2f} ms (worst {max(alone):.2f}), beside a prompt of 4,000 in {first - began:.2f} s: "
            f"median {median:.2f}, 99 % {np.percentile(beside, 99):.2f}, worst {worst:.2f} = {worst / usual:.1f} and "
            f"{worst / median:.1f} medians, without waits for a core {max(own):.2f} = {max(own) / median:.1f} medians; "
            f"{len(beside)} steps"
        )


def wait(seconds: float) -> None:
    threading.Event().wait(seconds)


def clients(model: edgert.Model) -> None:
    for n in (1, 8, 1, 8):
        replies: list[edgert.Reply] = []
        prompts = [prompt(model, 126, 100 * n + i) for i in range(n)]

        def ask(ids: list[int], into: list[edgert.Reply] = replies) -> None:
            into.append(model.generate(ids, max_tokens=128, **GREEDY))

        began = perf_counter()
        threads = [threading.Thread(target=ask, args=(ids,)) for ids in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = perf_counter() - began
        counts = model.snapshot()
        print(
            f"{n} clients: {n * 128 / seconds:.0f} tok/s in all, first token at {1e3 * counts.first_token_p50:.0f} ms "
            f"(median of all so far), step {1e3 * counts.step_p50:.2f} ms"
        )


def prefix(model: edgert.Model) -> None:
    system = prompt(model, 2000, 7)

    def first(ids: list[int], user: str = "") -> tuple[float, int]:
        began = perf_counter()
        stream = model.generate(ids, True, max_tokens=2, user=user, **GREEDY)
        next(stream)
        seconds = perf_counter() - began
        return seconds, stream.reply().stats.cache_n

    cold, _ = first([*system, 11, 12, 13])
    warm = [first([*system, 20 + i, 12, 13], f"u{i % 3}") for i in range(8)]
    middle = statistics.median(seconds for seconds, _ in warm)
    print(
        f"first token: cold {1e3 * cold:.1f} ms, warm {1e3 * middle:.1f} ms = {100 * middle / cold:.1f} % "
        f"({min(n for _, n in warm)} tokens cached)"
    )
    other = prompt(model, 2000, 8)
    found: list[tuple[float, int]] = []
    threads = [threading.Thread(target=lambda i=i: found.append(first([*other, 30 + i, 12]))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(
        f"eight at once: first token at {1e3 * statistics.median(s for s, _ in found):.1f} ms, "
        f"{sum(n == 0 for _, n in found)} of them read it"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("-t", type=int, help="threads")
    parser.add_argument("--only", choices=["stall", "clients", "prefix"])
    parser.add_argument("--spec", default="off")
    parser.add_argument("--stall", type=float, default=STALL)
    parser.add_argument("--comfort", type=float)
    args = parser.parse_args()
    options: dict[str, Any] = {"n_threads": args.t, "spec": args.spec, "stall": args.stall, "comfort": args.comfort}
    with edgert.load(args.model, n_ctx=8192, n_parallel=8, n_cached=16384, **options) as model:
        model.generate(prompt(model, 600, 1), max_tokens=20, **GREEDY)
        for part in (stall, clients, prefix):
            if args.only in (None, part.__name__):
                part(model)


if __name__ == "__main__":
    main()
