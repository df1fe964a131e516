"""One file over HTTP: cut, altered, lied about, and in the end right or refused."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake import PATIENCE
from index_server import Fault, Index, random_bytes, serve, sha256

from edgert.store import download
from edgert.store.download import DownloadError, exclusive, fetch
from edgert.store.pip import Client

DATA = random_bytes(1_500_000)


@pytest.fixture
def index() -> Iterator[Index]:
    index = Index(files={"m.bin": DATA})
    server = serve(index)
    yield index
    server.shutdown()
    server.server_close()


class Fetcher:
    """`fetch` of the served file into a folder; remembers how long it would have waited."""

    def __init__(self, index: Index, folder: Path) -> None:
        self.index = index
        self.target = folder / "m.bin"
        self.part = folder / "m.bin.part"
        self.pauses: list[float] = []
        self.client = Client()

    def __call__(self, **arguments: Any) -> Path:
        arguments = {"sha256": sha256(DATA), "size": len(DATA), **arguments}
        url = f"{self.index.url}/files/m.bin"
        return fetch(url, self.target, open_url=self.client.open, pause=self.pauses.append, **arguments)

    def leaves_nothing_else(self) -> bool:
        return sorted(p.name for p in self.target.parent.iterdir()) == ["m.bin"]


@pytest.fixture
def fetcher(index: Index, tmp_path: Path) -> Fetcher:
    return Fetcher(index, tmp_path)


def test_plain(fetcher: Fetcher) -> None:
    seen: list[tuple[int, int]] = []
    fetcher(progress=lambda done, total: seen.append((done, total)))
    assert fetcher.target.read_bytes() == DATA
    assert seen[0] == (0, len(DATA)) and seen[-1] == (len(DATA), len(DATA))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert fetcher.leaves_nothing_else() and not fetcher.pauses


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_cut_and_resumed(fetcher: Fetcher, index: Index, share: float) -> None:
    """Case N 172: the rest alone is fetched after a cut, and the whole is right."""
    index.faults = [Fault(cut=int(share * len(DATA)))]
    fetcher()
    assert fetcher.target.read_bytes() == DATA
    first, second = index.file_requests()
    assert "range" not in first
    assert second["range"] == f"bytes={int(share * len(DATA))}-"
    assert second["if-range"].startswith('"')
    assert index.sent == len(DATA)
    assert fetcher.leaves_nothing_else()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_cut_for_good_then_a_new_run_resumes(
    fetcher: Fetcher, index: Index, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "RETRIES", 1)
    index.faults = [Fault(cut=int(share * len(DATA))), Fault(cut=0)]
    with pytest.raises(DownloadError, match="are kept"):
        fetcher()
    assert not fetcher.target.exists()
    assert fetcher.part.read_bytes() == DATA[: int(share * len(DATA))]
    fetcher()
    assert fetcher.target.read_bytes() == DATA
    assert index.sent == len(DATA)


def test_many_cuts_end_well_as_long_as_bytes_arrive(fetcher: Fetcher, index: Index) -> None:
    index.faults = [Fault(cut=50_000) for _ in range(25)]
    fetcher()
    assert fetcher.target.read_bytes() == DATA
    assert index.sent == len(DATA)


def test_a_flipped_byte_is_noticed_and_fetched_again(fetcher: Fetcher, index: Index) -> None:
    index.faults = [Fault(flip=777_777)]
    fetcher()
    assert fetcher.target.read_bytes() == DATA
    assert fetcher.leaves_nothing_else()


def test_a_byte_that_stays_flipped_is_refused(fetcher: Fetcher, index: Index) -> None:
    index.faults = [Fault(flip=777_777)] * 10
    with pytest.raises(DownloadError, match="another sha256"):
        fetcher()
    assert not list(fetcher.target.parent.iterdir())
    assert len(index.file_requests()) == 2


def test_a_byte_flipped_on_disk_between_runs(fetcher: Fetcher) -> None:
    fetcher.part.write_bytes(random_bytes(len(DATA) // 2, seed=9))
    fetcher()
    assert fetcher.target.read_bytes() == DATA


def test_ignored_range(fetcher: Fetcher, index: Index) -> None:
    index.faults = [Fault(cut=700_000), Fault(ignore_range=True)]
    fetcher()
    assert fetcher.target.read_bytes() == DATA
    assert index.sent == 700_000 + len(DATA)


@pytest.mark.parametrize("known_digest", [True, False])
def test_the_file_changed_between_runs(
    fetcher: Fetcher, index: Index, known_digest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that honours If-Range sends the new file whole; no bytes of the old one stay."""
    monkeypatch.setattr(download, "RETRIES", 1)
    index.faults = [Fault(cut=700_000), Fault(cut=0)]
    old = {} if known_digest else {"sha256": "", "size": 0}
    with pytest.raises(DownloadError):
        fetcher(**old)
    new = random_bytes(1_200_000, seed=5)
    index.files["m.bin"], index.version = new, 2
    fetcher(sha256=sha256(new) if known_digest else "", size=len(new) if known_digest else 0)
    assert fetcher.target.read_bytes() == new


@pytest.mark.parametrize("fault", [Fault(lie_etag=True), Fault(lie_start=True)], ids=["etag", "start"])
def test_a_continuation_that_does_not_continue(fetcher: Fetcher, index: Index, fault: Fault) -> None:
    index.faults = [Fault(cut=700_000), fault]
    fetcher(sha256="", size=0)  # so that nothing but the headers can tell
    assert fetcher.target.read_bytes() == DATA


