"""pip's settings, and connections as pip makes them with these."""

from __future__ import annotations

import configparser
import contextlib
import http.client
import os
import re
import ssl
import sys
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgert.folders import written
from edgert.store.download import CONNECT_SECONDS, DownloadError


@dataclass(frozen=True)
class PipSettings:
    """What pip's configuration says about indexes and connections."""

    index_url: str
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    cert: str = ""
    client_cert: str = ""
    proxy: str = ""
    trusted_hosts: frozenset[str] = field(default_factory=frozenset)
    timeout: float = 15.0

    @property
    def indexes(self) -> tuple[str, ...]:
        return () if self.no_index else (self.index_url, *self.extra_index_urls)

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> PipSettings:
        """Merges pip's files and its PIP_* variables, the stronger over the weaker, as pip does."""
        values: dict[str, str] = {}
        for path in _config_files(environ):
            values.update(_read_config(path))
        for name, value in environ.items():
            if name.startswith("PIP_") and value:
                values[name[4:].lower().replace("_", "-")] = value

        def several(name: str) -> tuple[str, ...]:
            return tuple(values.get(name, "").split())

        uv = environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL")  # for those who have uv and no pip
        seconds = values.get("timeout") or values.get("default-timeout") or "15"
        return cls(
            index_url=values.get("index-url") or values.get("pypi-url") or uv or default_index_url(),
            extra_index_urls=several("extra-index-url"),
            find_links=several("find-links"),
            no_index=values.get("no-index", "").strip().lower() in ("1", "true", "yes", "on", "y", "t"),
            cert=values.get("cert") or environ.get("REQUESTS_CA_BUNDLE") or environ.get("CURL_CA_BUNDLE") or "",
            client_cert=values.get("client-cert", ""),
            proxy=values.get("proxy", ""),
            trusted_hosts=frozenset(several("trusted-host")),
            timeout=float(seconds) if re.fullmatch(r"\d+(\.\d+)?", seconds) else 15.0,
        )


def _config_files(environ: Mapping[str, str]) -> Iterator[Path]:
    """pip's configuration files, weakest first. Source: pip's guide, "Configuration: Location"."""
    own = environ.get("PIP_CONFIG_FILE", "")
    if own == os.devnull:
        return
    home = written("~")
    site = Path(sys.prefix)
    if sys.platform == "win32":
        yield Path(environ.get("PROGRAMDATA", "C:/ProgramData")) / "pip" / "pip.ini"
        yield home / "pip" / "pip.ini"
        if "APPDATA" in environ:
            yield Path(environ["APPDATA"]) / "pip" / "pip.ini"
        yield site / "pip.ini"
    else:
        if sys.platform == "darwin":
            yield Path("/Library/Application Support/pip/pip.conf")
        for folder in reversed(environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")):
            yield Path(folder or "/etc/xdg") / "pip" / "pip.conf"
        yield Path("/etc/pip.conf")
        yield home / ".pip" / "pip.conf"
        mac = home / "Library" / "Application Support" / "pip"
        if sys.platform == "darwin" and mac.is_dir():
            yield mac / "pip.conf"
        else:
            yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
        yield site / "pip.conf"
    if own:
        yield Path(own)


def _read_config(path: Path) -> dict[str, str]:
    """The options of the sections that `pip download` reads; a file that is absent or damaged holds none."""
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, configparser.Error):
        return {}
    return {
        name.replace("_", "-"): value
        for section in ("global", "install", "download")
        if parser.has_section(section)
        for name, value in parser.items(section)
        if value
    }


def default_index_url() -> str:
    """The index that an unconfigured pip uses, as pip itself or its copy in ensurepip knows it."""
    try:
        from pip._internal.models.index import PyPI

        return str(PyPI.simple_url)
    except ImportError:
        pass
    places = [Path("/usr/share/python-wheels")]  # Debian's
    with contextlib.suppress(ImportError):
        import ensurepip

        places.insert(0, Path(ensurepip.__file__).parent / "_bundled")
    for wheel in (wheel for place in places for wheel in sorted(place.glob("pip-*.whl"))):
        names: dict[str, Any] = {"__name__": "pip_models_index"}
        with zipfile.ZipFile(wheel) as archive:
            exec(compile(archive.read("pip/_internal/models/index.py"), "pip index", "exec"), names)
        return str(names["PyPI"].simple_url)
    raise DownloadError("No package index is known: set PIP_INDEX_URL, or install pip.")


