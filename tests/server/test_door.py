"""Who is let in: keys, hosts, origins."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import openai
import pytest
from fake import PATIENCE, backend_of, fake_model, held, says
from harness import Server, serving_model

from edgert.server.app import routes
from edgert.server.service import Settings

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    with serving_model(fake_model(says("ok")), Settings(api_keys=("first key", "sëcond"))) as server:
        yield server


def test_a_key_opens(locked: Server) -> None:
    for key in ("first key", "sëcond"):
        headers = {"Authorization": f"Bearer {key}".encode().decode("latin-1")}
        status, _ = locked.post(CHAT, {"messages": HI}, **headers)
        assert status == (200 if key.isascii() else 401)
    assert locked.post(CHAT, {"messages": HI}, x_api_key="first key")[0] == 200
    client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="first key", max_retries=0)
    assert client.models.list().data


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Bearer first", "Basic first key", "Bearer first key2"])
def test_other_keys_do_not(locked: Server, header: str) -> None:
    for path in (CHAT, "/v1/completions", "/tokenize"):
        status, headers, _ = locked.raw("POST", path, b"{}", **({"Authorization": header} if header else {}))
        assert status == 401
        assert headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/metrics", "/nothing"):
        assert locked.get(path)[0] == 401


def test_health_needs_no_key(locked: Server) -> None:
    assert locked.get("/health")[0] == 200


def test_the_page_that_asks_for_a_key_needs_none(locked: Server) -> None:
    status, _, page = locked.raw("GET", "/")
    assert status == 200
    parts = re.findall(r'(?:src|href)="(/?page/[^"]+)"', page.decode())
    assert len(parts) >= 2
    for path in ("/favicon.ico", *(f"/{part.lstrip('/')}" for part in parts)):
        assert locked.raw("GET", path)[0] == 200
    assert locked.get("/props")[0] == locked.get("/openapi.json")[0] == 401


def test_with_a_key_any_host_will_do(locked: Server) -> None:
    assert locked.get("/health", Host="my-server.example")[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "localhost@evil", "xlocalhost", "0x7f"]
)
def test_other_hosts_are_refused(server: Server, host: str) -> None:
    assert server.get("/v1/models", Host=host)[0] in (400, 403)
    assert server.post(CHAT, {"messages": HI}, Host=host)[0] in (400, 403)


def test_an_empty_host_is_refused(server: Server) -> None:
    assert server.get("/v1/models", Host="")[0] == 400


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1", "127.0.0.1:1", "[::1]:80", "LOCALHOST"])
def test_hosts_of_this_machine(server: Server, host: str) -> None:
    assert server.get("/v1/models", Host=host)[0] == 200


def test_foreign_origins_get_no_permission(server: Server) -> None:
    for origin in ("https://evil.example", "null", f"http://localhost:{server.port}.evil.example", "file://"):
        status, headers, _ = server.raw("GET", "/v1/models", Origin=origin)
        assert status == 403
        assert not any(name.startswith("access-control") for name in headers)
        status, headers, _ = server.raw("OPTIONS", CHAT, Origin=origin, Access_Control_Request_Method="POST")
        assert status == 403
        assert not any(name.startswith("access-control") for name in headers)


def test_the_servers_own_page_may_use_it(server: Server) -> None:
    assert server.get("/v1/models", Origin=server.url)[0] == 200


def test_an_origin_that_was_named() -> None:
    with serving_model(fake_model(says("ok")), Settings(origins=("https://app.example",), api_keys=("k",))) as server:
        ours = "https://app.example"
        status, headers, _ = server.raw("OPTIONS", CHAT, Origin=ours, Access_Control_Request_Method="POST")
        assert status == 204
        assert headers["access-control-allow-origin"] == ours
        assert "authorization" in headers["access-control-allow-headers"]
        status, headers, _ = server.raw("GET", "/v1/models", Origin=ours, Authorization="Bearer k")
        assert status == 200
        assert headers["access-control-allow-origin"] == ours
        assert server.get("/v1/models", Origin="https://other.example", Authorization="Bearer k")[0] == 403


STATUS = [
    *("/metrics", "/health", "/v1/health", "/v1/models", "/models", "/v1/models/fake", "/props", "/openapi.json", "/"),
    *("/api/tags", "/api/ps", "/api/version"),
]


def test_prompts_are_nowhere_else(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Every page that tells something is read before, while, and after a model has a secret."""
    caplog.set_level("DEBUG")
    canary = "canary-7b1e"
    assert set(STATUS) >= {r.path for r in routes() if "GET" in (r.methods or ()) and "{" not in r.path} - {
        "/favicon.ico"
    }

    def looked() -> list[bytes]:
        return [server.raw("GET", path)[2] for path in STATUS] + [
            server.raw("POST", "/api/show", b'{"name": "fake"}')[2]
        ]

    with held(backend_of(server.model())) as stopped:
        body = {"messages": [{"role": "user", "content": canary}], "n": 4, "user": canary}
        thread = threading.Thread(target=lambda: server.ok(CHAT, **body))
        thread.start()
        assert stopped.wait(PATIENCE)
        seen = looked()
    thread.join()
    seen += looked()
    server.fails(CHAT, messages=[{"role": "user", "content": canary}], temperature=-1)
    server.fails(CHAT, messages=[{"role": "user", "content": canary * 1000}])
    server.fails(CHAT, messages=[{"role": canary, "content": canary}], regex="(")
    assert not any(canary.encode() in text for text in seen)
    assert canary not in caplog.text
