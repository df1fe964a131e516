"""The chat screen in a pseudo-terminal: keys, pastes, interruptions, and the terminal afterwards."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest

from edgert.folders import cache_root

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

import fcntl
import pty
import struct
import termios

FAKE = Path(__file__).with_name("fake_model.py")
HINT = "Send a message (/? for help)"
UP, CTRL_C, CTRL_D, BACKSPACE = "\x1b[A", "\x03", "\x04", "\x7f"


class Screen:
    """A chat in a terminal of its own, on a fake model unless another program is named."""

    def __init__(self, home: Path, *arguments: str, program: Sequence[str] = (str(FAKE),), **variables: str) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        others = ("EDGERT_", "COLUMNS", "LINES")  # that would say another size than the terminal has
        environment = {k: v for k, v in os.environ.items() if not k.startswith(others)}
        environment |= {"XDG_DATA_HOME": str(home), "HOME": str(home), "TERM": "xterm", "LC_ALL": "C.UTF-8"}
        self.child = subprocess.Popen(
            [sys.executable, *program, "chat", *arguments],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=environment | variables,
            preexec_fn=self._own_terminal,
        )
        self.raw = b""
        self._read_to = 0

    @staticmethod
    def _own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which whatever runs in the background was started without

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        os.close(self.master)
        os.close(self.slave)

    def type(self, text: str | bytes) -> None:
        os.write(self.master, text.encode() if isinstance(text, str) else text)

    def at_rest(self) -> None:
        """Waits until the program waits: before that, Ctrl+C may come when `input` has written and not begun to read,
        which Python hears of only with the next key."""
        child, seen = psutil.Process(self.child.pid), 0
        while seen < 5:
            seen = seen + 1 if child.status() == psutil.STATUS_SLEEPING else 0
            self.pump(0.02)

    def pump(self, seconds: float) -> None:
        """Takes what the chat writes, for at most so long."""
        if select.select([self.master], [], [], seconds)[0]:
            data = os.read(self.master, 65536)
            self.raw += data
            if b"\x1b[6n" in data:  # the chat asks where the cursor is
                os.write(self.master, b"\x1b[1;1R")

    @property
    def text(self) -> str:
        """All that was written, without escape sequences."""
        plain = re.sub(rb"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>])", b"", self.raw)
        return plain.decode("utf-8", "replace").replace("\r", "")

    def expect(self, wanted: str, seconds: float = 60.0) -> str:
        """Waits for a text after the one that was last waited for; all text up to it."""
        end = time.monotonic() + seconds
        while (at := self.text.find(wanted, self._read_to)) < 0:
            assert time.monotonic() < end, f"no {wanted!r} in {self.text[self._read_to :]!r}"
            assert self.child.poll() is None or select.select([self.master], [], [], 0)[0], self.text
            self.pump(0.1)
        between = self.text[self._read_to : at]
        self._read_to = at + len(wanted)
        return between

    def expect_raw(self, wanted: bytes, seconds: float = 60.0) -> None:
        """Waits for bytes, escape sequences included, in all that was written."""
        end = time.monotonic() + seconds
        while wanted not in self.raw:
            assert time.monotonic() < end, self.raw
            self.pump(0.1)

    def ask(self, text: str, answer: str) -> str:
        """Sends a message and waits for a text in what follows, and for the next prompt."""
        self.type(text + "\r")
        shown = self.expect(answer)
        self.expect(HINT)
        return shown

    def leave(self) -> None:
        self.type(CTRL_D)
        self.wait()
        assert self.child.returncode == 0

    def wait(self) -> None:
        end = time.monotonic() + 60
        while self.child.poll() is None:
            assert time.monotonic() < end, self.text
            self.pump(0.05)
        while select.select([self.master], [], [], 0.05)[0]:
            self.pump(0.05)

    def assert_restored(self) -> None:
        """The terminal's settings are those it had, and pastes carry no brackets any more."""
        assert termios.tcgetattr(self.slave) == self.before
        assert self.raw.rfind(b"\x1b[?2004l") > self.raw.rfind(b"\x1b[?2004h")
        assert self.raw.rfind(b"\x1b[?25h") >= self.raw.rfind(b"\x1b[?25l")


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    with Screen(tmp_path) as screen:
        screen.expect(HINT)
        yield screen


