"""Where things are kept, for users with and without a home."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert import EdgertError, cli, folders, store
from edgert.conversation import Conversation

pwd = pytest.importorskip("pwd", reason="users of POSIX")


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number of which the system knows nothing.

    tmp_path comes first: pytest, too, asks who the user is.
    """
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "EDGERT_CACHE", "EDGERT_MODELS", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_a_user_without_a_home_is_told_what_to_set(homeless: None, capsys: pytest.CaptureFixture[str]) -> None:
    for find in (folders.cache_root, folders.data_root):
        with pytest.raises(EdgertError, match="set HOME"):
            find()
    assert cli.call(["run", "-m", "smollm2", "-p", "hi"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("edgert: This user has no home folder") and "own" not in err.split("folder")[0]


def test_a_user_without_a_home_can_set_folders(
    homeless: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGERT_MODELS", str(tmp_path))
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    assert folders.cache_root() == tmp_path / "cache" and store.folder() == tmp_path
    assert cli.call(["ls"]) == 0 and "mine" in capsys.readouterr().out


def test_what_was_written_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folders.written("~/a") == tmp_path / "a"
    assert folders.written("~no-such-user-here/a") == Path("~no-such-user-here/a")
    monkeypatch.setenv("EDGERT_CACHE", "~/cache")
    assert folders.cache_root() == tmp_path / "cache"


@pytest.mark.parametrize("flag", ["-f {}", "-p x --grammar @{}", "-p x --chat-template @{}"])
def test_a_file_that_cannot_be_read_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["run", *flag.format("~no-such-user-here/x").split()]) == 2
    assert "~no-such-user-here/x cannot be read: No such file or directory." in capsys.readouterr().err


def test_a_conversation_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EdgertError, match="cannot be written"):
        Conversation().save(tmp_path / "file" / "one.json")
    (tmp_path / "one.json").mkdir()
    with pytest.raises(EdgertError, match="cannot be written"):
        Conversation().save(tmp_path / "one.json")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "one.json"}
