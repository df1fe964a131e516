"""The command line: verbs, flags and their twins, exit codes, one sentence for each error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake import PATIENCE, soon, wait_for
from index_server import Index, make_wheel, random_bytes, serve

from edgert.cli.progress import ProgressLine, compiling

FAKE = Path(__file__).with_name("fake_model.py")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A home and a store of the test's own, and no flags set by variables."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("EDGERT_", "HF_", "OLLAMA_", "LLAMA_"))}
    return {
        **kept,
        "HOME": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "EDGERT_MODELS": str(tmp_path / "models"),
    }


@pytest.fixture
def edgert(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """edgert(*arguments, program=..., stdin=..., **variables) -> the finished process."""

    def run(*arguments: str, fake: bool = False, stdin: bytes | None = None, **variables: str) -> Any:
        program = [str(FAKE)] if fake else ["-m", "edgert"]
        done = subprocess.run(
            [sys.executable, *program, *arguments],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            env={**environment, **variables},
            timeout=PATIENCE,
        )
        out, err = done.stdout.decode(), done.stderr.decode()
        assert "Traceback" not in err
        return subprocess.CompletedProcess(done.args, done.returncode, out, err)

    return run


# Verbs ----------------------------------------------------------------------------------------------


def test_help(edgert: Any) -> None:
    done = edgert("--help")
    assert done.returncode == 0
    for verb in ("chat", "run", "pull", "ls", "show", "rm"):
        assert f"  {verb} " in done.stdout
        one = edgert(verb, "--help")
        assert one.returncode == 0 and one.stdout.startswith(f"Usage: edgert {verb}")
    assert edgert("--version").stdout.startswith("edgert ")


def test_a_verb_that_is_not_there_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgert import cli

    monkeypatch.setitem(cli.VERBS, "fly", "Leave the ground.")
    verbs = cli.group.list_commands(None)  # type: ignore[arg-type]
    assert "fly" not in verbs and "chat" in verbs


def test_start_is_light() -> None:
    """Neither help nor listing models waits for what only a loaded model needs."""
    code = (
        "import sys; from edgert import cli\n"
        "assert cli.call([{}]) == 0\n"
        "heavy = {{'numpy', 'numba', 'tokenizers', 'jinja2', 'prompt_toolkit', 'rich', 'huggingface_hub'}}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    for arguments in ("'--help'", "'ls'", "'chat', '--help'", "'run', '--help'", "'pull', '--help'"):
        subprocess.run([sys.executable, "-c", code.format(arguments)], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nonsense"], 2, "No such command"),
        (["run", "--nonsense"], 2, "No such option"),
        (["run"], 2, "There is no prompt"),
        (["run", "-p", "x", "--temp", "nan"], 2, "--temp must be a number from 0 to 100"),
        (["run", "-p", "x", "--temp", "hot"], 2, "'--temp': 'hot' is not a number."),
        (["run", "-p", "x", "-c", "1.5"], 2, "'--ctx-size': '1.5' is not an integer."),
        (["run", "-p", "x", "-j", '["a",'], 2, "--json-schema is no JSON: Expecting value"),
        (["run", "-p", "x", "--top-p", "1.5"], 2, "--top-p must be a number from 0 to 1"),
        (["run", "-p", "x", "--top-k", "-3"], 2, "--top-k must be an integer"),
        (["run", "-p", "x", "-n", "-2"], 2, "--n-predict must be an integer"),
        (["run", "-p", "x", "-c", "-1"], 2, "--ctx-size"),
        (["run", "-p", "x", "-c", "99999999999"], 2, "--ctx-size"),
        (["run", "-p", "x", "-t", "many"], 2, "--threads"),
        (["run", "-p", "x", "-t", "0"], 2, "0 is neither -1 (as many as suit this machine) nor a number from 1 on"),
        (["run", "-p", "x", "-t", "-2"], 2, "-2 is neither -1"),
        (["run", "-p", "x", "-s", "-2"], 2, "--seed must be an integer from -1"),
        (["run", "-p", "x", "--temp", "1e999"], 2, "--temp must be a number from 0 to 100"),
        (["run", "-p", "x", "--min-p", "-0.1"], 2, "--min-p must be a number"),
        (["run", "-p", "x", "--repeat-penalty", "0"], 2, "--repeat-penalty must be a number"),
        (["run", "-p", "x", "--repeat-last-n", "-2"], 2, "--repeat-last-n must be an integer"),
        (["run", "-p", "x", "--presence-penalty", "nan"], 2, "--presence-penalty must be a number"),
        (["run", "-p", "x", "--frequency-penalty", "3"], 2, "--frequency-penalty must be a number"),
        (["perplexity", "-f", "{file}", "-c", "-1"], 2, "--ctx-size"),
        (["perplexity", "-f", "{file}", "-t", "0"], 2, "--threads"),
        (["perplexity", "-f", "{file}", "--chunks", "0"], 2, "--chunks"),
        (["show", "-c", "-1"], 2, "--ctx-size"),
        (["run", "-p", "x", "-m", ""], 1, "model: is empty"),
        (["show", ""], 1, "model: is empty"),
        (["bench", "-m", ""], 1, "model: is empty"),
        (["bench", "-m", ",smollm2"], 1, "model: is empty"),
        (["run", "-p", "x", "-m", "/dev/null"], 1, "/dev/null is a device"),
        (["show", "{file}/.."], 1, "There is no file"),
        (["run", "-p", "x", "-f", "no/such/file"], 2, "cannot be read"),
        (["run", "-p", "x", "--chat-template", "@no/such/file", "-m", "{file}"], 2, "cannot be read"),
        (["run", "-p", "x", "-m", "no/such.gguf"], 1, "There is no file 'no/such.gguf'"),
        (["run", "-p", "x", "-m", "smolm2"], 1, "did you mean 'smollm2'?"),
        (["run", "-p", "x", "-m", "{file}"], 1, "is"),
        (["show", "{file}"], 1, "is"),
        (["show", "smollm2"], 1, "edgert pull smollm2"),
        (["pull", "nothing"], 1, "cannot be fetched"),
        (["rm", "nothing"], 1, "No model 'nothing'"),
        (["rm", "../x"], 1, "is not a model name"),
    ],
)
def test_errors_are_one_sentence(edgert: Any, tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    (tmp_path / "text.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    done = edgert(*(a.format(file=tmp_path / "text.gguf") for a in arguments))
    assert done.returncode == code, done.stderr
    assert message in done.stderr and not done.stdout
    if code == 1:
        assert done.stderr.startswith("edgert: ") and done.stderr.count("\n") == 1


def test_an_error_of_our_own_is_told_without_a_traceback(edgert: Any, environment: dict[str, str]) -> None:
    done = edgert("run", "-p", "crash", fake=True)
    assert done.returncode == 1 and "RuntimeError: the engine is gone" in done.stderr
    shown = subprocess.run(
        [sys.executable, FAKE, "run", "-p", "crash"],
        capture_output=True,
        text=True,
        env={**environment, "EDGERT_DEBUG": "1"},
        stdin=subprocess.DEVNULL,
    )
    assert "Traceback" in shown.stderr


def test_listing_and_removing(edgert: Any, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    target = tmp_path / "models" / "mine.gguf"
    target.write_bytes(tiny_model("llama").read_bytes())
    listed = json.loads(edgert("ls", "--json").stdout)
    assert listed["models"] == [
        {"name": "mine", "size": target.stat().st_size, "source": "edgert", "path": str(target)}
    ]
    assert {entry["name"] for entry in listed["available"]} == {"smollm2", "gemma3"}
    table = edgert("ls").stdout
    assert "mine" in table and "edgert pull smollm2" in table
    assert json.loads(edgert("rm", "mine", "--json").stdout) == {"removed": "mine", "path": str(target)}
    assert not target.exists()


def test_show(edgert: Any, tiny_model: Callable[..., Path]) -> None:
    from edgert.quantize.architecture import describe
    from edgert.quantize.gguf_file import GGUFFile

    path = tiny_model("llama")
    facts = json.loads(edgert("show", str(path), "-c", "100", "--json").stdout)
    with GGUFFile.open(path) as file:
        architecture = describe(file)
        n_bytes = sum(t.n_bytes for t in file.tensors.values())
        n_weights = sum(t.n_rows * t.n_cols for t in file.tensors.values())
    assert facts["runs_here"] and facts["architecture"] == "llama"
    assert facts["parameters"] == n_weights == sum(row["parameters"] for row in facts["tensor_types"])
    assert facts["bits_per_weight"] == pytest.approx(8 * n_bytes / n_weights, abs=1e-3)
    assert sum(row["bytes"] for row in facts["tensor_types"]) == facts["memory"]["weights"] == n_bytes
    per_token = 2 * architecture.n_layer * architecture.n_head_kv * architecture.head_dim * 34 // 32  # q8_0
    assert facts["memory"]["kv_per_token"] == per_token and facts["memory"]["kv"] == 112 * per_token
    assert facts["memory"]["n_ctx"] == 100
    text = edgert("show", str(path)).stdout
    assert "bits per weight" in text and "cache" in text
    cost = facts["memory"]
    assert cost["total"] == cost["weights"] + cost["kv"] + cost["buffers"] + cost["program"]
    whole = json.loads(edgert("show", str(path), "-c", "0", "--json").stdout)
    assert whole["memory"]["n_ctx"] == architecture.n_ctx_train


def test_show_real(edgert: Any, smollm2_path: Path) -> None:
    facts = json.loads(edgert("show", str(smollm2_path), "--json").stdout)
    types = {row["type"]: row for row in facts["tensor_types"]}
    assert types["Q4_1"]["tensors"] == 210 and types["Q4_1"]["bits_per_weight"] == 5.0
    assert facts["sizes"]["n_ctx_train"] == 8192 and facts["memory"]["kv_per_token"] == 12240
    template = edgert("show", str(smollm2_path), "--template").stdout
    assert template.rstrip("\n") == facts["chat_template"] and "<|im_start|>" in template


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupted_pull(environment: dict[str, str], tmp_path: Path) -> None:
    index = Index(bytes_per_second=20_000)
    wheel = make_wheel({"m.gguf": b"GGUF" + random_bytes(1_000_000)})
    index.add("my-model", "my_model-1.0-py3-none-any.whl", wheel)
    server = serve(index)
    try:
        variables = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.simple}
        command = [sys.executable, "-m", "edgert", "pull", "pypi:my-model"]
        with subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            env={**environment, **variables},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        ) as child:
            wait_for(lambda: any(p.stat().st_size for p in (tmp_path / "models" / ".partial").glob("*.part")))
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=PATIENCE)
        assert child.returncode == 130 and err.endswith(b"Stopped; the same command goes on from here.\n")
        assert [p for p in (tmp_path / "models" / ".partial").glob("*.part") if p.stat().st_size]
        assert not list((tmp_path / "models").glob("*.gguf"))
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("line", ["pull hf:no/such", "run -m hf:no/such -p x", "pull smollm2"])
def test_without_a_network(edgert: Any, line: str) -> None:
    """One sentence within seconds, whoever is asked, and no words of the libraries below."""
    nowhere = "http://127.0.0.1:9"
    variables = {"HF_ENDPOINT": nowhere, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{nowhere}/simple"}
    tried: list[Any] = []
    assert soon(20, lambda: tried.append(edgert(*line.split(), **variables)), tries=3)
    done = tried[-1]
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line != "looking it up in the package index"]
    assert len(lines) == 1 and "could not be looked up" in lines[0] and "check the connection" in lines[0]


def test_a_repository_that_is_not_there(edgert: Any) -> None:
    index = Index()
    server = serve(index)
    try:
        done = edgert("pull", "hf:no/such", HF_ENDPOINT=index.url)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 1
    assert done.stderr == (
        "edgert: hf:no/such is not there, or is private: check the name, or log in with `hf auth login`.\n"
    )


# run ------------------------------------------------------------------------------------------------


def test_run_answers(edgert: Any) -> None:
    done = edgert("run", "-p", "hello", fake=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "you said 'hello'\n", "")


def test_run_reads_standard_input(edgert: Any, tmp_path: Path) -> None:
    assert edgert("run", fake=True, stdin=b"one\ntwo").stdout == "you said 'one\\ntwo'\n"
    done = edgert("run", "-p", "sum up", fake=True, stdin="Größe".encode())
    assert done.stdout == "you said 'sum up\\n\\nGröße'\n"
    (tmp_path / "f.txt").write_text("from a file")
    assert edgert("run", "-f", str(tmp_path / "f.txt"), fake=True).stdout == "you said 'from a file'\n"
    assert edgert("run", "-f", "-", fake=True, stdin=b"dash").stdout == "you said 'dash'\n"
    assert edgert("run", "-p", "", fake=True, stdin=b"piped").stdout == "you said 'piped'\n"
    assert edgert("run", fake=True, stdin=b"").returncode == 2


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_message_is_refused_and_an_empty_text_continued(edgert: Any, prompt: str) -> None:
    done = edgert("run", "-p", prompt, fake=True)
    assert (done.returncode, done.stdout) == (2, "") and "The prompt is empty" in done.stderr
    assert edgert("run", "--raw", "-p", prompt, fake=True).stdout == f"|{prompt}|\n"


def test_run_json(edgert: Any) -> None:
    facts = json.loads(edgert("run", "-p", "hello", "--json", fake=True).stdout)
    assert facts["text"] == "you said 'hello'" and facts["tokens"] == [1, 2]
    assert facts["finish_reason"] == "stop"
    assert set(facts["timings"]) == {
        "cache_n",
        "prompt_n",
        "prompt_ms",
        "prompt_per_second",
        "predicted_n",
        "predicted_ms",
        "predicted_per_second",
        "draft_n",
        "draft_n_accepted",
        "draft_positions",
    }


def test_run_without_chat(edgert: Any) -> None:
    assert edgert("run", "--no-chat", "-p", "once", fake=True).stdout == "|once|\n"
    assert edgert("run", "--raw", "-p", "once", fake=True).stdout == "|once|\n"
    assert edgert("run", "-m", "bare", "-p", "once", fake=True).stdout == "|once|\n"
    assert edgert("run", "-m", "bare", "-p", "once", "-sys", "be", fake=True).returncode == 2


FLAGS = {
    "--temp": ("temperature", "0.5", 0.5),
    "--top-k": ("top_k", "7", 7),
    "--top-p": ("top_p", "0.25", 0.25),
    "--min-p": ("min_p", "0.125", 0.125),
    "--repeat-penalty": ("repeat_penalty", "1.5", 1.5),
    "--repeat-last-n": ("repeat_last_n", "-1", -1),
    "--presence-penalty": ("presence_penalty", "0.5", 0.5),
    "--frequency-penalty": ("frequency_penalty", "-0.5", -0.5),
    "--seed": ("seed", "42", 42),
    "--n-predict": ("max_tokens", "5", 5),
}


def test_flags_and_their_twins(edgert: Any) -> None:
    wanted = {field: value for field, _, value in FLAGS.values()}
    flags = [word for flag, (_, text, _) in FLAGS.items() for word in (flag, text)]
    twins = {"EDGERT_" + flag[2:].upper().replace("-", "_"): text for flag, (_, text, _) in FLAGS.items()}
    others = dict.fromkeys(twins, "1")
    assert json.loads(edgert("run", "-p", "params", *flags, fake=True).stdout) == wanted
    assert json.loads(edgert("run", "-p", "params", fake=True, **twins).stdout) == wanted
    assert json.loads(edgert("run", "-p", "params", *flags, fake=True, **others).stdout) == wanted
    assert json.loads(edgert("run", "-p", "params", fake=True).stdout) == {}


def test_flags_of_the_model(edgert: Any, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ x }}")
    done = edgert(
        *("run", "-v", "-p", "x", "-c", "512", "-t", "3", "--backend", "llama", "-ngl", "-1", "--device", "CUDA0"),
        *("--require", "--chat-template", f"@{tmp_path / 't.jinja'}"),
        fake=True,
    )
    options = json.loads(done.stderr[done.stderr.index("{") : done.stderr.rindex("}") + 1])
    loaded = {"backend": "llama", "n_gpu_layers": -1, "device": "CUDA0", "require": True}
    assert options == {**loaded, "chat_template": "{{ x }}", "n_ctx": 512, "n_threads": 3}
    twins = {"EDGERT_CTX_SIZE": "512", "EDGERT_THREADS": "3", "EDGERT_BACKEND": "llama", "EDGERT_VERBOSE": "1"}
    twins |= {"EDGERT_N_GPU_LAYERS": "-1", "EDGERT_DEVICE": "CUDA0", "EDGERT_REQUIRE": "1"}
    done = edgert("run", "-p", "x", "--chat-template", "{{ x }}", fake=True, **twins)
    assert json.loads(done.stderr[done.stderr.index("{") : done.stderr.rindex("}") + 1]) == options


def test_warnings_are_sentences(edgert: Any) -> None:
    """Each is said once, whoever has cause to."""
    assert edgert("run", "-m", "warns", "-p", "x", fake=True).stderr == "edgert: warns has no template\n"


def test_compiling_is_told_once_where_no_bar_is_seen(edgert: Any) -> None:
    done = edgert("run", "-m", "fresh", "-p", "x", fake=True)
    assert done.stderr == "compiling kernels for this processor, the first time only: about 10 seconds\n"


def test_a_dumb_terminal_gets_sentences(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    with ProgressLine() as line:
        compiling(line)(1, 2)
    err = capsys.readouterr().err
    assert err.startswith("compiling kernels") and "\x1b" not in err


@pytest.mark.parametrize("terminal", [False, True])
def test_a_kernel_that_a_step_needs_is_not_announced_in_an_answer(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressLine() as line:
        progress = compiling(line)
        progress(1, 2)
    assert "compiling" in capsys.readouterr().err
    progress(1, 1)
    assert capsys.readouterr().err == ""


def test_stop_texts(edgert: Any) -> None:
    done = edgert("run", "-p", "params", "--stop", "a", "--stop", "b", fake=True)
    assert json.loads(done.stdout) == {"stop": ["a", "b"]}


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupted_run(environment: dict[str, str]) -> None:
    command = [sys.executable, FAKE, "run", "-p", "count"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as child:
        assert child.stdout and child.stderr
        assert child.stdout.read(6) == b"0 1 2 "
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130 and err == b"" and out.endswith(b"\n") and len(out) < 5000  # of 8,890


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupted_before_it_began(environment: dict[str, str], tmp_path: Path) -> None:
    """While what the command line needs is imported."""
    (tmp_path / "click.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(30)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [environment.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, "-m", "edgert", "ls"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environment, "PYTHONPATH": path},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    ) as child:
        assert child.stdout and child.stdout.readline() == b"importing\n"
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=PATIENCE)[1] == b"" and child.returncode == -signal.SIGINT


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_reader_that_left(environment: dict[str, str]) -> None:
    command = [sys.executable, FAKE, "run", "-p", "count"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as child:
        assert child.stdout and child.stderr
        child.stdout.read(6)
        child.stdout.close()
        start = time.monotonic()
        child.wait(PATIENCE)
        assert child.stderr.read() == b"" and child.returncode == 141
        assert time.monotonic() - start < 30  # the whole answer takes 40 s


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell's redirections")
@pytest.mark.parametrize(
    ("arguments", "code", "out"),
    [
        ("run -p hello <&-", 0, "you said 'hello'\n"),
        ("run <&-", 2, ""),
        ("chat <&-", 2, ""),
        ("run -p hello >&-", 0, ""),
        ("ls >&-", 0, ""),
        ("run -p hello 2>&-", 0, "you said 'hello'\n"),
        ("show nothing 2>&-", 1, ""),
        ("run -p hello <&- >&- 2>&-", 0, ""),
    ],
)
def test_closed_standard_streams(environment: dict[str, str], arguments: str, code: int, out: str) -> None:
    command = ["sh", "-c", f"exec {sys.executable} {FAKE} {arguments}"]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env=environment, timeout=PATIENCE)
    assert (done.returncode, done.stdout.decode()) == (code, out)
    assert b"an error of its own" not in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("buffered", ["", "1"])
def test_output_that_cannot_be_written(environment: dict[str, str], buffered: str) -> None:
    variables = {**environment, "PYTHONUNBUFFERED": buffered}
    with open("/dev/full", "w") as full:
        command = [sys.executable, FAKE, "run", "-p", "hello"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, env=variables)
    assert done.returncode == 1
    assert done.stderr.startswith(b"edgert: The system refused") and done.stderr.count(b"\n") == 1


# Text ---


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "message"),
    [
        (["run"], b"gbk \xc4\xe3", 1, "Standard input is not UTF-8 at byte 4"),
        (["run", "-f", "{file}"], None, 1, "text is not UTF-8 at byte 2"),
        (["run", "-p", b"caf\xe9"], None, 2, "it is not UTF-8 at byte 3"),
        (["run", "-p", "x", "-sys", b"\xff"], None, 2, "it is not UTF-8 at byte 0"),
        (["run", "-p", "x", "--stop", b"\xff"], None, 2, "it is not UTF-8 at byte 0"),
        (["run", "-p", "x", "--chat-template", "@{file}"], None, 1, "text is not UTF-8 at byte 2"),
        (["chat"], b"\xff\xfe!\0", 1, "Standard input is UTF-16"),
        (["perplexity", "-m", "smollm2", "-f", "{file}"], None, 1, "text is not UTF-8 at byte 2"),
    ],
)
def test_bytes_that_are_not_text(
    edgert: Any, tmp_path: Path, arguments: list[str | bytes], stdin: bytes | None, code: int, message: str
) -> None:
    """One policy: refused, the place named."""
    (tmp_path / "text").write_bytes(b"ab\xe9")
    filled = [a.format(file=tmp_path / "text") if isinstance(a, str) else os.fsdecode(a) for a in arguments]
    done = edgert(*filled, fake=True, stdin=stdin)
    assert done.returncode == code and message in done.stderr and not done.stdout


def test_a_byte_order_mark_is_no_part_of_a_text(edgert: Any, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfGr\xc3\xbc\xc3\x9fe\xef\xbb\xbf")
    told = "you said 'Grüße\\ufeff'\n"
    assert edgert("run", "-f", str(tmp_path / "text"), fake=True).stdout == told
    assert edgert("run", fake=True, stdin=(tmp_path / "text").read_bytes()).stdout == told


@pytest.mark.skipif(sys.platform == "win32", reason="locales")
@pytest.mark.parametrize("mode", ["0", "1"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_text_is_utf8_without_a_locale(edgert: Any, locale: str, mode: str) -> None:
    done = edgert("run", "-p", "Größe 你好 🙂", fake=True, LC_ALL=locale, PYTHONUTF8=mode)
    assert done.stdout == "you said 'Größe 你好 🙂'\n"
    told = edgert("run", "-p", "params", "--stop", "é", "--temp", "0", fake=True, LC_ALL=locale, PYTHONUTF8=mode)
    assert json.loads(told.stdout) == {"temperature": 0.0, "stop": ["é"]}


# chat without a terminal ----------------------------------------------------------------------------


def test_piped_chat_is_one_message(edgert: Any) -> None:
    done = edgert("chat", fake=True, stdin="first line\nsecond 你好".encode())
    assert (done.returncode, done.stdout, done.stderr) == (0, "you said 'first line\\nsecond 你好'\n", "")


def test_piped_chat_that_goes_wrong(edgert: Any) -> None:
    empty = edgert("chat", fake=True, stdin=b" \n")
    assert empty.returncode == 2 and "empty" in empty.stderr
    full = edgert("chat", fake=True, stdin=b"full")
    assert full.returncode == 1 and "5000 tokens" in full.stderr and not full.stdout
    bare = edgert("chat", "-m", "bare", fake=True, stdin=b"x")
    assert bare.returncode == 1 and "no chat template" in bare.stderr