def test_a_plain_conversation(screen: Screen) -> None:
    assert "smollm2 · cpu on a fake:" in screen.text.splitlines()[0]
    screen.ask("hello", "you said 'hello'")
    screen.ask("again", "you said 'again'")
    screen.ask("", "")
    screen.type("/bye\r")
    screen.wait()
    assert screen.child.returncode == 0
    screen.assert_restored()


def test_the_first_start_shows_a_bar(tmp_path: Path) -> None:
    with Screen(tmp_path, "-m", "fresh") as screen:
        screen.expect(HINT)
        assert "compiling, the first time only ████████████░░░░░░░░░░░░ 5/10 kernels" in screen.text
        screen.leave()


def test_a_narrow_terminal_breaks_no_words(tmp_path: Path) -> None:
    with Screen(tmp_path, "--verbose", COLUMNS="30") as screen:
        screen.expect(HINT)
        assert "smollm2 · cpu on a fake:\n{" in screen.text
        screen.type("/set parameter\r")
        screen.expect("Write /set parameter NAME\nVALUE, where NAME is one of\n")
        screen.expect(HINT)
        screen.ask("hello", "prompt 9 + 3 cached tokens,\n900.0 tok/s · answer 2 tokens,\n10.0 tok/s · context 14/4096")
        screen.leave()


@pytest.mark.parametrize(("key", "code", "end"), [(CTRL_C, 130, "^C\n"), (CTRL_D, 130, "\n"), ("n\r", 1, ".\n")])
def test_a_model_that_is_not_to_be_fetched(tmp_path: Path, key: str, code: int, end: str) -> None:
    with Screen(tmp_path, program=("-m", "edgert")) as screen:
        screen.expect("from the package index? [Y/n]: ")
        screen.at_rest()
        screen.type(key)
        screen.wait()
        assert screen.child.returncode == code
        assert screen.text.endswith(end)
        assert "Traceback" not in screen.text


def test_verbose(tmp_path: Path) -> None:
    with Screen(tmp_path, "--verbose") as screen:
        screen.expect(HINT)
        screen.ask("hello", "prompt 9 + 3 cached tokens, 900.0 tok/s · answer 2 tokens, 10.0 tok/s · context 14/4096")
        screen.ask("/set quiet", "Rates are not shown.")
        screen.ask("hello", "you said")
        assert screen.text.count("tok/s") == 2
        screen.leave()


def test_chinese_is_edited_by_the_character(screen: Screen) -> None:
    """Case N 174."""
    screen.ask("你好世界" + BACKSPACE, "you said '你好世'")
    screen.ask("한국어" + BACKSPACE * 3 + "日本🙂é" + BACKSPACE * 2, "you said '日本'")
    screen.leave()


def test_input_that_is_not_utf8(screen: Screen, tmp_path: Path) -> None:
    screen.type(b"\xc4\xe3\xba\xc3 ok\r")
    screen.expect("you said '\ufffd")
    screen.expect("ok'")
    screen.expect(HINT)
    screen.ask("still here", "you said 'still here'")
    screen.leave()
    assert "ok" in (tmp_path / "edgert" / "history").read_text(encoding="utf-8")


def test_a_paste_is_one_message(screen: Screen) -> None:
    lines = [f"line {i}" for i in range(200)]
    screen.type("\x1b[200~" + "\r".join(lines) + "\x1b[201~")
    time.sleep(0.3)
    screen.pump(0.2)
    assert "you said" not in screen.text
    screen.type("\r")
    screen.expect("you said 'line 0\\nline 1\\n")
    screen.expect("line 199'")
    screen.expect(HINT)
    assert screen.text.count("you said") == 1
    screen.leave()


def test_several_lines_between_quotes(screen: Screen) -> None:
    screen.type('"""one\r')
    screen.type("two\r")
    screen.type('"""\r')
    screen.expect("you said 'one\\ntwo'")
    screen.expect(HINT)
    screen.ask('"""in one line"""', "you said 'in one line'")
    screen.ask("first\x1b\rsecond", "you said 'first\\nsecond'")
    screen.leave()


