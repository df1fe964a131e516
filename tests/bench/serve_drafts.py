"""Whether guessing ahead pays among several clients: the same requests with a draft and without, in turn.

    python tests/bench/serve_drafts.py MODEL [-md DRAFT] [--clients 1,2,4,8] [--chats heldout_chats.jsonl] [--repeats 5]

Both servers run all the time, and one of them works. For each number of clients (each 128 tokens, greedy) and each kind
of prompt: the medians of tokens per second of all clients together with and without, and the median of their ratios.
Kinds: `words` (126 random words, as in serve.py), `chats` (first messages of conversations), `sampled` (the same at
temperature 0.8).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from serve import Client, running
from speculation import chats

N_PREDICT = 128


def asked(client: Client, kind: str, held_out: list[Any], place: int) -> tuple[str, dict[str, Any]]:
    """The route and body of the request number `place`, the same for every server."""
    common = {"max_tokens": N_PREDICT, "ignore_eos": True, "stream": True}
    if kind == "words":
        return "/v1/completions", {"prompt": client.prompt(126, 10_000 + place), "temperature": 0} | common
    body = {"messages": held_out[place % len(held_out)], "cache_prompt": False}
    return "/v1/chat/completions", body | common | {"temperature": 0.8 * (kind == "sampled"), "seed": place}


def rate(client: Client, bodies: list[tuple[str, dict[str, Any]]]) -> float:
    """Tokens per second of clients that ask one thing each, all at once."""
    threads = [threading.Thread(target=client.read, args=request) for request in bodies]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(bodies) * N_PREDICT / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("-md", "--model-draft")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--chats", type=Path, help="conversations, one of JSON a line")
    parser.add_argument("--kinds", help="of prompts; all that can be had, unless told")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, default=18180)
    arguments = parser.parse_args()
    counts = [int(n) for n in arguments.clients.split(",")]
    held_out = chats(arguments.chats, 250) if arguments.chats else []
    kinds = (arguments.kinds or ("words,chats,sampled" if held_out else "words")).split(",")
    usual = [sys.executable, "-m", "edgert", "serve", "-m", arguments.model, "-c", "4096", "-np", str(max(counts))]
    usual += ["-t", str(arguments.threads), "--port"]
    drafting = [*usual, str(arguments.port)]
    drafting += ["-md", arguments.model_draft] if arguments.model_draft else []
    rates: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with (
        running(drafting, arguments.port) as guessing,
        running([*usual, str(arguments.port + 1), "--spec-type", "off"], arguments.port + 1) as plain,
    ):
        place = 0
        for turn in range(arguments.repeats + 1):
            for kind in kinds:
                for n in counts:
                    bodies = [asked(plain, kind, held_out, place + i) for i in range(n)]
                    place += n
                    found = rate(guessing, bodies), rate(plain, bodies)
                    if turn:  # the first one warms up
                        rates.setdefault((kind, n), []).append(found)
    rows = [
        {
            "kind": kind,
            "clients": n,
            "with_draft_tok_s": statistics.median(a for a, _ in pairs),
            "without_tok_s": statistics.median(b for _, b in pairs),
            "ratio": statistics.median(a / b for a, b in pairs),
            "ratios": sorted(round(a / b, 3) for a, b in pairs),
        }
        for (kind, n), pairs in rates.items()
    ]
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
