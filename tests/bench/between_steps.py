"""What lies between two steps of a chat: choosing a token over the whole vocabulary, decoding, stop rules, streaming.

`python tests/bench/between_steps.py [MODEL]` answers a prompt in several ways, each piece taken by a reader as a
terminal or a server does, and prints the time from the end of a forward step to the begin of the next one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import edgert

PROMPT = "Tell me a long story about a lighthouse keeper and the sea."
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "default sampling": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "no top-k": {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.05},
    "penalties and stops": {"repeat_penalty": 1.1, "repeat_last_n": -1, "stop": ["\n\n\n", "The End", "<|user|>"]},
}


class Watch:
    """Remembers when a backend's steps began and when they ended, in nanoseconds."""

    def __init__(self, backend: Any) -> None:
        self.begins: list[int] = []
        self.ends: list[int] = []
        self._inside = False
        backend.forward, backend.extend = self._around(backend.forward), self._around(backend.extend)

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if self._inside:  # one way to take a step may call the other
                return step(*arguments)
            self._inside = True
            self.begins.append(perf_counter_ns())
            try:
                return step(*arguments)
            finally:
                self.ends.append(perf_counter_ns())
                self._inside = False

        return timed

    def gaps(self) -> list[float]:
        """Milliseconds from each step's end to the next one's begin; steps and gaps are forgotten."""
        gaps = [(begin - end) / 1e6 for end, begin in zip(self.ends, self.begins[1:], strict=False)]
        self.begins, self.ends = [], []
        return gaps


def measure(model: edgert.Model, watch: Watch, n: int, params: dict[str, Any]) -> list[float]:
    """Milliseconds between the decode steps of one streamed answer of `n` tokens."""
    watch.gaps()
    messages = [{"role": "user", "content": PROMPT}]
    for _ in model.chat(messages, True, max_tokens=n, ignore_eos=True, seed=1, **params):
        pass
    return watch.gaps()[-(n - 1) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("-n", type=int, default=256, help="tokens of an answer")
    parser.add_argument("-r", type=int, default=3, help="answers of each kind, in turn")
    parser.add_argument("-t", type=int, help="threads")
    args = parser.parse_args()
    with edgert.load(args.model, n_threads=args.t, spec="off") as model:
        watch = Watch(model.backend)
        measure(model, watch, args.n, {})
        gaps: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.r):
            for way, params in WAYS.items():
                gaps[way] += measure(model, watch, args.n, params)
    print(f"{args.model}, vocabulary of {model.n_vocab}: ms between two steps")
    print(f"{'':<22}{'median':>8}{'mean':>8}{'90 %':>8}")
    for way, values in gaps.items():
        tenth = statistics.quantiles(values, n=10)[-1]
        print(f"{way:<22}{statistics.median(values):>8.3f}{statistics.fmean(values):>8.3f}{tenth:>8.3f}")


if __name__ == "__main__":
    main()
