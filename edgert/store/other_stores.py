"""Reads the model files of other tools where they lie: Hugging Face's cache, Ollama, LM Studio, llama.cpp."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edgert.folders import written
from edgert.store.download import CONNECT_SECONDS, DownloadError

SCHEMES = ("hf", "ollama", "lmstudio", "llama.cpp")
PREFERRED = ("Q4_K_M", "Q4_0", "Q4_1", "Q4_K_S", "IQ4_NL", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0")

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_AUXILIARY = re.compile(r"mmproj|imatrix|-vocab", re.IGNORECASE)


def is_first_shard(filename: str) -> bool:
    """Whether a file is whole, or the first of a split model."""
    shard = _SHARD.search(filename)
    return shard is None or int(shard[1]) == 1


def total_size(path: Path) -> int:
    """Bytes of a model, all shards together."""
    shard = _SHARD.search(path.name)
    paths = [path]
    if shard and int(shard[2]) <= 1000:
        stem = path.name[: shard.start()]
        paths = [path.with_name(f"{stem}-{i:05}-of-{shard[2]}.gguf") for i in range(1, int(shard[2]) + 1)]
    size = 0
    for file in paths:
        with contextlib.suppress(OSError):
            size += file.stat().st_size
    return size


def all_models() -> Iterator[tuple[str, str, Path]]:
    """(tool, name that -m takes, file) of every model found; a store that cannot be read holds none."""
    for tool, scan in (
        ("huggingface", _scan_hub),
        ("ollama", _scan_ollama),
        ("lmstudio", _scan_lm_studio),
        ("llama.cpp", _scan_llama_cpp),
    ):
        with contextlib.suppress(OSError):
            for name, path in scan():
                yield tool, name, path


def find(scheme: str, rest: str) -> Path | None:
    """The file that a scan lists under scheme:rest, or None."""
    if scheme == "hf":
        repo, _, quant = rest.partition(":")
        files = dict(_hub_files(repo)) if _REPO.fullmatch(repo) else {}
        chosen = choose(list(files), quant)
        return files[chosen] if chosen else None
    scan = {"ollama": _scan_ollama, "lmstudio": _scan_lm_studio, "llama.cpp": _scan_llama_cpp}[scheme]
    wanted = f"{scheme}:{rest}"
    if scheme == "ollama" and ":" not in rest:
        wanted += ":latest"
    with contextlib.suppress(OSError):
        for name, path in scan():
            if name == wanted:
                return path
    return None


def choose(filenames: list[str], quant: str = "") -> str | None:
    """The GGUF of a repository: the wanted quantization, otherwise the first that `PREFERRED` lists."""
    files = sorted(
        f
        for f in filenames
        if f.lower().endswith(".gguf") and is_first_shard(f) and not _AUXILIARY.search(f.rpartition("/")[2])
    )
    if quant:
        exact = [f for f in files if quant in (f, f.rpartition("/")[2])]
        return next(iter(exact or [f for f in files if _has_quant(f, quant)]), None)
    for preferred in PREFERRED:
        for file in files:
            if _has_quant(file, preferred):
                return file
    return files[0] if files else None


def _has_quant(filename: str, quant: str) -> bool:
    pattern = rf"(^|[-._/]){re.escape(quant)}(?=[-./]|$)"
    return re.search(pattern, filename.removesuffix(".gguf"), re.IGNORECASE) is not None


def _inside(path: Path, root: Path) -> bool:
    """Whether a file, links followed, lies in the root: what a manifest names must not lead elsewhere."""
    try:
        return path.is_file() and path.resolve().is_relative_to(root.resolve())
    except OSError:
        return False


def _hub() -> Path:
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return written(cache)
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return written(home) / "hub"


def _hub_files(repo: str) -> Iterator[tuple[str, Path]]:
    """(path in the repository, file) of the GGUFs in the newest snapshot that the cache has."""
    root = _hub()
    place = root / ("models--" + repo.replace("/", "--"))
    with contextlib.suppress(OSError):
        snapshots = sorted((place / "snapshots").iterdir(), key=lambda p: p.stat().st_mtime, reverse=True)
        seen: set[str] = set()
        for snapshot in snapshots:
            for path in sorted(snapshot.rglob("*.gguf")):
                name = path.relative_to(snapshot).as_posix()
                if name not in seen and _inside(path, root):
                    seen.add(name)
                    yield name, path


def _scan_hub() -> Iterator[tuple[str, Path]]:
    for place in sorted(_hub().glob("models--*--*")):
        repo = place.name.removeprefix("models--").replace("--", "/", 1)
        if _REPO.fullmatch(repo):
            for name, path in _hub_files(repo):
                if is_first_shard(name):
                    yield f"hf:{repo}:{name}", path


def _scan_ollama() -> Iterator[tuple[str, Path]]:
    """Source: Ollama's docs: manifests/HOST/NAMESPACE/MODEL/TAG is JSON whose model layer names a blob."""
    places = [Path(chosen)] if (chosen := os.environ.get("OLLAMA_MODELS")) else []
    places += [written("~/.ollama/models"), Path("/usr/share/ollama/.ollama/models")]
    for root in places:
        manifests = root / "manifests"
        for manifest in sorted(manifests.glob("*/*/*/*")) if manifests.is_dir() else []:
            host, namespace, model, tag = manifest.relative_to(manifests).parts
            try:
                layers = json.loads(manifest.read_bytes())["layers"]
                digest = next(
                    str(layer["digest"]) for layer in layers if str(layer["mediaType"]).endswith("image.model")
                )
            except (OSError, ValueError, KeyError, TypeError, StopIteration):
                continue
            if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
                continue
            blob = root / "blobs" / digest.replace(":", "-")
            prefix = "" if host == "registry.ollama.ai" else f"{host}/"
            prefix += "" if not prefix and namespace == "library" else f"{namespace}/"
            if _inside(blob, root):
                yield f"ollama:{prefix}{model}:{tag}", blob