def test_a_message_may_begin_with_a_slash(screen: Screen) -> None:
    """Between quotes anything is a message; a pasted path that is not is kept in the history, and told how."""
    screen.ask('"""/etc/hosts is what?"""', "you said '/etc/hosts is what?'")
    screen.ask('"""/bye"""', "you said '/bye'")
    screen.type("\x1b[200~/usr/bin/x\rfailed\x1b[201~\r")
    screen.expect('There is no command /usr/bin/x: /? shows those there are. Put a message between """ and """.')
    screen.expect(HINT)
    screen.ask(f'{UP}"""{UP}\x01"""', "you said '/usr/bin/x\\nfailed'")
    screen.leave()


def test_an_answer_that_was_stopped(screen: Screen) -> None:
    """Case C 40: the model refuses turns that do not alternate, and never has to."""
    screen.type("count\r")
    screen.expect("0 1 2 3 ")
    screen.type(CTRL_C)
    screen.expect("Stopped.")
    screen.expect(HINT)
    screen.ask("go on", "you said 'go on'")
    shown = screen.ask("/show messages", "user: go on")
    assert "user: count\n\nassistant: 0 1 2 3 " in shown
    screen.leave()


@pytest.mark.slow
def test_gemma3_answers_after_an_answer_that_was_stopped(gemma3_path: Path, tmp_path: Path) -> None:
    """Case C 40 on the model itself, which without instructions goes on for long."""
    arguments = ("-m", str(gemma3_path), "--backend", "cpu", "--temp", "0")
    with Screen(tmp_path, *arguments, program=("-m", "edgert"), EDGERT_CACHE=str(cache_root())) as screen:
        screen.expect(HINT, 300)
        for message in ("Write a long story about a ship.", "What is the capital of France?"):
            before = len(screen.text)
            screen.type(message + "\r")
            while len(screen.text) < before + 400:  # beyond the message, however often it is drawn
                assert screen.child.poll() is None, screen.text
                screen.pump(0.1)
            screen.type(CTRL_C)
            screen.expect("Stopped.")
            screen.expect(HINT)
        shown = screen.ask("/show messages", "user: What is the capital of France?\n\nassistant: ")
        assert re.search(r"user: Write a long story about a ship\.\n\nassistant: \w+", shown)
        screen.leave()


def test_stopped_before_the_first_word(screen: Screen) -> None:
    screen.type("silent\r")
    screen.expect("reading the prompt")
    screen.type(CTRL_C)
    screen.expect("Stopped before the answer began")
    screen.expect(HINT)
    screen.ask("go on", "you said 'go on'")
    screen.leave()


def test_control_c_at_the_prompt(screen: Screen) -> None:
    screen.type("half a mess")
    screen.type(CTRL_C)
    screen.expect("Ctrl+D or /bye leaves.")
    screen.expect(HINT)
    screen.ask("whole", "you said 'whole'")
    screen.leave()


def test_an_engine_that_fails(screen: Screen) -> None:
    screen.type("crash\r")
    screen.expect("half an ")
    screen.expect("The answer failed (RuntimeError: the engine is gone).")
    screen.expect(HINT)
    screen.ask("go on", "you said 'go on'")
    screen.type("full\r")
    screen.expect("The prompt has 5000 tokens")
    screen.expect(HINT)
    screen.ask("short", "you said 'short'")
    assert "Traceback" not in screen.text
    screen.leave()


def test_keys_during_an_answer_wait_for_the_next_prompt(screen: Screen) -> None:
    screen.type("slow\r")
    screen.expect("0 1 2 ")
    screen.type("typed ahead\r")
    between = screen.expect("14 ")
    assert "typed" not in between
    screen.expect("you said 'typed ahead'")
    screen.expect(HINT)
    screen.type("slow\r")
    screen.expect("0 1 2 ")
    screen.type("\x1b[200~pasted\rahead\x1b[201~\r")
    screen.expect("you said 'pasted\\nahead'")
    screen.expect(HINT)
    screen.leave()


