"""`edgert top`: watches a server."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import click

from edgert.cli.flags import Finite, flag, json_flag
from edgert.cli.verb import verb
from edgert.cli.watching import Watch
from edgert.errors import EdgertError

_LINE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = dict[str, list[tuple[dict[str, str], float]]]


@verb()
@click.argument("url", default="http://127.0.0.1:8080")
@flag("--api-key", help="The server's key.")
@click.option("--interval", type=Finite(0.1), default=1.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Look once and stop.")
@json_flag
def command(url: str, api_key: str | None, interval: float, once: bool, as_json: bool) -> None:
    """Shows how busy a server is: rates, times, queue, caches, memory; q leaves.

    URL is that of `edgert serve`. Rates are of the last interval, and with --once since the server's start;
    percentiles are of the last interval in which there were answers.
    """
    url = url if "//" in url else f"http://{url}"
    before: Samples | None = None
    table: dict[str, Any] = {}
    with Watch() as watch:
        while True:
            now = samples(fetch(f"{url.rstrip('/')}/metrics", api_key))
            table = figures(now, before, table)
            if as_json:
                click.echo(json.dumps(table))
            elif once:
                click.echo(render(url, table))
            else:
                watch.draw(render(url, table, watch.width))
            if once or not watch.wait(interval):
                return
            before = now


def fetch(url: str, key: str | None) -> str:
    """The text of a server's measures. Raises: EdgertError in one sentence."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            text: str = answer.read().decode("utf-8", "replace")
            return text
    except urllib.error.HTTPError as error:
        advice = "give its --api-key" if error.code == 401 else f"it answers {error.code}"
        raise EdgertError(f"{url} cannot be read: {advice}.") from error
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "reason", error))
        raise EdgertError(f"No server answers at {url} ({reason}): start one with `edgert serve`.") from error


def samples(text: str) -> Samples:
    """Prometheus' text as (labels, value) by name."""
    found: Samples = {}
    for line in text.splitlines():
        if match := _LINE.fullmatch(line):
            labels: dict[str, str] = dict(_LABEL.findall(match[2] or ""))
            found.setdefault(match[1], []).append((labels, float(match[3])))
    return found


def figures(now: Samples, before: Samples | None, last: Mapping[str, Any]) -> dict[str, Any]:
    """What is shown, by name; times in milliseconds, memory in bytes."""
    began = total(now, "edgert_start_time_seconds")
    if before and total(before, "edgert_start_time_seconds") != began:
        before = None  # another server's: this one counts from nothing
    seconds = total(now, "edgert_uptime_seconds") - (total(before, "edgert_uptime_seconds") if before else 0.0)
    seconds = max(seconds, 1e-3)

    def rate(name: str) -> float:
        return (total(now, name) - (total(before, name) if before else 0.0)) / seconds

    def share(part: str, whole: str) -> float | None:
        a, b = (total(now, name) for name in (part, whole))
        return a / b if b else None

    cached, computed = total(now, "edgert_cached_tokens_total"), total(now, "edgert_prompt_tokens_total")
    engine = {labels["figure"]: value for labels, value in now.get("edgert_engine", [])}
    table: dict[str, Any] = {
        "up_seconds": time.time() - began,
        "requests_per_second": rate("edgert_finished_total"),
        "predicted_per_second": rate("edgert_predicted_tokens_total"),
        "prompt_per_second": rate("edgert_prompt_tokens_total"),
        "inside": total(now, "edgert_answers_inside"),
        "waiting": total(now, "edgert_answers_waiting"),
        "parallel": total(now, "edgert_answers_parallel"),
        "refused": total(now, "edgert_answers_refused"),
        "batch_sequences": engine.get("batch_sequences", 0.0),
        "batch_tokens": engine.get("batch_tokens", 0.0),
        "cache_hits": cached / (cached + computed) if cached + computed else None,
        "kv_bytes": engine.get("kv_bytes", 0.0),
        "kv_bytes_total": engine.get("kv_bytes_total", 0.0),
        "draft_acceptance": share("edgert_draft_tokens_accepted_total", "edgert_draft_tokens_total"),
        "cpu_cores": rate("edgert_cpu_seconds"),
        "memory_bytes": total(now, "edgert_memory_bytes"),
        "gpus": _gpus(now),
        "models": sorted(labels["model"] for labels, _ in now.get("edgert_model_users", [])),
    }
    for name, title in (("edgert_first_token_seconds", "first_token"), ("edgert_between_tokens_seconds", "between")):
        for percent in (50, 99):
            value = percentile(now, before, name, percent / 100)
            key = f"{title}_p{percent}_ms"
            table[key] = last.get(key) if value is None else 1e3 * value
    return table


