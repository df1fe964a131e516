"""A server in a thread of this process, on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fake import PATIENCE, wait_for

from edgert.model import Model
from edgert.server import running
from edgert.server.registry import FOREVER, Spec
from edgert.server.service import Service, Settings
from edgert.template import ChatTemplate

HI = [{"role": "user", "content": "Hi"}]


class FakeTemplate(ChatTemplate):
    """Whose text a fake tokenizer cuts."""

    def encode(self, tokenizer: Any, messages: Any, **kwargs: Any) -> list[int]:
        ids: list[int] = tokenizer.encode("".join(self.render(messages, **kwargs)))
        return ids


def line_template(end: str) -> Any:
    """role: content, a line for each message."""
    return FakeTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "{% endfor %}")


class Server:
    """Where it listens, and a plain client."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        self.service, self.host, self.port = service, host, port

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def model(self, name: str | None = None) -> Model:
        loaded = self.service.registry.find(name).loaded
        assert loaded
        return loaded.model

    def raw(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower case) and body of one request."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        status, _, data = self.raw(
            "POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), **headers
        )
        return status, json.loads(data)

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        status, _, data = self.raw("GET", path, **headers)
        return status, json.loads(data)

    def ok(self, path: str, **body: Any) -> Any:
        status, answer = self.post(path, body)
        assert status == 200, answer
        return answer

    def fails(self, path: str, expected: int = 400, **body: Any) -> dict[str, Any]:
        status, answer = self.post(path, body)
        assert status == expected, answer
        error: dict[str, Any] = answer["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        return error

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a streamed answer; the last must be [DONE]."""
        status, headers, data = self.raw("POST", path, json.dumps(body | {"stream": True}).encode())
        assert status == 200, data
        assert headers["content-type"].startswith("text/event-stream")
        lines = [part.removeprefix("data: ") for part in data.decode().split("\n\n") if part.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@contextlib.contextmanager
def serving(
    specs: Sequence[Spec], load: Callable[..., Model], settings: Settings | None = None, **options: Any
) -> Iterator[Server]:
    """A server that listens, its first model loaded."""
    service = running.service_of(specs, load, settings, **options)
    listening: list[str] = []
    failed: list[BaseException] = []
    runner = running.Runner(service, "127.0.0.1", 0, listening.append)

    def run() -> None:
        try:
            asyncio.run(runner.run())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    server = None
    try:
        wait_for(lambda: listening or failed)
        assert not failed, failed
        server = Server(service, "127.0.0.1", int(listening[0].rpartition(":")[2]))
        wait_for(lambda: service.registry.default.loaded or failed)  # kernels may have to be compiled
        assert not failed, failed
        yield server
    finally:
        runner.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@contextlib.contextmanager
def serving_model(model: Model, settings: Settings | None = None, end: str = "\n", **options: Any) -> Iterator[Server]:
    """A server of one model, called "fake", that is there already; its template is a real one."""
    model.template = model.template and line_template(end)
    with serving(
        [Spec("fake", "fake", aliases=("other-name",))], lambda source, **_: model, settings, **options
    ) as server:
        yield server


def impatient(server: Server, seconds: float) -> None:
    """From now on requests wait for their turn, or for a model, so long: those before have begun in peace."""
    server.service.settings = dataclasses.replace(server.service.settings, queue_timeout=seconds)
    server.service.registry._line._seconds = seconds or FOREVER


def open_stream(server: Server, **body: Any) -> socket.socket:
    """A connection whose answer has begun."""
    data = json.dumps({"messages": HI, "stream": True} | body).encode()
    connection = socket.create_connection((server.host, server.port))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)
    )
    return connection