def test_without_validator_and_digest_nothing_is_continued(fetcher: Fetcher, index: Index) -> None:
    index.etags = False
    index.faults = [Fault(cut=700_000)]
    fetcher(sha256="")
    assert fetcher.target.read_bytes() == DATA
    assert all("range" not in request for request in index.file_requests())


def test_without_validator_the_digest_allows_to_continue(fetcher: Fetcher, index: Index) -> None:
    index.etags = False
    index.faults = [Fault(cut=700_000)]
    fetcher()
    assert fetcher.target.read_bytes() == DATA and index.sent == len(DATA)


@pytest.mark.parametrize("length", [len(DATA) + 5, len(DATA) - 5])
def test_wrong_length(fetcher: Fetcher, index: Index, length: int) -> None:
    index.faults = [Fault(length=length)] * 20
    with pytest.raises(DownloadError):
        fetcher(sha256="")
    assert not fetcher.target.exists()
    index.faults = []
    fetcher()
    assert fetcher.target.read_bytes() == DATA


def test_chunked_without_length(fetcher: Fetcher, index: Index) -> None:
    index.faults = [Fault(no_length=True)]
    fetcher(size=0)
    assert fetcher.target.read_bytes() == DATA


def test_a_part_longer_than_the_file(fetcher: Fetcher) -> None:
    fetcher.part.write_bytes(DATA + b"more")
    fetcher(size=0)
    assert fetcher.target.read_bytes() == DATA


def test_a_whole_part_is_taken_without_a_request(fetcher: Fetcher, index: Index) -> None:
    fetcher.part.write_bytes(DATA)
    fetcher()
    assert fetcher.target.read_bytes() == DATA and not index.requests


def test_busy_server(fetcher: Fetcher, index: Index) -> None:
    index.faults = [Fault(status=503, retry_after=7), Fault(status=429), Fault(status=500)]
    fetcher()
    assert fetcher.target.read_bytes() == DATA
    assert len(fetcher.pauses) == 3 and fetcher.pauses[0] == 7 and fetcher.pauses[2] > 1


def test_a_dead_server_is_given_up(fetcher: Fetcher, index: Index) -> None:
    index.faults = [Fault(status=503)] * 50
    with pytest.raises(DownloadError, match="answered 503"):
        fetcher()
    assert len(index.file_requests()) == download.RETRIES


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_is_not_repeated(fetcher: Fetcher, index: Index, status: int) -> None:
    index.faults = [Fault(status=status)] * 5
    with pytest.raises(DownloadError, match=f"answered {status}"):
        fetcher()
    assert len(index.file_requests()) == 1


def test_no_server_at_all(tmp_path: Path) -> None:
    pauses: list[float] = []
    with pytest.raises(DownloadError, match="check the connection"):
        fetch("http://127.0.0.1:9/x", tmp_path / "x", open_url=Client().open, pause=pauses.append)
    assert len(pauses) == download.CALLS - 1 and sum(pauses) <= 1


def test_a_server_that_went_away_is_waited_for(fetcher: Fetcher, index: Index) -> None:
    """One that has answered before is asked as often as one that is busy."""
    index.faults = [Fault(cut=100_000)]
    real, calls = fetcher.client.open, 0

    def open_url(url: str, headers: Any) -> Any:
        nonlocal calls
        calls += 1
        if 1 < calls < download.RETRIES:
            raise ConnectionRefusedError("nobody there")
        return real(url, headers)

    fetcher.client.open = open_url  # type: ignore[method-assign]
    fetcher()
    assert fetcher.target.read_bytes() == DATA and calls == download.RETRIES


def test_space_is_checked_before(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(fetcher.target.parent)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DownloadError, match=r"needs 2 MB .* has 1 MB free"):
        fetcher()
    assert not fetcher.target.exists()


def test_a_disk_that_fills_up(fetcher: Fetcher, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails half-way leaves the part for a later run and nothing under the final name."""
    real, written = download._write, 0

    def write(file: Any, block: bytes, part: Path) -> None:
        nonlocal written
        written += len(block)
        if written > 800_000:

            class Full:
                def write(self, _: object) -> int:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            file = Full()
        real(file, block, part)

    monkeypatch.setattr(download, "_write", write)
    with pytest.raises(DownloadError, match="No space left on device"):
        fetcher()
    assert not fetcher.target.exists() and 0 < fetcher.part.stat().st_size <= 800_000
    monkeypatch.setattr(download, "_write", real)
    fetcher()
    assert fetcher.target.read_bytes() == DATA


def test_the_old_file_stays_until_the_new_one_is_whole(fetcher: Fetcher, index: Index) -> None:
    fetcher.target.write_bytes(b"old")
    index.faults = [Fault(flip=3)] * 9
    with pytest.raises(DownloadError):
        fetcher()
    assert fetcher.target.read_bytes() == b"old"
    index.faults = []
    fetcher()
    assert fetcher.target.read_bytes() == DATA


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    import threading

    order: list[str] = []
    waits = threading.Event()

    def second() -> None:
        with exclusive(tmp_path / "l", waits.set):
            order.append("second")

    with exclusive(tmp_path / "l"):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(PATIENCE)
        order.append("first")
    thread.join(PATIENCE)
    assert order == ["first", "second"]