@pytest.mark.parametrize("text", ["typed ahead\r", "\x1b[200~pasted\rahead\x1b[201~\r"])
def test_keys_while_the_model_is_loaded_wait_for_the_prompt(tmp_path: Path, text: str) -> None:
    go = tmp_path / "go"
    with Screen(tmp_path, "-m", "held", HELD_UNTIL=str(go)) as screen:
        screen.expect("loading held")
        screen.expect_raw(b"\x1b[?2004h")
        screen.type(text)
        screen.pump(0.3)
        go.touch()
        assert "ahead" not in screen.expect("held · cpu")
        screen.expect("you said ")
        screen.expect(HINT)
        assert screen.text.count("you said") == 1
        screen.leave()
        screen.assert_restored()


@pytest.mark.parametrize("end", ["broken", CTRL_C])
def test_a_load_that_fails_leaves_nothing_for_the_shell(tmp_path: Path, end: str) -> None:
    """Case N 176."""
    go = tmp_path / "go"
    with Screen(tmp_path, "-m", "held broken", HELD_UNTIL=str(go)) as screen:
        screen.expect_raw(b"\x1b[?2004h")
        screen.type("rm -rf 1\r")
        if end == CTRL_C:
            screen.type(CTRL_C + "rm -rf 2\r")
        else:
            go.touch()
        screen.wait()
        assert screen.child.returncode != 0
        screen.assert_restored()
        os.set_blocking(screen.slave, False)
        with pytest.raises(BlockingIOError):
            os.read(screen.slave, 1)
        assert "Traceback" not in screen.text


@pytest.mark.parametrize("moment", ["answer", "prompt"])
def test_a_death_during_a_paste(screen: Screen, moment: str) -> None:
    """Case N 176: nothing of a paste is left for the shell, and the terminal is as it was."""
    if moment == "answer":
        screen.type("count\r")
        screen.expect("0 1 2 ")
    paste = "".join(f"rm -rf {i}\r" for i in range(200)).encode()
    os.set_blocking(screen.master, False)
    for start in range(0, len(paste), 256):
        with_bracket = (b"\x1b[200~" if start == 0 else b"") + paste[start : start + 256]
        try:
            os.write(screen.master, with_bracket)
        except BlockingIOError:
            break
        screen.pump(0.001)
    os.set_blocking(screen.master, True)
    screen.child.send_signal(signal.SIGTERM)
    screen.wait()
    assert screen.child.returncode == -signal.SIGTERM
    screen.assert_restored()
    os.set_blocking(screen.slave, False)
    with pytest.raises(BlockingIOError):
        os.read(screen.slave, 1)
    assert "Traceback" not in screen.text


def test_control_characters_of_the_model_stay_out(screen: Screen) -> None:
    screen.ask("evil", "a]0;titleb[2Jc")
    assert b"\x1b]0;" not in screen.raw and b"b\x1b[2J" not in screen.raw
    screen.leave()


def test_thinking_is_dimmed(screen: Screen) -> None:
    screen.ask("think", "hidden thoughts\n\nthe answer")
    assert b"\x1b[2mhidden thoughts\x1b[0m" in screen.raw.replace(b"\r", b"")
    assert "<think>" not in screen.text
    screen.leave()


def test_progress_of_a_long_prompt(screen: Screen) -> None:
    screen.ask("hello", "reading the prompt ████████████░░░░░░░░░░░░  50 %  512/1024 tokens")
    screen.leave()


def test_commands(screen: Screen, tmp_path: Path) -> None:
    notes = tmp_path / "my notes.txt"
    notes.write_text("a note\nof two lines")
    screen.ask("/?", "/regen")
    screen.ask("/nothing", "There is no command /nothing")
    screen.ask("/NOTHING", "There is no command /NOTHING")
    screen.ask("/set parameter temp 0.25", "temperature is 0.25.")
    screen.ask("/set parameter temp nan", "temp must be a number")
    screen.ask("/set parameter top_p 7", "top_p must be a number from 0 to 1")
    screen.ask("/set parameter stop END", "stop is 'END'.")
    screen.ask("/set parameter num_ctx 9", "start the chat with -c")
    screen.ask("/set", "/set takes")
    screen.ask("params", '{"temperature": 0.25, "stop": "END"}')
    shown = screen.ask("/show parameters", "stop                ['END']")
    assert "temperature         0.25" in shown and "seed                -1" in shown
    assert "max_tokens          -1" in shown
    screen.ask("/set system Be short.", "The system message is set.")
    screen.ask("/show system", "Be short.")
    screen.ask(f"/read {notes}", "my notes.txt: 19 characters, 19 tokens")
    screen.ask("what is it?", "you said 'a note\\nof two lines\\n\\nwhat is it?'")
    screen.ask("/read /no/such/file", "cannot be read")
    screen.ask("/show messages", "system: Be short.")
    screen.ask("/regen", "you said 'a note")
    screen.ask("/stats", "answers       3 since the start")
    screen.ask("/save talk", "Saved")
    screen.ask("/undo", "Taken back: a note of two lines what is it?")
    screen.ask("/clear", "begins anew")
    screen.ask("/undo", "nothing to take back")
    screen.ask("/regen", "no answer to give anew")
    screen.ask("/load none", "No conversation 'none' is saved; those that are: talk.")
    screen.ask("/load talk", "Loaded 2 exchanges.")
    screen.ask("/save ../out", "Write /save NAME")
    screen.ask("/show", "engine   cpu on a fake")
    screen.ask("/show template", "{{ messages }}")
    screen.leave()
    assert not (tmp_path / "out.json").exists()
    assert (tmp_path / "edgert" / "conversations" / "talk.json").stat().st_mode & 0o077 == 0


