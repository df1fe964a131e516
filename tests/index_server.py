"""A package index on this machine, which can misbehave in every way that downloads must survive."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
import re
import socket
import ssl
import threading
import time
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def random_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


GGUF = b"GGUF" + random_bytes(1_200_000, seed=1)  # a model, as far as a download can tell


def tidy(folder: Path) -> list[str]:
    """Names of all files but locks."""
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock")


def make_wheel(members: dict[str, bytes], requires: tuple[str, ...] = ()) -> bytes:
    """The bytes of a wheel with these members; the same members give the same bytes."""
    out = io.BytesIO()
    metadata = "Metadata-Version: 2.1\n" + "".join(f"Requires-Dist: {r}\n" for r in requires)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (*members.items(), ("x-1.0.dist-info/METADATA", metadata.encode())):
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data)
    return out.getvalue()


@dataclass
class Fault:
    """How one answer to a request for a file goes wrong.

    cut:           stop after so many bytes of the body
    flip:          invert the byte of the file at this place
    ignore_range:  send the whole file
    lie_etag:      continue the file under another ETag
    lie_start:     a Content-Range that starts elsewhere
    status:        answer with this status, and `retry_after`
    length:        the Content-Length to state
    no_length:     send chunked
    """

    cut: int | None = None
    flip: int | None = None
    ignore_range: bool = False
    lie_etag: bool = False
    lie_start: bool = False
    status: int = 0
    retry_after: int = 0
    length: int | None = None
    no_length: bool = False


@dataclass
class Index:
    """What the server offers, and what was asked of it.

    packages:  pages of the simple API: package -> [(file name, extra fields of PEP 691)]
    faults:    consumed one for each request for a file; none left: all goes well
    delay:     seconds before an answer
    sent:      bytes of files sent so far; a client that is put aside has at most SENT_AHEAD of them before it
    """

    packages: dict[str, list[tuple[str, dict[str, Any]]]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    style: str = "json"
    etags: bool = True
    ranges: bool = True
    version: int = 1
    login: str = ""
    hashes: bool = True
    bytes_per_second: float = 0.0
    delay: float = 0.0
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    sent: int = 0
    url: str = ""

    def add(self, package: str, filename: str, data: bytes, **extra: Any) -> None:
        self.files[filename] = data
        self.packages.setdefault(package, []).append((filename, extra))

    @property
    def simple(self) -> str:
        return f"{self.url}/simple"

    def file_requests(self) -> list[dict[str, str]]:
        return [headers for path, headers in self.requests if path.startswith("/files/")]


SENT_AHEAD = 1 << 17


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def setup(self) -> None:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT_AHEAD // 2)
        super().setup()

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        index: Index = self.server.index
        time.sleep(index.delay)
        index.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
        if index.login:
            wanted = "Basic " + base64.b64encode(index.login.encode()).decode()
            if self.headers.get("Authorization") != wanted:
                self._send(401, b"who are you?")
                return
        if match := re.fullmatch(r"/simple/([^/]+)/", self.path):
            self._page(index, match[1])
            return
        if match := re.fullmatch(r"/files/([^/]+)", self.path):
            self._file(index, match[1])
            return
        if match := re.fullmatch(r"/redirect/(.+)", self.path):
            self.send_response(302)
            self.send_header("Location", index.packages["redirect"][0][0] + match[1])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self._send(404, b"nothing here", X_Error_Code="RepoNotFound")  # as Hugging Face's hub says it

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _page(self, index: Index, package: str) -> None:
        if package not in index.packages:
            self._send(404, b"no such package")
            return
        entries = index.packages[package]
        if index.style == "json" and "json" in self.headers.get("Accept", ""):
            files = [
                {
                    "filename": name,
                    "url": f"/files/{name}",
                    "hashes": {"sha256": sha256(index.files[name])} if index.hashes else {},
                    "size": len(index.files[name]),
                    **extra,
                }
                for name, extra in entries
            ]
            body = json.dumps({"meta": {"api-version": "1.1"}, "name": package, "files": files}).encode()
            self._send(200, body, Content_Type="application/vnd.pypi.simple.v1+json")
            return
        rows = ""
        for name, extra in entries:
            digest = f"#sha256={sha256(index.files[name])}" if index.hashes else ""
            yanked = ' data-yanked=""' if extra.get("yanked") else ""
            rows += f'<a href="../../files/{name}{digest}"{yanked}>{name}</a><br>\n'
        self._send(200, f"<html><body>{rows}</body></html>".encode(), Content_Type="text/html")

    def _file(self, index: Index, name: str) -> None:
        data = index.files.get(name)
        if data is None:
            self._send(404, b"no such file")
            return
        fault = index.faults.pop(0) if index.faults else Fault()
        if fault.status:
            headers = {"Retry_After": str(fault.retry_after)} if fault.retry_after else {}
            self._send(fault.status, b"not now", **headers)
            return
        etag = f'"{sha256(data)[:16]}-{index.version}"'
        start = 0
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        condition = self.headers.get("If-Range")
        fresh = condition in (None, etag) or fault.lie_etag
        if span and index.ranges and fresh and not fault.ignore_range:
            start = int(span[1])
            if start >= len(data):
                self._send(416, b"", Content_Range=f"bytes */{len(data)}")
                return
            self.send_response(206)
            told = start + 1 if fault.lie_start else start
            self.send_header("Content-Range", f"bytes {told}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        body = bytearray(data[start:])
        if fault.flip is not None and start <= fault.flip < len(data):
            body[fault.flip - start] ^= 0xFF
        if index.etags:
            self.send_header("ETag", '"another"' if fault.lie_etag and span else etag)
        if fault.no_length:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(body) if fault.length is None else fault.length))
        self.end_headers()
        sending = bytes(body if fault.cut is None else body[: fault.cut])
        try:
            for at in range(0, len(sending), 16384):
                piece = sending[at : at + 16384]
                index.sent += len(piece)  # before: whoever has received it may look
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if fault.no_length else piece)
                if index.bytes_per_second:
                    time.sleep(len(piece) / index.bytes_per_second)
            if fault.no_length:
                self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        if fault.cut is not None or fault.length is not None:
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    index: Index

    def handle_error(self, request: Any, client_address: Any) -> None: ...  # clients are killed on purpose


def serve(index: Index, certificate: Path | None = None) -> _Server:
    """Starts a server for the index on a free port of this machine; `shutdown()` ends it."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.index = index
    scheme = "http"
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    index.url = f"{scheme}://{'localhost' if certificate else '127.0.0.1'}:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server
