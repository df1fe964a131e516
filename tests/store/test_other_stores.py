"""Models in other tools' folders, and of the hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from index_server import GGUF

from edgert import store
from edgert.errors import EdgertError
from edgert.store import other_stores
from edgert.store.download import DownloadError

pytestmark = pytest.mark.usefixtures("folder")


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
