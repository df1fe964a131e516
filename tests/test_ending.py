"""Work that is told to end before it is done, and what is left of it: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
from compiling import IN_CHILDREN
from fake import PATIENCE, wait_for

from edgert import backends, ending, files
from edgert.backends import attempts
from edgert.backends.cpu import compiler, copies, isa, weights
from edgert.ending import Stop, Stopped
from edgert.notes import Notes

KERNELS = ["angles", "walk.role=post", "walk.role=lead", "walk.role=worker"]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty one, into which children of each load compile."""
    monkeypatch.setattr(compiler, "_compile", IN_CHILDREN)
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_addresses", {})
    compiler.cache_folder.cache_clear()
    monkeypatch.setattr(compiler, "cache_folder", compiler.cache_folder.__wrapped__)
    return tmp_path


def kinds(folder: Path) -> set[str]:
    return {path.suffix for path in folder.rglob("*") if path.is_file()}


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_what_is_told() -> None:
    stop, seen = Stop(), []
    with stop.calls(lambda: seen.append("called")):
        stop.over(ending.check)
        stop.tell()
    assert seen == ["called"]
    with pytest.raises(Stopped):
        stop.over(ending.check)
    with pytest.raises(Stopped), stop.calls(lambda: seen.append("too late")):
        seen.append("begun")
    stop.tell()
    assert seen == ["called"]
    ending.check()  # nobody tells this thread


def test_compilers_end_when_they_are_told(cache: Path) -> None:
    stop, told = Stop(), []
    groups: list[int] = []  # Ctrl+C in a terminal goes to all of this process'

    def tell() -> None:
        wait_for(psutil.Process().children)
        told.extend(psutil.Process().children())
        groups.extend(os.getpgid(child.pid) for child in told if sys.platform != "win32")
        stop.tell()

    thread = threading.Thread(target=tell)
    thread.start()
    with pytest.raises(Stopped):
        stop.over(compiler.compile_all, KERNELS, isa.select("portable"))
    thread.join()
    assert told and all(map(gone, told))
    assert sys.platform == "win32" or os.getpgrp() not in groups
    assert len(list(cache.rglob("*.o"))) < len(KERNELS)
    assert kinds(cache) <= {".lock", ".o"}


def test_who_waits_for_the_kernels_of_another_program_ends(cache: Path) -> None:
    from filelock import FileLock

    portable, stop = isa.select("portable"), Stop()
    (cache / "kernels").mkdir()
    with FileLock(cache / "kernels" / f"{compiler.cache_folder(portable).name}.lock"), pytest.raises(Stopped):
        stop.over(compiler.compile_all, KERNELS, portable, lambda done, of: stop.tell())


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM] if sys.platform != "win32" else [])
def test_a_child_ends_with_its_parent(number: signal.Signals) -> None:
    child = "from edgert import ending; ending.with_parent(); print('begun', flush=True); import time; time.sleep(1000)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"begun\n"
        [one] = psutil.Process(process.pid).children()
        process.send_signal(number)
        process.wait(PATIENCE)
        wait_for(lambda: gone(one))


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_compilers_end_with_their_parent(cache: Path) -> None:
    script = (
        "from edgert.backends.cpu import compiler, isa\n"
        f"compiler.compile_all({KERNELS}, isa.select(), lambda *_: print('begun', flush=True))"
    )
    environment = os.environ | {"EDGERT_ISA": "portable"}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout and parent.stdout.readline()
        wait_for(psutil.Process(parent.pid).children)
        children = psutil.Process(parent.pid).children()
        parent.kill()
        parent.wait(PATIENCE)
        wait_for(lambda: all(map(gone, children)))
    assert kinds(cache) <= {".lock", ".o"}


def test_what_killed_compilers_left_goes_with_the_next_compilation(cache: Path) -> None:
    portable = isa.select("portable")
    folder = compiler.cache_folder(portable)
    folder.mkdir(parents=True)
    (folder / f"angles.o.1234{files.PART}").write_bytes(b"half")
    compiler.compile_all(KERNELS[:1], portable)
    assert kinds(cache) == {".lock", ".o"}


def test_a_kernel_that_cannot_be_written_whole_leaves_nothing(tmp_path: Path) -> None:
    def fails(named: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if named:
                patch.setattr(files, "_without_name", lambda folder: None)
            with pytest.raises(KeyboardInterrupt), files.whole(tmp_path / "a") as file:
                file.write(b"half")
                raise KeyboardInterrupt

    (tmp_path / "a").write_bytes(b"old")
    for named in (False, True):
        fails(named)
        assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


@pytest.mark.parametrize("named", [False, True])
def test_a_whole_file_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    if named:
        monkeypatch.setattr(files, "_without_name", lambda folder: None)
    (tmp_path / "a").write_bytes(b"old")
    with files.whole(tmp_path / "a") as file:
        files.write_all(file, b"new" * 1000)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"new" * 1000)]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600 or sys.platform == "win32"


@pytest.mark.skipif(sys.platform != "linux", reason="files without a name are Linux'")
def test_a_writer_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom edgert import files\n"
        "with files.whole(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half')\n    print('begun', flush=True)\n    time.sleep(1000)"
    )
    if files._without_name(tmp_path) is None:
        pytest.skip("the disk of temporary files has none without a name")
    command = [sys.executable, "-c", script, str(tmp_path / "a")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout and writer.stdout.readline()
        writer.kill()
    assert list(tmp_path.iterdir()) == []


def test_packing_ends_between_two_pieces(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    original, packed, stop = weights.pack_rows, [], Stop()

    def pack(*given: object, **named: object) -> object:
        packed.append(given)
        stop.tell()
        return original(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(weights, "pack_rows", pack)
    path = tiny_model("llama", n_ctx=512)
    with pytest.raises(Stopped):
        stop.over(backends.load, path, backend="cpu", n_ctx=64, n_threads=1)
    assert len(packed) == 1
    monkeypatch.undo()
    with closing(backends.load(path, backend="cpu", n_ctx=64, n_threads=1)):
        pass


def test_the_check_of_a_copy_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "LOOK", copies.PIECE)
    chosen, stop, walked = isa.select(None), Stop(), []

    class Told:
        def run(self, tape: object) -> None:
            walked.append(tape)
            stop.tell()

    with pytest.raises(Stopped):
        stop.over(copies._digests, np.zeros(3 * copies.PIECE, np.uint8), chosen, Told())  # type: ignore[arg-type]
    assert len(walked) == 1
    data = np.arange(5 * copies.PIECE // 2 // 8).view(np.uint8)
    in_parts = copies._digests(data, chosen)
    monkeypatch.setattr(copies, "LOOK", 64 * copies.PIECE)
    assert copies._digests(data, chosen).tolist() == in_parts.tolist()


def test_a_trial_that_was_told_to_end_is_no_crash(cache: Path) -> None:
    """The process may end before the library returns."""
    stop = Stop()

    def tried() -> None:
        with attempts.noted("llama", "a model"):
            assert Notes("attempts").all()
            stop.tell()
            assert not Notes("attempts").all()

    stop.over(tried)