def _dialling(base: Any, **arguments: Any) -> Any:
    """A connection that is given up when it is not there within CONNECT_SECONDS, whatever pip's time limit."""

    class Connection(base):
        timeout: float

        def __init__(self, host: str, **options: Any) -> None:
            super().__init__(host, **arguments, **options)

        def connect(self) -> None:
            patience = self.timeout
            self.timeout = min(patience, CONNECT_SECONDS)
            super().connect()
            self.timeout = patience
            self.sock.settimeout(patience)

    return Connection


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_dialling(http.client.HTTPConnection), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._connection = _dialling(http.client.HTTPSConnection, context=context)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._connection, req)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and shows credentials only to the host that they were given for."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        target = super().redirect_request(req, fp, code, msg, headers, newurl)
        if target is not None:
            if req.type == "https" and target.type != "https":
                raise urllib.error.URLError(f"a redirect from https to {target.type} was refused")
            if target.host != req.host:
                target.remove_header("Authorization")
        return target


class Client:
    """Opens URLs as pip would: with its certificates, proxy, trusted hosts, credentials and time limit."""

    def __init__(self, settings: PipSettings | None = None) -> None:
        self.settings = settings or PipSettings(index_url="")
        self._openers: dict[bool, urllib.request.OpenerDirector] = {}
        self._credentials: dict[tuple[str, str], tuple[str, str]] = {}  # by scheme and host, as given before

    def _opener(self, trusted: bool) -> urllib.request.OpenerDirector:
        if trusted not in self._openers:
            settings = self.settings
            context = ssl.create_default_context()
            try:
                if settings.cert:
                    bundle = Path(settings.cert)
                    context.load_verify_locations(**{"capath" if bundle.is_dir() else "cafile": str(bundle)})
                elif not os.environ.get("SSL_CERT_FILE"):
                    try:
                        import certifi

                        context.load_verify_locations(certifi.where())
                    except ImportError:
                        pass
                if settings.client_cert:
                    context.load_cert_chain(settings.client_cert)
            except (OSError, ssl.SSLError) as error:
                file = settings.cert or settings.client_cert
                raise DownloadError(
                    f"pip's certificate file {file} cannot be used ({error}): correct pip's `cert` setting."
                ) from error
            if trusted:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            handlers: list[urllib.request.BaseHandler] = [
                _Http(),
                _Https(context),
                _Redirects(),
            ]
            if settings.proxy:
                proxy = settings.proxy if "://" in settings.proxy else f"http://{settings.proxy}"
                handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
            self._openers[trusted] = urllib.request.build_opener(*handlers)
        return self._openers[trusted]

    def open(self, url: str, headers: Mapping[str, str] | None = None):  # type: ignore[no-untyped-def]
        """The response to a GET. Raises: OSError (urllib.error.HTTPError and URLError are such)."""
        url, credentials = _split_credentials(url)
        parts = urllib.parse.urlsplit(url)
        place = (parts.scheme, parts.netloc)
        if credentials:
            self._credentials[place] = credentials
        credentials = credentials or self._credentials.get(place)
        if parts.scheme not in ("http", "https", "file"):
            raise urllib.error.URLError(f"scheme {parts.scheme!r} is not supported")
        request = urllib.request.Request(url, headers={"User-Agent": "edgert", **(headers or {})})
        if credentials and parts.scheme != "file":
            import base64

            token = base64.b64encode(":".join(credentials).encode()).decode()
            request.add_header("Authorization", f"Basic {token}")
        trusted = bool({parts.hostname, parts.netloc} & self.settings.trusted_hosts)
        return self._opener(trusted).open(request, timeout=self.settings.timeout)


def _split_credentials(url: str) -> tuple[str, tuple[str, str] | None]:
    """Takes user:password out of a URL, or looks the host up in the user's netrc file, as pip does."""
    parts = urllib.parse.urlsplit(url)
    if "@" in parts.netloc:
        user, _, host = parts.netloc.rpartition("@")
        name, _, password = user.partition(":")
        unquote = urllib.parse.unquote
        return urllib.parse.urlunsplit(parts._replace(netloc=host)), (unquote(name), unquote(password))
    if parts.hostname:
        import netrc

        try:
            found = netrc.netrc(os.environ.get("NETRC")).hosts.get(parts.hostname)
        except (OSError, netrc.NetrcParseError, RuntimeError):
            found = None
        if found and found[2]:
            return url, (found[0] or found[1] or "", found[2])
    return url, None
