"""`edgert serve` as a person starts and ends it, on a real model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from fake import PATIENCE
from program import program


def chat(url: str, **fields: object) -> dict[str, object]:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0} | fields)
    with urllib.request.urlopen(f"{url}/v1/chat/completions", body.encode(), timeout=PATIENCE) as answer:
        found: dict[str, object] = json.loads(answer.read())
        return found


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGTERM")
def test_from_its_start_to_its_end(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    paths = {
        name: tiny_model(family, n_ctx=512, template=template) for name, family in (("a", "llama"), ("b", "qwen2"))
    }
    config = tmp_path / "edgert.toml"
    config.write_text(
        "port = 0\nthreads = 1\nparallel = 2\nctx-size = 200\n"
        + "".join(f"[models.{name}]\nmodel = {json.dumps(str(path))}\n" for name, path in paths.items())
        + "ctx-size = 300\n"
    )
    command = ["-m", "edgert", "serve", "--config", str(config), "--verbose"]
    with program(*command, until=" is ready: ", EDGERT_QUEUE="3") as (process, lines):
        assert process.stderr
        url = next(line.split()[-1] for line in lines if line.startswith("listening on "))
        assert chat(url)["model"] == "a"
        assert chat(url, model="b")["model"] == "b"
        with urllib.request.urlopen(f"{url}/v1/models", timeout=PATIENCE) as answer:
            about = {model["id"]: model["meta"] for model in json.load(answer)["data"]}
        assert about["a"]["n_ctx"] == 200
        assert about["b"]["n_ctx"] == 300
        assert "1 thread:" in about["a"]["verdict"]
        assert "1 thread:" in about["b"]["verdict"]
        process.send_signal(signal.SIGTERM)
        lines += process.stderr.readlines()
        assert process.wait(PATIENCE) in (0, -signal.SIGTERM)
        text = "".join(lines)
        assert "Traceback" not in text
        assert "POST /v1/chat/completions 200" in text
        assert '"Hi"' not in text


def test_a_port_that_is_taken(tiny_model: Callable[..., Path]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "edgert", "serve", "-m", str(tiny_model("llama", n_ctx=512)), "--port"]
        done = subprocess.run(
            [*command, str(taken.getsockname()[1])], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    assert done.returncode == 1
    assert "cannot be listened on" in done.stderr
    assert "Traceback" not in done.stderr