def test_figures_are_of_the_conversation_as_it_is(tmp_path: Path) -> None:
    with Screen(tmp_path) as screen:
        screen.expect(HINT)
        screen.ask("/stats", "context       0 of 4096 tokens: 0 exchanges")
        screen.ask("hello", "you said")
        screen.ask("/stats", "context       14 of 4096 tokens: 1 exchange")  # as the answer left it
        screen.ask("hello again", "you said")
        screen.ask("/save talk", "Saved")
        screen.ask("/undo", "Taken back: hello again")
        whole = len("hello you said 'hello'")
        screen.ask("/stats", f"context       {whole} of 4096 tokens: 1 exchange")
        screen.ask("/clear", "begins anew")
        screen.ask("/stats", "context       0 of 4096 tokens: 0 exchanges")
        screen.leave()
    with Screen(tmp_path) as screen:
        screen.expect(HINT)
        screen.ask("/load talk", "Loaded 2 exchanges.")
        whole += len(" hello again you said 'hello again'")
        shown = screen.ask("/stats", f"context       {whole} of 4096 tokens: 2 exchanges")
        assert "answers       0 since the start" in shown and "generated" not in shown
        screen.leave()


def test_answers_are_broken_between_words(tmp_path: Path) -> None:
    """Of the width that the terminal has then."""
    with Screen(tmp_path) as screen:
        screen.expect(HINT)
        for columns, end in (
            (34, "waves, an\nethereal melody is here to stay.\n"),
            (40, "ethereal\nmelody is here to stay.\n"),
        ):
            fcntl.ioctl(screen.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
            screen.ask("poem", end)
        screen.leave()


def test_history_is_kept(tmp_path: Path) -> None:
    with Screen(tmp_path) as screen:
        screen.expect(HINT)
        screen.ask("remember me", "you said 'remember me'")
        screen.ask("/set nohistory", "not kept")
        screen.ask("a secret", "you said")
        screen.leave()
    history = tmp_path / "edgert" / "history"
    assert "remember me" in history.read_text() and "secret" not in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
    with Screen(tmp_path) as screen:
        screen.expect(HINT)
        screen.type(UP + UP)
        screen.type("!\r")
        screen.expect("you said 'remember me!'")
        screen.expect(HINT)
        screen.leave()


def test_ctrl_c_while_kernels_are_compiled(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = tiny_model("llama", n_ctx=512, template=template)
    with Screen(tmp_path, "-m", str(path), program=("-m", "edgert"), EDGERT_CACHE=str(tmp_path / "cache")) as screen:
        screen.expect("compiling, the first time only")
        chat = psutil.Process(screen.child.pid)
        while not (compilers := chat.children()):
            screen.pump(0.02)
        screen.type("typed\r" + CTRL_C)
        screen.wait()
        assert screen.child.returncode == 130
        screen.assert_restored()
        assert "Traceback" not in screen.text
        assert screen.text.endswith("\n")
        while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in compilers):
            screen.pump(0.02)
        assert {p.suffix for p in (tmp_path / "cache").rglob("*") if p.is_file()} <= {".lock", ".o", ".json"}
