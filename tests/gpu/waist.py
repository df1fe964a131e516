"""Whether what stands above a backend works on a GPU as it does on the processor: text, guesses, the server, scores.

Each check takes a GGUF file with a tokenizer and gives a dict; tests/gpu/measure.py runs them (--steps waist).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "bench"))
PROMPTS = (
    "Explain in a few sentences why the sky is blue and why sunsets are red.",
    "Write a short story about a dog.",
    "List ten fruits.",
    "How do I boil an egg?",
    "What is the capital of France, and what is it known for?",
    "Write a Python function that adds the even numbers of a list.",
    "Give me five tips for a healthy breakfast.",
    "I am nervous about a job interview tomorrow. What should I do?",
)
DRAFT = ROOT / "edgert" / "assets" / "smollm2-draft.gguf"


def answers(path: Path) -> dict[str, Any]:
    """A greedy reply of the GPU beside the processor's: how many tokens are the same before they part.

    CUDA rounds otherwise than the processor: what is chosen differs where two tokens are nearly as likely.
    """
    import edgert

    found: dict[str, Any] = {}
    for backend in ("llama", "cpu"):
        with edgert.load(path, backend=backend, n_ctx=1024, spec="off") as model:
            reply = model.chat([{"role": "user", "content": PROMPTS[0]}], max_tokens=96, temperature=0)
            found[backend] = {"verdict": str(model.verdict), "text": reply.text, "rate": _rate(reply)}
    ours, theirs = found["llama"]["text"], found["cpu"]["text"]
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return found | {"characters alike": same}


def _rate(reply: Any) -> float:
    return round(reply.stats.predicted_per_second, 1)


def guesses(path: Path) -> dict[str, Any]:
    """Tokens per second without guesses, with those of a draft on the processor, and of what was said, in turn; how
    many were right. Texts differ where the GPU rounds steps of several tokens otherwise than those of one."""
    import edgert

    sides: dict[str, dict[str, Any]] = {"off": {}, "draft": {"draft": str(DRAFT)}, "ngram": {}}
    found: dict[str, Any] = {name: {"rates": [], "right": 0, "guessed": 0} for name in sides}
    with ExitStack() as stack:
        models = {
            name: stack.enter_context(
                edgert.load(path, backend="llama", n_ctx=1024, spec="auto" if options else name, **options)
            )
            for name, options in sides.items()
        }
        for prompt in PROMPTS:
            for name, model in models.items():
                messages = [{"role": "user", "content": prompt}]
                reply = model.chat(messages, max_tokens=192, temperature=0, ignore_eos=True)
                side = found[name]
                side["rates"].append(_rate(reply))
                side["right"] += reply.stats.draft_n_accepted
                side["guessed"] += reply.stats.draft_n
        for name, model in models.items():
            if (guesser := model.speculator) is not None:
                found[name]["rows"] = [round(1e3 * guesser.costs[n], 3) for n in (1, 2, 3, 4, 6, 8, 12, 16)]
                found[name]["draft"] = [round(1e3 * guesser.draft_cost(n), 3) for n in (1, 4, 8)]
    rates = {name: statistics.mean(side["rates"]) for name, side in found.items()}
    return found | {"ratio": {name: round(rate / rates["off"], 3) for name, rate in rates.items()}}


def serving(path: Path) -> dict[str, Any]:
    """The server with its layers on the GPU: eight clients, a repeated prompt, an answer held to a schema, `top`."""
    import serve

    port = 18473
    command = [sys.executable, "-m", "edgert", "serve", "-m", str(path), "-c", "4096", "--port", str(port)]
    command += ["--backend", "llama", "--require"]
    with serve.running(command, port) as client:
        settings = argparse.Namespace(clients=8, repeats=3, system=2000, stall=3000)
        found: dict[str, Any] = serve.measure(client, settings)
        schema = {
            "type": "object",
            "properties": {"answer": {"type": "integer"}},
            "required": ["answer"],
            "additionalProperties": False,
        }
        body = {
            "messages": [{"role": "user", "content": "What is 6 times 7?"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}},
            "max_tokens": 64,
            "temperature": 0,
        }
        found["by schema"] = json.loads(client.post("/v1/chat/completions", body)["choices"][0]["message"]["content"])
        found["top"] = json.loads(run_edgert("top", f"http://127.0.0.1:{port}", "--once", "--json"))["gpus"]
    return found


def scores(path: Path) -> dict[str, Any]:
    """Perplexity by the GPU and by the processor, and an importance matrix taken on the GPU."""
    text, found = ROOT / "README.md", {}
    for backend in ("llama", "cpu"):
        shown = run_edgert(
            "perplexity", "-m", path, "-f", text, "-c", 512, "--chunks", 8, "--backend", backend, "--require", "--json"
        )
        found[backend] = json.loads(shown)
    matrix = path.with_name("imatrix-of-gpu.gguf.tmp")
    run_edgert("imatrix", "-m", path, "-f", text, "-o", matrix, "--chunks", 4, "--backend", "llama", "--require")
    found["imatrix"] = {"bytes": matrix.stat().st_size}
    matrix.unlink()
    return found


def run_edgert(*arguments: Any) -> str:
    from measure import edgert

    return edgert(*arguments)


CHECKS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "answers": answers,
    "guesses": guesses,
    "server": serving,
    "scores": scores,
}


def of(path: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """The checks of one file, by name."""
    return {f"{path.stem}: {name}": functools.partial(check, path) for name, check in CHECKS.items()}
