"""Two servers as programs with real models: a small one answers what fits, and another takes the rest."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fake import PATIENCE

import edgert

EDGE = Path(edgert.__file__).parent / "assets" / "smollm2-draft.gguf"
SHORT = [{"role": "user", "content": "Name a colour."}]
LONG = [{"role": "user", "content": "Tell me about rain. " * 60}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`edgert serve` while the block runs, its model loaded: its address, and the process."""
    command = [sys.executable, "-m", "edgert", "serve", "--port", "0", "-t", "1", "-np", "2", "--spec-type", "off"]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stderr
    watchdog = threading.Timer(2 * PATIENCE, process.kill)
    watchdog.start()
    url = ""
    try:
        for line in process.stderr:
            if line.startswith("listening on "):
                url = line.split()[-1]
            if " is ready: " in line:
                break
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield url, process
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()


def ask(url: str, messages: Any, **fields: Any) -> tuple[int, Any]:
    body = json.dumps({"messages": messages} | GREEDY | fields).encode()
    try:
        with urllib.request.urlopen(f"{url}/v1/chat/completions", body, timeout=PATIENCE) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.slow
def test_an_edge_and_its_cloud(smollm2_path: Path) -> None:
    with (
        serving("-m", str(smollm2_path), "-c", "2048", "--api-key", "secret", "--alias", "cloud") as (far, cloud),
        serving(
            *("-m", str(EDGE), "-c", "128"),
            *("--upstream", f"{far}/v1", "--upstream-key", "secret", "--upstream-model", "cloud"),
        ) as (near, _),
    ):
        there = openai.OpenAI(base_url=f"{far}/v1", api_key="secret", max_retries=0)
        expected = there.chat.completions.create(model="cloud", messages=LONG, **GREEDY)  # type: ignore[call-overload]
        status, here = ask(near, SHORT)
        assert status == 200 and "served_by" not in here and here["model"] == "smollm2-draft"
        status, found = ask(near, LONG)
        assert (status, found["served_by"], found["model"]) == (200, "upstream", "smollm2")
        assert found["choices"][0]["message"]["content"] == expected.choices[0].message.content
        assert found["usage"]["prompt_tokens"] > 128
        client = openai.OpenAI(base_url=f"{near}/v1", api_key="none", max_retries=0)
        raw = client.chat.completions.with_raw_response.create(
            model="smollm2-draft",
            messages=LONG,
            stream=True,
            **GREEDY,  # type: ignore[call-overload]
        )
        assert raw.headers["x-edgert-served-by"] == "upstream"
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in raw.parse() if chunk.choices)
        assert streamed == expected.choices[0].message.content
        cloud.terminate()
        cloud.wait(PATIENCE)
        status, error = ask(near, LONG)
        assert status == 400 and error["error"]["code"] == "context_length_exceeded"  # the edge's own
        assert ask(near, SHORT)[0] == 200
