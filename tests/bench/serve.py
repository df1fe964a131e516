"""How fast `edgert serve` is for many clients, beside one client and, given its binary, llama-server.

    python tests/bench/serve.py MODEL [-t 2] [--clients 8] [--llama-server PATH] [--repeats 3]

Prints, as JSON: tokens per second of all clients together (each 128 tokens after a prompt of 126), of one client
alone, times to the first token, the longest gap between tokens of a running stream while a long prompt is read, and
the time to the first token of a repeated long system prompt beside the cold one.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WORDS = ["time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"]


class Client:
    """Asks a server with OpenAI's and llama-server's common fields."""

    def __init__(self, port: int) -> None:
        self.port = port

    def post(self, path: str, body: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = json.loads(answer.read())
        if answer.status != 200:
            raise SystemExit(f"{path}: {data}")
        return data

    def prompt(self, n_tokens: int, seed: int) -> list[int]:
        """Token ids that no other seed begins with."""
        draw = random.Random(seed)
        words = " ".join(draw.choice(WORDS) for _ in range(n_tokens))
        ids: list[int] = self.post("/tokenize", {"content": words})["tokens"][:n_tokens]
        assert len(ids) == n_tokens
        return ids

    def stream(self, prompt: Any, n: int, times: list[float]) -> None:
        """Reads a streamed completion; the moments of its pieces go to `times`, its start first."""
        times.append(time.perf_counter())
        body = {"prompt": prompt, "max_tokens": n, "stream": True, "temperature": 0, "ignore_eos": True}
        self.read("/v1/completions", body, times)

    def read(self, path: str, body: dict[str, Any], times: list[float] | None = None) -> None:
        """Reads a streamed answer; the moments of its pieces go to `times`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(answer.read().decode())
        while line := answer.readline():
            if times is not None and line.startswith(b"data: {"):
                times.append(time.perf_counter())


@contextmanager
def running(command: list[str], port: int) -> Iterator[Client]:
    """A server while the block runs."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            except OSError:
                pass
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with {process.returncode}")
            time.sleep(0.1)
        yield Client(port)
    finally:
        process.terminate()
        process.wait(30)


def together(client: Client, n_clients: int, n: int, seed: int) -> tuple[float, float]:
    """Tokens per second of all clients, and the median time to a first token."""
    prompts = [client.prompt(126, seed + i) for i in range(n_clients)]
    times: list[list[float]] = [[] for _ in prompts]
    threads = [threading.Thread(target=client.stream, args=(p, n, t)) for p, t in zip(prompts, times, strict=True)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    return n_clients * n / seconds, statistics.median(t[1] - t[0] for t in times)


def stall(client: Client, n_prompt: int, seed: int) -> dict[str, float]:
    """Gaps between tokens of a stream while another client's long prompt is read."""
    times: list[float] = []
    reader = threading.Thread(target=client.stream, args=(client.prompt(20, seed), 1500, times))
    long = client.prompt(n_prompt, seed + 1)
    reader.start()
    while len(times) < 17:  # its start, and some tokens
        time.sleep(0.005)
    began = time.perf_counter()
    other: list[float] = []
    client.stream(long, 1, other)
    ended = time.perf_counter()
    reader.join()
    gaps = [(b - a) for a, b in itertools.pairwise(times[1:]) if a < ended and b > began]
    usual = [(b - a) for a, b in itertools.pairwise(times[1:]) if b < began or a > ended]
    return {
        "first_token_of_long_ms": 1e3 * (other[1] - other[0]),
        "median_gap_ms": 1e3 * statistics.median(usual or gaps),
        "median_gap_beside_ms": 1e3 * statistics.median(gaps),
        "worst_gap_beside_ms": 1e3 * max(gaps),
    }


def repeated(client: Client, n_prompt: int, seed: int) -> tuple[float, float]:
    """Seconds to the first token of a long prompt, cold, and of the same with another end."""
    system = client.prompt(n_prompt, seed)
    found = []
    for i in range(2):
        times: list[float] = []
        client.stream([*system, *client.prompt(16, seed + 2 + i)], 2, times)
        found.append(times[1] - times[0])
    return found[0], found[1]


def measure(client: Client, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures, medians of the repeats."""
    n_clients, seeds = arguments.clients, iter(range(1000, 10**6, 100))
    together(client, 2, 16, next(seeds))
    alone, all_, cold, warm = [], [], [], []
    for _ in range(arguments.repeats):
        alone.append(together(client, 1, 128, next(seeds)))
        all_.append(together(client, n_clients, 128, next(seeds)))
        times = repeated(client, arguments.system, next(seeds))
        cold.append(times[0])
        warm.append(times[1])
    one, many = (statistics.median(rate for rate, _ in runs) for runs in (alone, all_))
    found: dict[str, Any] = {
        "one_client_tok_s": one,
        "all_clients_tok_s": many,
        "ratio": many / one,
        "first_token_ms_one": 1e3 * statistics.median(first for _, first in alone),
        "first_token_ms_all": 1e3 * statistics.median(first for _, first in all_),
        "long_prompt_cold_ms": 1e3 * statistics.median(cold),
        "long_prompt_repeated_ms": 1e3 * statistics.median(warm),
        "repeated_of_cold": statistics.median(warm) / statistics.median(cold),
    }
    if arguments.stall:
        found["beside_a_long_prompt"] = stall(client, arguments.stall, next(seeds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--system", type=int, default=2000, help="tokens of the repeated prompt")
    parser.add_argument("--stall", type=int, default=4000, help="tokens of the prompt that is read beside a stream")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--comfort", type=float, help="as edgert serve takes it")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--llama-server", help="binary to compare with")
    arguments = parser.parse_args()
    port, n, threads = arguments.port, str(arguments.clients), str(arguments.threads)
    ours = [sys.executable, "-m", "edgert", "serve", "-m", arguments.model, "-c", str(arguments.context)]
    ours += ["-t", threads, "--port", str(port), "-np", n]
    ours += ["--comfort", str(arguments.comfort)] if arguments.comfort is not None else []
    found: dict[str, Any] = {}
    with running(ours, port) as client:
        found["edgert"] = measure(client, arguments)
    if arguments.llama_server:
        theirs = [arguments.llama_server, "-m", arguments.model, "-np", n, "-t", threads, "--port", str(port + 1)]
        theirs += ["-c", str(arguments.context * arguments.clients), "-fa", "on"]
        with running(theirs, port + 1) as client:
            found["llama-server"] = measure(client, arguments)
        found["ratio_to_llama_server"] = (
            found["edgert"]["all_clients_tok_s"] / found["llama-server"]["all_clients_tok_s"]
        )
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
