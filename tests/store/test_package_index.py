"""The index that pip is configured for: its settings, its pages, its credentials and certificates."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake import PATIENCE
from index_server import Index, make_wheel, serve, sha256

from edgert.store import package_index, pip
from edgert.store.download import DownloadError
from edgert.store.package_index import PackageIndex, normalize
from edgert.store.pip import PipSettings, default_index_url

WHEEL = make_wheel({"m/m.gguf": b"GGUF"})


@pytest.fixture
def index() -> Iterator[Index]:
    index = Index()
    index.add("my-model", "my_model-1.0-py3-none-any.whl", WHEEL)
    server = serve(index)
    yield index
    server.shutdown()
    server.server_close()


def look(index_url: str, **settings: object) -> PackageIndex:
    return PackageIndex(PipSettings(index_url=index_url, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("style", ["json", "html"])
def test_pages(index: Index, style: str) -> None:
    index.style = style
    found = look(index.simple).wheel("My.Model")
    assert found.filename == "my_model-1.0-py3-none-any.whl" and found.version == "1.0"
    assert found.url == f"{index.url}/files/{found.filename}"
    assert found.sha256 == sha256(WHEEL)
    assert found.size == (len(WHEEL) if style == "json" else 0)


@pytest.mark.parametrize("style", ["json", "html"])
def test_which_wheel(index: Index, style: str) -> None:
    index.style = style
    for version in ("1.10", "1.9", "2.0rc1", "1.2"):
        index.add("my-model", f"my_model-{version}-py3-none-any.whl", WHEEL)
    index.add("my-model", "my_model-3.0-py3-none-any.whl", WHEEL, yanked="broken")
    index.add("my-model", "my_model-4.0.tar.gz", WHEEL)
    index.add("my-model", "other-9.0-py3-none-any.whl", WHEEL)
    assert look(index.simple).wheel("my-model").version == "1.10"
    assert look(index.simple).wheel("my-model", "1.2").version == "1.2"
    assert look(index.simple).wheel("my-model", "3.0").version == "3.0"
    assert look(index.simple).wheel("my-model", "7.7").version == "1.10"


def test_no_such_package_and_no_connection_are_told_apart(index: Index) -> None:
    with pytest.raises(DownloadError, match="No wheel of nothing"):
        look(index.simple).wheel("nothing")
    with pytest.raises(DownloadError, match="could not be looked up"):
        look("http://127.0.0.1:9/simple").wheel("nothing")


@pytest.fixture
def black_hole() -> Iterator[str]:
    """A port that drops what knocks: its queue of connections is full and nobody takes one."""
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux leaves a connection without an answer when the queue is full")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_connection_that_does_not_come_is_given_up_soon(black_hole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pip, "CONNECT_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(DownloadError, match=r"could not be looked up \(127.0.0.1: timed out\)"):
        look(f"{black_hole}/simple", timeout=2 * PATIENCE).wheel("nothing")
    assert time.monotonic() - start < PATIENCE


def test_a_slow_answer_has_the_time_that_pip_gives(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pip, "CONNECT_SECONDS", 0.2)
    index.delay = 0.6
    assert look(index.simple).wheel("my-model").version == "1.0"
    index.delay = PATIENCE
    with pytest.raises(DownloadError, match="timed out"):
        look(index.simple, timeout=0.3).wheel("my-model")


def test_indexes_that_are_not_there_are_passed_over(index: Index, tmp_path: Path) -> None:
    extra = ((tmp_path / "no" / "simple").as_uri(), "http://127.0.0.1:9/simple")
    found = look(index.simple, extra_index_urls=extra, find_links=(str(tmp_path / "nowhere"),))
    assert found.wheel("my-model").version == "1.0"


def test_the_extra_index_is_asked_too(index: Index) -> None:
    other = Index()
    other.add("my-model", "my_model-2.0-py3-none-any.whl", WHEEL)
    server = serve(other)
    try:
        assert look(index.simple, extra_index_urls=(other.simple,)).wheel("my-model").version == "2.0"
    finally:
        server.shutdown()
        server.server_close()


def test_folders_of_wheels_without_an_index(index: Index, tmp_path: Path) -> None:
    (tmp_path / "my_model-1.5-py3-none-any.whl").write_bytes(WHEEL)
    for place in (str(tmp_path), tmp_path.as_uri()):
        found = look(index.simple, no_index=True, find_links=(place,))
        assert found.wheel("my-model").url.startswith("file:")
        with found.client.open(found.wheel("my-model").url) as response:
            assert response.read() == WHEEL
    assert not index.requests


def test_a_local_index(index: Index, tmp_path: Path) -> None:
    page = tmp_path / "simple" / "my-model" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text('<a href="my_model-8.0-py3-none-any.whl#sha256=' + "a" * 64 + '">x</a>')
    found = look(index.simple, extra_index_urls=((tmp_path / "simple").as_uri(),)).wheel("my-model")
    assert found.version == "8.0" and found.url.startswith("file:") and found.sha256 == "a" * 64


def test_credentials_in_the_address(index: Index) -> None:
    index.login = "me:p@ss word"
    with pytest.raises(DownloadError, match="401"):
        look(index.simple).wheel("my-model")
    url = index.simple.replace("http://", "http://me:p%40ss%20word@")
    found = look(url)
    wheel = found.wheel("my-model")
    assert "@" not in wheel.url
    with found.client.open(wheel.url) as response:  # the files of an index lie behind the same login
        assert response.read() == WHEEL


def test_credentials_in_netrc(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.login = "me:secret"
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    assert look(index.simple).wheel("my-model").version == "1.0"


def test_credentials_do_not_follow_a_redirect_to_another_host(index: Index) -> None:
    other = Index(packages={"redirect": [(index.url.replace("127.0.0.1", "localhost") + "/simple/", {})]})
    server = serve(other)
    try:
        look(f"{other.url.replace('http://', 'http://me:secret@')}/redirect").wheel("my-model")
    finally:
        server.shutdown()
        server.server_close()
    assert "authorization" in other.requests[0][1]
    assert index.requests and all("authorization" not in headers for _, headers in index.requests)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    if not shutil.which("openssl"):
        pytest.skip("needs the program openssl to make a certificate")
    both = tmp_path / "both.pem"
    subprocess.run(
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
        " -addext subjectAltName=DNS:localhost -keyout key.pem -out cert.pem",
        shell=True,
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    both.write_bytes((tmp_path / "key.pem").read_bytes() + (tmp_path / "cert.pem").read_bytes())
    return both


def test_certificates(certificate: Path, tmp_path: Path) -> None:
    index = Index()
    index.add("my-model", "my_model-1.0-py3-none-any.whl", WHEEL)
    server = serve(index, certificate)
    try:
        with pytest.raises(DownloadError, match="certificate verify failed"):
            look(index.simple).wheel("my-model")
        assert look(index.simple, cert=str(tmp_path / "cert.pem")).wheel("my-model")
        assert look(index.simple, trusted_hosts=frozenset(["localhost"])).wheel("my-model")
        with pytest.raises(DownloadError, match=r"certificate file .* cannot be used"):
            look(index.simple, cert=str(tmp_path / "none.pem")).wheel("my-model")
    finally:
        server.shutdown()
        server.server_close()


def test_settings_from_files_and_variables(tmp_path: Path) -> None:
    (tmp_path / "xdg" / "pip").mkdir(parents=True)
    (tmp_path / "xdg" / "pip" / "pip.conf").write_text(
        "[global]\nindex-url = https://user.example/simple\ntimeout = 7\ntrusted-host = a.example\n b.example\n"
        "[download]\nextra-index-url =\n  https://x.example/simple\n  file:///no/where\n"
        "[list]\nindex-url = https://wrong.example/\n"
    )
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "xdg"), "XDG_CONFIG_DIRS": str(tmp_path / "none")}
    if sys.platform.startswith("linux"):
        read = PipSettings.read(environ)
        assert read.indexes == (
            "https://user.example/simple",
            "https://x.example/simple",
            "file:///no/where",
        )
        assert read.timeout == 7 and read.trusted_hosts == {"a.example", "b.example"}
    own = tmp_path / "own.conf"
    own.write_text("[global]\nindex_url = https://own.example/simple\ncert = /c.pem\nno-index = true\n")
    read = PipSettings.read({**environ, "PIP_CONFIG_FILE": str(own)})
    assert read.index_url == "https://own.example/simple" and read.cert == "/c.pem" and read.indexes == ()
    read = PipSettings.read(
        {
            **environ,
            "PIP_CONFIG_FILE": str(own),
            "PIP_INDEX_URL": "https://env.example/simple",
            "PIP_NO_INDEX": "0",
            "PIP_FIND_LINKS": "/a /b",
        }
    )
    assert read.indexes[0] == "https://env.example/simple" and read.find_links == ("/a", "/b")
    read = PipSettings.read({"PIP_CONFIG_FILE": os.devnull, "UV_DEFAULT_INDEX": "https://uv.example/simple"})
    assert read.index_url == "https://uv.example/simple"


def test_damaged_configuration_is_passed_over(tmp_path: Path) -> None:
    own = tmp_path / "pip.conf"
    own.write_bytes(b"\xff\xfe not an ini file [")
    assert PipSettings.read({"PIP_CONFIG_FILE": str(own)}).index_url


def test_agrees_with_pip(tmp_path: Path) -> None:
    """What pip itself reads from this machine's configuration is what is read here."""
    pip = pytest.importorskip("pip._internal.configuration")
    configuration = pip.Configuration(isolated=False)
    configuration.load()
    wanted = {}
    for section in ("global", "install", "download", ":env:"):
        for key, values in configuration.items():
            for full, value in values.items() if isinstance(values, dict) else [(key, values)]:
                if full.startswith(f"{section}."):
                    wanted[full.removeprefix(f"{section}.")] = value
    read = PipSettings.read()
    assert read.extra_index_urls == tuple(wanted.get("extra-index-url", "").split())
    assert read.find_links == tuple(wanted.get("find-links", "").split())
    assert read.index_url == (wanted.get("index-url") or default_index_url())
    if "cert" in wanted:
        assert read.cert == wanted["cert"]


def test_the_default_is_known_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    ensurepip = pytest.importorskip("ensurepip")
    if not list((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")):
        pytest.skip("this Python carries no copy of pip")
    with_pip = default_index_url()
    for name in list(sys.modules):
        if name == "pip" or name.startswith("pip."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pip", None)
    assert default_index_url() == with_pip


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "-a", "a\0", "a\n", "é", "x" * 5 + "/"])
def test_names_of_packages(name: str) -> None:
    with pytest.raises(DownloadError):
        normalize(name)


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"files": 3}', b'{"files": [3]}', b'{"files": [{"url": "x"}]}', b"\xff\xfe"]
)
def test_pages_that_are_none(body: bytes) -> None:
    with pytest.raises(ValueError):
        package_index.parse_page(body, "application/vnd.pypi.simple.v1+json", "http://x/")
    assert package_index.parse_page(body, "text/html", "http://x/") == []
