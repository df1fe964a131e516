"""The folder beside a result where a run keeps what it measures, so that a stopped run need not measure it again."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import IO

from edgert.errors import ModelFileError

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be deleted anyway
    fcntl = None  # type: ignore[assignment]

NOTE = "settings"  # names what the contents were measured for; it is locked while a run uses the folder


class WorkFolder:
    """A folder of one run at a time.

    path:      it is made if need be, and emptied unless the run goes on
    made_for:  what the measurements depend on
    resume:    go on with what a run for the very same left

    Raises: ModelFileError when it cannot be made, another run uses it, or what has its name is not edgert's.
    """

    def __init__(self, path: Path, made_for: str, *, resume: bool) -> None:
        self.path = path
        note = path / NOTE
        self._lock: IO[str] | None = None
        try:
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise ModelFileError(f"{path} must be a folder for what is measured: move what has that name away.")
            if path.exists() and not note.exists() and any(path.iterdir()):
                raise ModelFileError(f"{path} is needed for what is measured and holds other things: move it away.")
            path.mkdir(exist_ok=True)
            self._lock = open(note, "a+", encoding="utf-8")  # noqa: SIM115
            self._take()
            self._lock.seek(0)
            if not (resume and self._lock.read() == made_for):
                for old in path.iterdir():
                    if old.name != NOTE:
                        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
                self._lock.truncate(0)
                self._lock.write(made_for)
                self._lock.flush()
        except OSError as error:
            self.close()
            raise ModelFileError(f"{path} cannot be made or used: {error.strerror or error}.") from None
        except BaseException:
            self.close()
            raise

    def _take(self) -> None:
        assert self._lock is not None
        if fcntl is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ModelFileError(
                    f"{self.path.with_suffix('')} is being made by another process: wait, or choose another name."
                ) from None

    def remove(self) -> None:
        """Deletes it with all that it holds."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Lets another run use it."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # a full disk
                self._lock.close()
            self._lock = None
