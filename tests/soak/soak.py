"""A server under mixed load with faults, for as long as one likes: what must stay flat stays flat, or it says so.

    python tests/soak/soak.py MODEL [--minutes 20] [--clients 8] [-t 2]

Clients chat, stream, leave in the middle, come in crowds that find no place, ask for forms, tools and embeddings, send
nonsense, wrong numbers, grammars that cannot be enforced, foreign hosts, too long prompts and bodies that stop or are
too large, while the model's file is exchanged now and then, every second time for a broken one, which must be refused.
Greedy answers are held against those given alone. At the end many leave at once and must have left nothing inside; no
log and no page may hold a secret.
Prints what was tried and what did not hold, refusals, memory, descriptors and threads as JSON; exit code 1 when
something did not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
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
WRONG: list[dict[str, Any]] = [  # the field that the error must name, and its value
    {name: value}
    for name in ("temperature", "top_p", "min_p", "repeat_penalty", "n", "max_tokens", "top_k", "seed")
    for value in (-7, 10**40, "0.7", True, [1])
]
HOSTILE: list[dict[str, Any]] = [
    {"regex": "(" * 60_000},
    {"regex": "(?=x)y"},
    {"grammar": "root ::= nonsense"},
    {"json_schema": {"not": {}}},
    {"json_schema": {"type": "string", "pattern": "("}},
]
PAGES = ("/metrics", "/health", "/v1/models", "/props", "/api/ps", "/api/tags", "/openapi.json", "/")
SECRET = re.compile(rb"zq[0-9a-f]{8}x")
MOST_BODY = 1_000_000  # bytes that the server takes


def secret_of(number: int) -> str:
    """A client's word: a model that goes on from another's, as by counting, does not come upon it."""
    return f"zq{hashlib.sha256(b'%d' % number).hexdigest()[:8]}x"


class Load:
    """All clients of one server and what they have seen.

    secret:  each client has a word of its own in its prompts, which no other client's answer may hold
    """

    LEAST = 10  # requests of each client, and
    EXCHANGES = 2  # exchanges of the file, however slow the machine is

    def __init__(self, port: int) -> None:
        self.port, self.end = port, 0.0
        self.counts: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.faults: list[str] = []
        self.refused: list[float] = []  # seconds until a refusal for want of a place
        self._alone: dict[str, str] = {}
        self._lock = threading.Lock()
        self._doing = threading.local()

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        began = time.monotonic()
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if answer.status in (429, 503):
            self.refused.append(time.monotonic() - began)
            if not (answer.getheader("Retry-After") or "").isdigit():
                self.fault(f"status {answer.status} without Retry-After")
        return answer.status, data

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        status, data = self.request("POST", path, json.dumps(body).encode())
        return status, json.loads(data)

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def fault(self, text: str) -> None:
        with self._lock:
            self.failed[getattr(self._doing, "kind", "the server")] += 1
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
        kinds = [self.greedy] * 5 + [self.leave] * 3 + [self.stream] * 2 + [self.secret] * 2
        kinds += [self.form, self.tool, self.embed, self.nonsense, self.wrong, self.hostile]
        kinds += [self.long, self.large, self.half, self.foreign, self.crowd]
        n = 0
        while n < self.LEAST or time.monotonic() < self.end:
            n += 1
            kind = draw.choice(kinds)
            self._doing.kind = kind.__name__
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

    def crowd(self, draw: random.Random, number: int) -> None:
        """More at once than there are places: those beyond are told so at once."""

        def one(seed: int) -> None:
            self._doing.kind = "crowd"
            self.greedy(random.Random(seed), number)

        with ThreadPoolExecutor(30) as pool:
            list(pool.map(one, range(30)))

    def stream(self, draw: random.Random, number: int) -> None:
        """Two answers in pieces: each begins with its role, has one finish reason, and is what it is alone."""
        topic = draw.choice(TOPICS)
        body = self.question(topic) | {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
        status, data = self.request("POST", "/v1/chat/completions", json.dumps(body).encode())
        if not self.checked(status, data):
            return
        events = [part.removeprefix("data: ") for part in data.decode().split("\n\n") if part.startswith("data: ")]
        last, texts, reasons = events.pop(), ["", ""], [0, 0]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        for choice in choices:
            texts[choice["index"]] += choice["delta"].get("content", "")
            reasons[choice["index"]] += choice["finish_reason"] is not None
        roles = sum("role" in choice["delta"] for choice in choices)
        if last != "[DONE]" or reasons != [1, 1] or roles != 2 or texts != [self._alone[topic]] * 2:
            self.fault(f"stream {topic}: {last} {reasons} {roles} {texts}")

    def secret(self, draw: random.Random, number: int) -> None:
        word = secret_of(number)
        content = f"The code is {word}. Repeat the code."
        status, answer = self.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=20, user=word
        )
        if self.checked(status, answer):
            text = answer["choices"][0]["message"]["content"]
            if any(secret_of(other) in text for other in range(100) if other != number):
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

    def wrong(self, draw: random.Random, number: int) -> None:
        field = draw.choice(WRONG)
        status, answer = self.post("/v1/chat/completions", **self.question("tea") | field)
        if self.checked(status, answer, (400,)) or (status == 400 and answer["error"]["param"] not in field):
            self.fault(f"wrong {field}: {status} {answer}")

    def hostile(self, draw: random.Random, number: int) -> None:
        field = draw.choice(HOSTILE)
        status, answer = self.post("/v1/chat/completions", **self.question("tea") | field)
        if self.checked(status, answer, (400,)):
            self.fault(f"hostile {field}: {answer}")

    def foreign(self, draw: random.Random, number: int) -> None:
        header = draw.choice([{"Host": "evil.example"}, {"Host": ""}, {"Origin": "https://evil.example"}])
        status, data = self.request("GET", "/v1/models", **header)
        if status not in (400, 403):
            self.fault(f"foreign {header}: {status} {data[:100]!r}")

    def large(self, draw: random.Random, number: int) -> None:
        status, data = self.request("POST", "/v1/chat/completions", b" " * (MOST_BODY + draw.randrange(1, 100_000)))
        if status != 413:
            self.fault(f"large: {status} {data[:100]!r}")

    def long(self, draw: random.Random, number: int) -> None:
        status, answer = self.post("/v1/completions", prompt="word " * 40_000, max_tokens=1)
        self.checked(status, answer, (400,))

    def exchange(self, every: float, path: Path) -> None:
        """Exchanges the model's file again and again, every second time for one that is cut short."""
        self._doing.kind = "exchange"
        whole, n = path.read_bytes(), 0
        while n < self.EXCHANGES or time.monotonic() < self.end - every:
            n += 1
            time.sleep(every)
            broken = n % 2 == 0
            new = path.with_suffix(".new")
            new.write_bytes(whole[: len(whole) // 2] if broken else whole)
            new.replace(path)
            status, answer = self.post("/v1/models/soak/reload")
            self.count("exchange refused" if broken else "exchange")
            if status != (409 if broken else 200):
                self.fault(f"exchange: {status} {answer}")

    def inside(self) -> float:
        """Answers that have a place."""
        _, text = self.request("GET", "/metrics")
        return next(float(line.split()[-1]) for line in text.decode().splitlines() if line.startswith(INSIDE))

    def leave_at_once(self, clients: int) -> float:
        """Seconds until nothing is inside any more when all leave, those that wait, are read, and are answered."""
        self._doing.kind = "leave at once"
        body = json.dumps(self.question("tea") | {"stream": True, "max_tokens": 1500, "ignore_eos": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        connections = [socket.create_connection(("127.0.0.1", self.port), timeout=60) for _ in range(clients)]
        for connection in connections:
            connection.sendall(head + body)
        for _ in range(1000):
            if self.inside() >= clients:
                break
            time.sleep(0.01)
        else:
            self.fault("not all of those who asked came inside")
        for connection in connections:
            connection.close()
        began = time.monotonic()
        while self.inside():
            if time.monotonic() - began > 10:
                self.fault(f"left inside: {self.inside()}")
                break
            time.sleep(0.01)
        return time.monotonic() - began


INSIDE = "edgert_answers_inside "


def held(process: int) -> dict[str, float]:
    """Memory in MB, open descriptors and threads of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    descriptors = len(os.listdir(f"/proc/{process}/fd"))
    threads = len(os.listdir(f"/proc/{process}/task"))
    return {"memory_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6, "descriptors": descriptors, "threads": threads}


def median(looks: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(look[name] for look in looks) for name in looks[0]}


def soak(model: str, seconds: float, clients: int = 8, threads: int = 2, exchanges: bool = True) -> dict[str, Any]:
    """Runs a server under load; what was counted, and `faults`, which should be none."""
    folder = Path(tempfile.mkdtemp())
    path, config = folder / "soak.gguf", folder / "edgert-soak.toml"
    shutil.copyfile(model, path)
    config.write_text(f"[models.soak]\nmodel = {json.dumps(str(path))}\nctx-size = 2048\nthreads = {threads}\n")
    command = [sys.executable, "-m", "edgert", "serve", "--config", str(config), "--port", "0", "--verbose"]
    command += ["-np", "4", "--queue", "16", "--max-body", str(MOST_BODY)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    stderr = process.stderr
    assert stderr
    secrets: list[bytes] = []  # lines of the log that tell what was asked

    def listen() -> None:
        for line in stderr:
            if SECRET.search(line):
                secrets.append(line)
            if b" 200 " not in line:
                sys.stderr.buffer.write(line)

    try:
        for line in stderr:
            print(line.decode(), end="", file=sys.stderr)
            if line.startswith(b"listening on "):
                break
        else:
            raise SystemExit("the server ended at its start")
        threading.Thread(target=listen, daemon=True).start()
        load = Load(int(line.rpartition(b":")[2]))
        load.learn()
        load.end = time.monotonic() + seconds
        workers = [threading.Thread(target=load.client, args=(number,)) for number in range(clients)]
        if exchanges:
            workers.append(threading.Thread(target=load.exchange, args=(max(5.0, seconds / 8), path)))
        for worker in workers:
            worker.start()
        looks = []
        while time.monotonic() < load.end:
            time.sleep(max(0.5, seconds / 40))
            looks.append(held(process.pid))
        for worker in workers:
            worker.join()
        time.sleep(3)  # in which the server gives back what an exchange has freed
        if inside := load.inside():
            load.fault(f"left inside: {inside}")
        freed = load.leave_at_once(12)
        for page in PAGES:
            if SECRET.search(load.request("GET", page)[1]):
                load.fault(f"{page} tells what was asked")
        last = held(process.pid)
        quarter = max(1, len(looks) // 4)
        early, late = median(looks[quarter : 2 * quarter] or looks), median(looks[-quarter:])
        for told in secrets[:3]:
            load.fault(f"the log tells what was asked: {told!r}")
        if late["memory_mb"] > 1.1 * early["memory_mb"] + 50:
            load.fault(f"memory grows: {early} {late}")
        if max(last["descriptors"] - early["descriptors"], late["descriptors"] - early["descriptors"]) > 30:
            load.fault(f"descriptors grow: {early} {late} {last}")
        if late["threads"] > early["threads"] + 50:
            load.fault(f"threads grow: {early} {late}")
        refused = sorted(load.refused)
        return {
            "seconds": seconds,
            "tried": dict(load.counts),
            "did not hold": dict(load.failed),
            "refusals": len(refused),
            "refusal_ms": {p: round(1e3 * refused[int(p / 100 * (len(refused) - 1))], 1) for p in (50, 99) if refused},
            "all_left_seconds": round(freed, 2),
            "held": {"early": early, "late": late, "last": last},
            "faults": load.faults,
        }
    finally:
        process.terminate()
        process.wait(120)
        shutil.rmtree(folder)


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
