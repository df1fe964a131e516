"""A server under mixed load with faults, for as long as one likes: what must stay flat stays flat, or it says so.

    python tests/soak/soak.py MODEL [--minutes 20] [--clients 8] [-t 2]

Clients chat, stream, leave in the middle, ask for forms, tools and embeddings, send nonsense, too long prompts and
bodies that stop, while the model's file is exchanged now and then. Greedy answers are held against those given alone.
Prints counts, memory and descriptors as JSON; exit code 1 when something did not hold.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

TOPICS = ["tea", "rain", "stars", "bread", "rivers", "maps", "clocks", "music", "trains", "bees"]
FORM = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["word", "n"],
    "additionalProperties": False,
}
NONSENSE = [b"", b"{", b"\xff\xfe", b'{"messages": 5}', b'{"messages": [], "temperature": NaN}', b"[" * 20_000]


class Load:
    """All clients of one server and what they have seen.

    secret:  each client has a word of its own in its prompts, which no other client's answer may hold
    """

    LEAST = 10  # requests of each client, and
    EXCHANGES = 2  # exchanges of the file, however slow the machine is

    def __init__(self, port: int) -> None:
        self.port, self.end = port, 0.0
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._alone: dict[str, str] = {}
        self._lock = threading.Lock()

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        status, data = self.request("POST", path, json.dumps(body).encode())
        return status, json.loads(data)

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def fault(self, text: str) -> None:
        with self._lock:
            self.faults.append(text[:300])

    def learn(self) -> None:
        """The greedy answers, each given alone."""
        for topic in TOPICS:
            status, answer = self.post("/v1/chat/completions", **self.question(topic))
            assert status == 200, answer
            self._alone[topic] = answer["choices"][0]["message"]["content"]

    @staticmethod
    def question(topic: str) -> dict[str, Any]:
        content = f"You are brief. Say something about {topic}."
        return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 24}

    def client(self, number: int) -> None:
        draw = random.Random(number)
        kinds = [self.greedy] * 5 + [self.leave] * 3 + [self.form, self.tool, self.embed, self.nonsense, self.long]
        kinds += [self.secret, self.half]
        n = 0
        while n < self.LEAST or time.monotonic() < self.end:
            n += 1
            kind = draw.choice(kinds)
            try:
                kind(draw, number)
                self.count(kind.__name__)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self.fault(f"{kind.__name__}: {type(error).__name__} {error}")

    def checked(self, status: int, answer: Any, allowed: tuple[int, ...] = (200,)) -> bool:
        """Whether there is an answer to look at; a busy server is no fault."""
        if status in (429, 503):
            self.count("busy")
            time.sleep(0.05)
            return False
        if status not in allowed:
            self.fault(f"status {status}: {answer}")
        return status == 200

    def greedy(self, draw: random.Random, number: int) -> None:
        topic = draw.choice(TOPICS)
        status, answer = self.post("/v1/chat/completions", **self.question(topic))
        if self.checked(status, answer):
            text = answer["choices"][0]["message"]["content"]
            if text != self._alone[topic]:
                self.count("different")
                self.fault(f"{topic}: {text!r} beside others, {self._alone[topic]!r} alone")

    def secret(self, draw: random.Random, number: int) -> None:
        word = f"zq{number}x"
        content = f"The code is {word}. Repeat the code."
        status, answer = self.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=20, user=word
        )
        if self.checked(status, answer):
            text = answer["choices"][0]["message"]["content"]
            if any(f"zq{other}x" in text for other in range(100) if other != number):
                self.fault(f"client {number} got {text!r}")

    def leave(self, draw: random.Random, number: int) -> None:
        body = json.dumps(self.question(draw.choice(TOPICS)) | {"stream": draw.random() < 0.7, "max_tokens": 200})
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall((head + body).encode())
            connection.settimeout(draw.uniform(0.01, 0.4))
            try:
                connection.recv(2000)
            except TimeoutError:
                self.count("left before a word")

    def half(self, draw: random.Random, number: int) -> None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n{")

    def form(self, draw: random.Random, number: int) -> None:
        body = self.question(draw.choice(TOPICS)) | {"json_schema": FORM, "max_tokens": 80, "temperature": 1.0}
        status, answer = self.post("/v1/chat/completions", **body)
        if self.checked(status, answer) and answer["choices"][0]["finish_reason"] == "stop":
            value = json.loads(answer["choices"][0]["message"]["content"])
            if set(value) != {"word", "n"}:
                self.fault(f"form {value}")

    def tool(self, draw: random.Random, number: int) -> None:
        tools = [{"type": "function", "function": {"name": "note", "parameters": FORM}}]
        body = self.question("tea") | {"tools": tools, "tool_choice": "required", "max_tokens": 120}
        status, answer = self.post("/v1/chat/completions", **body)
        if self.checked(status, answer):
            choice = answer["choices"][0]
            if (choice["finish_reason"] == "tool_calls") != bool(choice["message"].get("tool_calls")):
                self.fault(f"tool {choice}")

    def embed(self, draw: random.Random, number: int) -> None:
        self.checked(*self.post("/v1/embeddings", input=[draw.choice(TOPICS)] * 2))

    def nonsense(self, draw: random.Random, number: int) -> None:
        status, data = self.request("POST", "/v1/chat/completions", draw.choice(NONSENSE))
        if status != 400:
            self.fault(f"nonsense: {status} {data[:100]!r}")

    def long(self, draw: random.Random, number: int) -> None:
        status, answer = self.post("/v1/completions", prompt="word " * 40_000, max_tokens=1)
        self.checked(status, answer, (400,))

    def exchange(self, every: float) -> None:
        """Exchanges the model's file again and again."""
        n = 0
        while n < self.EXCHANGES or time.monotonic() < self.end - every:
            n += 1
            time.sleep(every)
            status, answer = self.post("/v1/models/soak/reload")
            self.count("exchanged")
            if status != 200:
                self.fault(f"exchange: {status} {answer}")


