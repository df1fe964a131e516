"""The folder beside a result where a run keeps what it measures, so that a stopped run need not measure it again."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from edgert.errors import ModelFileError

NOTE, LOCK = "settings", "lock"  # what the contents were measured for; what a run holds while it uses them


def beside(out: Path) -> Path:
    """Where what is measured for a result lies."""
    return out.with_name(out.name + ".work")


def remove_left(out: Path) -> None:
    """Deletes what stopped runs measured for a result that is now there; nothing that is in use or not edgert's."""
    if beside(out).exists():
        with contextlib.suppress(ModelFileError):
            WorkFolder(beside(out), "", resume=False).remove()


class WorkFolder:
    """A folder of one run at a time.

    path:      it is made if need be, and emptied unless the run goes on
    made_for:  what the measurements depend on
    resume:    go on with what a run for the very same left

    Raises: ModelFileError when it cannot be made, another run uses it, or what has its name is not edgert's.
    """

    def __init__(self, path: Path, made_for: str, *, resume: bool) -> None:
        from filelock import FileLock, Timeout

        self.path, note = path, path / NOTE
        self._lock = FileLock(path / LOCK)
        try:
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise ModelFileError(f"{path} must be a folder for what is measured: move what has that name away.")
            if path.exists() and not note.exists() and {one.name for one in path.iterdir()} - {LOCK}:
                raise ModelFileError(f"{path} is needed for what is measured and holds other things: move it away.")
            path.mkdir(exist_ok=True)
            self._lock.acquire(timeout=0)
            if not (resume and note.exists() and note.read_text(encoding="utf-8") == made_for):
                for old in path.iterdir():
                    if old.is_dir() and not old.is_symlink():
                        shutil.rmtree(old)
                    elif old.name != LOCK:
                        old.unlink()
                note.write_text(made_for, encoding="utf-8")
        except Timeout:
            raise ModelFileError(
                f"{path.with_suffix('')} is being made by another process: wait, or choose another name."
            ) from None
        except OSError as error:
            self.close()
            raise ModelFileError(f"{path} cannot be made or used: {error.strerror or error}.") from None
        except BaseException:
            self.close()
            raise

    def remove(self) -> None:
        """Deletes it with all that it holds."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Lets another run use it."""
        self._lock.release()
