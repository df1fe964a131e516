"""Finds the files of a package in the index that pip is configured for, without installing anything."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from edgert.store.download import DownloadError
from edgert.store.pip import Client, PipSettings

# PEP 691
ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


def normalize(package: str) -> str:
    """The name under which an index lists a package. Source: PEP 503."""
    if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", package):
        raise DownloadError(f"{package!r} is not the name of a package: use letters, digits, '-', '_' and '.'.")
    return re.sub(r"[-_.]+", "-", package).lower()


@dataclass(frozen=True)
class IndexFile:
    """One file that an index offers.

    sha256:  hex digest, or "" where the index gives none
    size:    bytes, or 0 where the index gives none
    """

    filename: str
    url: str
    sha256: str = ""
    size: int = 0
    yanked: bool = False

    @property
    def version(self) -> str:
        """The version field of a wheel's name."""
        return self.filename.split("-")[1]


class _Links(HTMLParser):
    """Collects the anchors of an index page. Source: PEP 503, 592."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base
        self.files: list[IndexFile] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "base" and values.get("href"):
            self.base = urllib.parse.urljoin(self.base, values["href"] or "")
        if tag == "a" and values.get("href"):
            url, fragment = urllib.parse.urldefrag(urllib.parse.urljoin(self.base, values["href"] or ""))
            digest = re.fullmatch(r"sha256=([0-9a-fA-F]{64})", fragment)
            name = urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])
            sha256 = digest[1].lower() if digest else ""
            self.files.append(IndexFile(name, url, sha256, yanked="data-yanked" in values))


def parse_page(body: bytes, content_type: str, url: str) -> list[IndexFile]:
    """The files on an index page, in HTML (PEP 503) or JSON (PEP 691).

    Raises: ValueError when the page is neither.
    """
    if "json" not in content_type:
        links = _Links(url)
        links.feed(body.decode("utf-8", "replace"))
        return links.files
    files = []
    try:
        for item in json.loads(body)["files"]:
            digest = str((item.get("hashes") or {}).get("sha256", "")).lower()
            files.append(
                IndexFile(
                    str(item["filename"]),
                    urllib.parse.urljoin(url, str(item["url"])),
                    digest if re.fullmatch(r"[0-9a-f]{64}", digest) else "",
                    int(item.get("size") or 0),
                    bool(item.get("yanked")),
                )
            )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a page of a package index: {error!r}") from error
    return files


def _order(version: str) -> tuple[bool, tuple[int, ...]]:
    """Sorts versions: final ones after pre-releases, then by their numbers."""
    return not re.search(r"[a-z]", version), tuple(int(n) for n in re.findall(r"\d+", version)[:6])


class PackageIndex:
    """The indexes and folders that pip would look in."""

    def __init__(self, settings: PipSettings | None = None) -> None:
        self.settings = settings or PipSettings.read()
        self.client = Client(self.settings)

    def wheel(self, package: str, version: str = "") -> IndexFile:
        """The wheel of a package: the wanted version where some index has it, otherwise the newest.

        Raises: DownloadError when none is found; it tells apart "no such package" from "no connection".
        """
        package = normalize(package)
        candidates: list[IndexFile] = []
        failures: list[str] = []
        for place in self.settings.find_links:
            candidates += self._linked(place)
        for index in self.settings.indexes:
            url = f"{index.rstrip('/')}/{package}/"
            if url.startswith("file:"):
                url += "index.html"
            try:
                with self.client.open(url, {"Accept": ACCEPT}) as response:
                    body = response.read(64 << 20)
                    kind = response.headers.get("Content-Type", "text/html")
                    candidates += parse_page(body, kind, response.geturl())
            except urllib.error.HTTPError as error:
                if error.code not in (404, 410):
                    failures.append(f"{_host(url)} answered {error.code} {error.reason}")
            except (OSError, ValueError) as error:
                # As pip does, a local index that is not there is passed over.
                if not url.startswith("file:"):
                    failures.append(f"{_host(url)}: {getattr(error, 'reason', error)}")
        wheels = [
            file
            for file in candidates
            if file.filename.endswith(".whl")
            and file.filename.count("-") in (4, 5)
            and normalize(file.filename.split("-")[0]) == package
            and (not file.yanked or file.version == version)
        ]
        if not wheels:
            if failures:
                raise DownloadError(
                    f"The package {package} could not be looked up ({'; '.join(failures)}): "
                    "check the connection and pip's index settings, then try again."
                )
            raise DownloadError(f"No wheel of {package} is in the index that pip is configured for: check the name.")
        return max(wheels, key=lambda file: (file.version == version, _order(file.version)))

    def _linked(self, place: str) -> list[IndexFile]:
        """The files of one of pip's --find-links: a folder, a page, or one file."""
        path = Path(
            urllib.request.url2pathname(urllib.parse.urlsplit(place).path) if place.startswith("file:") else place
        )
        if place.startswith(("http://", "https://")):
            try:
                with self.client.open(place) as response:
                    return parse_page(response.read(64 << 20), "text/html", response.geturl())
            except (OSError, ValueError):
                return []
        try:
            found = sorted(path.glob("*.whl")) if path.is_dir() else [path] if path.suffix == ".whl" else []
            return [IndexFile(f.name, f.absolute().as_uri(), "", f.stat().st_size) for f in found]
        except OSError:
            return []


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).hostname or "the index"