def held(process: int) -> dict[str, float]:
    """Memory in MB and open descriptors of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    descriptors = len(os.listdir(f"/proc/{process}/fd"))
    return {"memory_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6, "descriptors": descriptors}


def soak(model: str, seconds: float, clients: int = 8, threads: int = 2, exchanges: bool = True) -> dict[str, Any]:
    """Runs a server under load; what was counted, and `faults`, which should be none."""
    config = Path(tempfile.mkdtemp()) / "edgert-soak.toml"
    config.write_text(f"[models.soak]\nmodel = {json.dumps(model)}\nctx-size = 2048\nthreads = {threads}\n")
    command = [sys.executable, "-m", "edgert", "serve", "--config", str(config), "--port", "0"]
    process = subprocess.Popen([*command, "-np", "4", "--queue", "16"], stderr=subprocess.PIPE, text=True)
    assert process.stderr
    try:
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if line.startswith("listening on "):
                break
        else:
            raise SystemExit("the server ended at its start")
        threading.Thread(target=shutil.copyfileobj, args=(process.stderr, sys.stderr), daemon=True).start()
        load = Load(int(line.rpartition(":")[2]))
        load.learn()
        load.end = time.monotonic() + seconds
        workers = [threading.Thread(target=load.client, args=(number,)) for number in range(clients)]
        if exchanges:
            workers.append(threading.Thread(target=load.exchange, args=(max(5.0, seconds / 8),)))
        for worker in workers:
            worker.start()
        looks = []
        while time.monotonic() < load.end:
            time.sleep(max(0.5, seconds / 40))
            looks.append(held(process.pid))
        for worker in workers:
            worker.join()
        time.sleep(3)  # in which the server gives back what an exchange has freed
        _, text = load.request("GET", "/metrics")
        inside = [line for line in text.decode().splitlines() if line.startswith("edgert_answers_inside ")]
        if inside != ["edgert_answers_inside 0.0"]:
            load.fault(f"left inside: {inside}")
        last = held(process.pid)
        middle = max(looks[: len(looks) // 2 + 1], key=lambda look: look["memory_mb"])  # an exchange holds two models
        if last["descriptors"] > looks[0]["descriptors"] + 30:
            load.fault(f"descriptors grow: {looks[0]} {last}")
        if last["memory_mb"] > 1.1 * middle["memory_mb"] + 50:
            load.fault(f"memory grows: {middle} {last}")
        return {
            "seconds": seconds,
            "counts": dict(load.counts),
            "held": [looks[0], middle, last],
            "faults": load.faults,
        }
    finally:
        process.terminate()
        process.wait(120)
        shutil.rmtree(config.parent)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--no-exchange", action="store_true")
    given = parser.parse_args()
    found = soak(given.model, 60 * given.minutes, given.clients, given.threads, not given.no_exchange)
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["faults"]))


if __name__ == "__main__":
    main()