def _scan_lm_studio() -> Iterator[tuple[str, Path]]:
    for root in (written("~/.lmstudio/models"), written("~/.cache/lm-studio/models")):
        for path in sorted(root.glob("*/*/*.gguf")) if root.is_dir() else []:
            if is_first_shard(path.name) and not _AUXILIARY.search(path.name) and _inside(path, root):
                yield f"lmstudio:{path.relative_to(root).as_posix()}", path


def _scan_llama_cpp() -> Iterator[tuple[str, Path]]:
    if chosen := os.environ.get("LLAMA_CACHE"):
        root = Path(chosen)
    elif sys.platform == "darwin":
        root = written("~/Library/Caches/llama.cpp")
    elif sys.platform == "win32":
        root = written(os.environ.get("LOCALAPPDATA", "~")) / "llama.cpp"
    else:
        root = written(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "llama.cpp"
    for path in sorted(root.glob("*.gguf")) if root.is_dir() else []:
        if is_first_shard(path.name) and not _AUXILIARY.search(path.name) and _inside(path, root):
            yield f"llama.cpp:{path.name}", path


def pull_from_hub(rest: str, progress: Callable[[str, int, int], None] | None = None) -> Path:
    """Fetches owner/repo[:quant or file] into Hugging Face's own cache, which checks and resumes.

    Raises: DownloadError
    """
    repo, _, quant = rest.partition(":")
    if not _REPO.fullmatch(repo):
        raise DownloadError(f"{rest!r} does not name a repository: write hf:owner/repo or hf:owner/repo:Q4_K_M.")
    with _silent_hub() as hub:
        try:  # one request that is not repeated: where there is no connection, the user learns it at once
            files = [file.rfilename for file in hub.HfApi().model_info(repo, timeout=CONNECT_SECONDS).siblings or ()]
        except hub.errors.RepositoryNotFoundError as error:
            raise DownloadError(
                f"hf:{repo} is not there, or is private: check the name, or log in with `hf auth login`."
            ) from error
        except Exception as error:  # its own errors and those of the connection under it have no common base
            raise DownloadError(
                f"hf:{repo} could not be looked up ({_first_line(error)}): check the connection and try again."
            ) from error
        chosen, wanted = _wanted(repo, files, quant)
        try:
            paths = [Path(hub.hf_hub_download(repo, f, tqdm_class=_progress_class(f, progress))) for f in wanted]
        except Exception as error:
            raise DownloadError(
                f"{chosen} of hf:{repo} could not be fetched ({_first_line(error)}); what arrived is kept: "
                "check the connection and give the same command again."
            ) from error
    return paths[wanted.index(chosen)]


@contextlib.contextmanager
def _silent_hub() -> Iterator[Any]:
    """huggingface_hub, which writes its warnings to standard error unless it is told not to."""
    import huggingface_hub
    import huggingface_hub.errors
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield huggingface_hub
    finally:
        logging.set_verbosity(before)


def _wanted(repo: str, files: list[str], quant: str) -> tuple[str, list[str]]:
    """The file to load, and all that it needs. Raises: DownloadError when nothing fits."""
    chosen = choose(files, quant)
    if chosen is None:
        ggufs = [f for f in files if f.endswith(".gguf")]
        have = f"its GGUF files are {', '.join(ggufs[:8])}" if ggufs else "it holds no GGUF file"
        raise DownloadError(f"hf:{repo} has nothing that fits {quant or 'a text model'!r}; {have}.")
    shard = _SHARD.search(chosen)
    if shard is None:
        return chosen, [chosen]
    return chosen, [f for f in sorted(files) if f.startswith(chosen[: shard.start()]) and _SHARD.search(f)]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _progress_class(name: str, progress: Callable[[str, int, int], None] | None) -> type:
    """A stand-in for tqdm that reports to `progress`."""
    from huggingface_hub.utils import tqdm

    class Reporter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            self.done = int(kwargs.get("initial") or 0)
            self.whole = int(kwargs.get("total") or 0)

        def update(self, n: float | None = 1) -> bool | None:
            self.done += int(n or 0)
            if progress:
                progress(f"downloading {name}", self.done, self.whole)
            return None

    return Reporter