def _gpus(now: Samples) -> list[dict[str, Any]]:
    """Each GPU whose driver tells something: its name, how busy it is in percent, and bytes of memory in use."""
    percents, used = (
        {labels["gpu"]: value for labels, value in now.get(f"edgert_gpu_{name}", [])}
        for name in ("percent", "memory_used_bytes")
    )
    return [
        {"name": name.partition(" ")[2], "percent": percents.get(name), "memory_used_bytes": used.get(name)}
        for name in sorted(percents.keys() | used.keys(), key=lambda name: int(name.partition(" ")[0]))
    ]


def total(found: Samples | None, name: str) -> float:
    """The sum over all labels."""
    return sum(value for _, value in (found or {}).get(name, []))


def percentile(now: Samples, before: Samples | None, name: str, share: float) -> float | None:
    """A percentile of a histogram's new entries, straight within a bucket; None where there are none."""
    old = {labels["le"]: value for labels, value in (before or {}).get(f"{name}_bucket", [])}
    counts = [
        (float(labels["le"]), value - old.get(labels["le"], 0.0)) for labels, value in now.get(f"{name}_bucket", [])
    ]
    counts.sort()
    if not counts or counts[-1][1] <= 0:
        return None
    goal, low, below = share * counts[-1][1], 0.0, 0.0
    for edge, count in counts:
        if count >= goal:
            if edge == float("inf"):
                return low
            return low + (edge - low) * (goal - below) / max(count - below, 1e-9)
        low, below = edge, count
    return low


def render(url: str, table: Mapping[str, Any], width: int = 80) -> str:
    """The screen: two columns of figures, or one where two have no room."""

    def shown(value: float | None, form: str = ".0f", unit: str = "") -> str:
        return "–" if value is None else f"{value:{form}}{unit}"

    rows = [
        ("answers", f"{table['requests_per_second']:.2f}/s", "tokens", f"{table['predicted_per_second']:.0f}/s"),
        ("inside", f"{table['inside']:.0f}", "waiting", f"{table['waiting']:.0f} (refused {table['refused']:.0f})"),
        (
            "batch",
            f"{table['batch_sequences']:.0f} of {table['parallel']:.0f}",
            "prompts",
            f"{table['prompt_per_second']:.0f} tokens/s",
        ),
        (
            "first token",
            shown(table["first_token_p50_ms"], ".0f", " ms"),
            "P99",
            shown(table["first_token_p99_ms"], ".0f", " ms"),
        ),
        ("between", shown(table["between_p50_ms"], ".1f", " ms"), "P99", shown(table["between_p99_ms"], ".1f", " ms")),
        (
            "cache hits",
            _percent(table["cache_hits"]),
            "KV",
            f"{table['kv_bytes'] / 1e6:.0f} of {table['kv_bytes_total'] / 1e6:.0f} MB",
        ),
        ("drafts", _percent(table["draft_acceptance"]), "memory", f"{table['memory_bytes'] / 1e6:.0f} MB"),
        ("CPU", f"{table['cpu_cores']:.2f} cores", "GPU", ", ".join(map(_gpu, table["gpus"])) or "–"),
    ]
    lines = [f"edgert at {url}, up {table['up_seconds']:.0f} s: {', '.join(table['models']) or 'no model loaded'}"]
    if width >= 60:
        lines += [f"{a:<12}{b:>16}   {c:<9}{d:>20}" for a, b, c, d in rows]
    else:
        lines += [f"{name:<12}{value}" for a, b, c, d in rows for name, value in ((a, b), (c, d))]
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _gpu(gpu: Mapping[str, Any]) -> str:
    busy, used = gpu["percent"], gpu["memory_used_bytes"]
    return " ".join([*([] if busy is None else [f"{busy:.0f} %"]), *([] if used is None else [f"{used / 1e9:.1f} GB"])])
