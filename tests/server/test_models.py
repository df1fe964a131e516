"""Several models: loaded on demand, put away, exchanged while they answer, rolled back; configuration; edgert top."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner
from fake import PATIENCE, backend_of, fake_model, hashed, says
from harness import Server, open_stream, serving, serving_model, wait_for
from shelf import Shelf, names, text

from edgert import cli
from edgert.cli.verbs import top
from edgert.cli.verbs.serve import _configured, settings_of
from edgert.cli.verbs.serve import command as serve_command
from edgert.errors import EdgertError, ModelFileError, RequestError
from edgert.server import app, config, registry
from edgert.server.registry import FOREVER, Registry, Spec, duration
from edgert.server.service import Settings

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def test_models_are_loaded_when_asked_for(shelf: Shelf) -> None:
    with serving([Spec(name, name) for name in "abc"], shelf) as server:
        assert names(server) == ["a"]
        assert text(server, "c") == "I am c"
        assert text(server) == "I am a"
        assert names(server) == ["a", "c"]
        assert shelf.loads == ["a", "c"]
        states = {model["id"]: model["meta"]["state"] for model in server.get("/v1/models")[1]["data"]}
        assert states == {"a": "loaded", "b": "unloaded", "c": "loaded"}
    assert all(model.backend.closed for model in shelf.models)  # type: ignore[attr-defined]


def test_at_once_asked_for_it_is_loaded_once(shelf: Shelf) -> None:
    with serving([Spec("a", "a"), Spec("b", "b")], shelf) as server:
        threads = [threading.Thread(target=text, args=(server, "b")) for _ in range(8)]
        [thread.start() for thread in threads]  # type: ignore[func-returns-value]
        [thread.join() for thread in threads]  # type: ignore[func-returns-value]
        assert shelf.loads == ["a", "b"]


@pytest.mark.parametrize("by", ["count", "memory"])
def test_the_longest_idle_one_makes_room(shelf: Shelf, by: str) -> None:
    shelf.most = 2 if by == "memory" else 99
    with serving([Spec(name, name) for name in "abc"], shelf, models_max=2 if by == "count" else 0) as server:
        text(server, "b")
        text(server, "a")
        text(server, "c")
        assert names(server) == ["a", "c"]
        assert text(server, "b") == "I am b"
        assert names(server) == ["b", "c"]


def test_an_idle_model_is_put_away(shelf: Shelf) -> None:
    with serving([Spec("a", "a"), Spec("b", "b", keep_alive=0.1)], shelf) as server:
        text(server, "b")
        wait_for(lambda: names(server) == ["a"])
        text(server, "b", keep_alive=-1)
        time.sleep(1.3)
        assert names(server) == ["a", "b"]
        text(server, "b", keep_alive=0)
        wait_for(lambda: names(server) == ["a"])


def test_health_tells_of_a_load_and_of_one_that_failed(shelf: Shelf) -> None:
    hold, begun = threading.Event(), threading.Event()

    def load(source: Any, **options: Any) -> Any:
        if shelf.loads:
            begun.set()
            hold.wait(PATIENCE)
        return shelf(source, **options)

    with serving([Spec("a", "a")], load) as server, ThreadPoolExecutor() as pool:
        text(server, keep_alive=0)
        wait_for(lambda: not names(server))
        assert server.get("/health")[0] == 200  # it comes when asked for
        waiting = pool.submit(server.post, CHAT, {"messages": HI})
        assert begun.wait(PATIENCE)
        for path in ("/health", "/v1/health"):
            status, headers, data = server.raw("GET", path)
            assert (status, json.loads(data)["error"]["code"]) == (503, "loading")
            assert int(headers["retry-after"]) >= 1
        shelf.broken["a"] = ModelFileError("a is damaged.")
        hold.set()
        assert waiting.result(PATIENCE)[0] == 500
        assert server.get("/health")[1]["error"]["code"] == "failed"
        del shelf.broken["a"]
        assert text(server) == "I am a"
        assert server.get("/health")[0] == 200


def test_memory_of_models_that_went_is_given_back(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc would keep what a thread had loaded, some tens of megabytes with every exchange."""
    trims: list[list[bool]] = []

    def trim() -> None:
        trims.append([backend_of(model).closed for model in shelf.models])

    monkeypatch.setattr(registry, "give_back", trim)
    monkeypatch.setattr(app, "SWEEP_SECONDS", 0.05)
    with serving([Spec("a", "a")], shelf) as server:
        assert server.post("/v1/models/a/reload", {})[0] == 200
        wait_for(lambda: trims)
        assert trims == [[True, False]]
        server.service.registry.sweep()  # there is nothing to give back
        assert server.post("/v1/models/a/reload", {})[0] == 200
        wait_for(lambda: len(trims) > 1)
        assert trims[1:] == [[True, True, False]]
    monkeypatch.undo()
    registry.give_back()


def test_a_model_that_cannot_be_loaded(shelf: Shelf) -> None:
    shelf.broken["b"] = ModelFileError("b is damaged.")
    with serving([Spec("a", "a"), Spec("b", "b")], shelf) as server:
        assert server.fails(CHAT, 500, messages=HI, model="b")["message"] == "b is damaged."
        assert text(server, "a") == "I am a"
        del shelf.broken["b"]
        assert text(server, "b") == "I am b"


def test_the_first_model_must_load(shelf: Shelf) -> None:
    shelf.broken["a"] = ModelFileError("a is damaged.")
    with pytest.raises(AssertionError, match="damaged"), serving([Spec("a", "a")], shelf):
        pass


def test_a_file_is_exchanged_under_load(shelf: Shelf) -> None:
    with serving([Spec("a", "a", {"delay": 0.002})], shelf) as server:
        texts: list[str] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                texts.append(text(server, "a"))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        [thread.start() for thread in threads]  # type: ignore[func-returns-value]
        wait_for(lambda: len(texts) > 8)
        shelf.broken["a"] = says("I am new")
        assert server.ok("/v1/models/a/reload")["id"] == "a"
        before = len(texts)
        wait_for(lambda: len(texts) > before + 8)
        stop.set()
        [thread.join() for thread in threads]  # type: ignore[func-returns-value]
        assert set(texts) == {"I am a", "I am new"}
        assert text(server, "a") == "I am new"
        wait_for(lambda: shelf.models[0].backend.closed)  # type: ignore[attr-defined]
        assert not shelf.models[1].backend.closed  # type: ignore[attr-defined]


def nan(tokens: list[int]) -> int:
    raise EdgertError("Its output is not finite.")


def restless(_: list[int], state: list[int] = [0]) -> int:  # noqa: B006
    state[0] += 1
    return ord("a") + state[0] % 26


@pytest.mark.parametrize(
    "problem", [ModelFileError("It is cut short."), nan, restless], ids=["file", "output", "moody"]
)
def test_a_bad_exchange_is_rolled_back(shelf: Shelf, problem: Any) -> None:
    with serving([Spec("a", "a")], shelf) as server:
        shelf.broken["a"] = problem
        status, answer = server.post("/v1/models/a/reload", {})
        assert status == 409
        assert "the one in memory stays" in answer["error"]["message"]
        assert text(server, "a") == "I am a"
        assert not shelf.models[0].backend.closed  # type: ignore[attr-defined]
        assert all(model.backend.closed for model in shelf.models[1:])  # type: ignore[attr-defined]
        assert server.get("/health")[0] == 200


def test_an_exchange_waits_for_a_load_whose_caller_has_left(shelf: Shelf) -> None:
    """Else two models would have one place, and the first of them would never be closed."""
    hold, begun = threading.Event(), threading.Event()

    def load(source: Any, **options: Any) -> Any:
        if source == "b" and not begun.is_set():
            begun.set()
            hold.wait(PATIENCE)
        return shelf(source, **options)

    with serving([Spec("a", "a"), Spec("b", "b")], load) as server, ThreadPoolExecutor() as pool:
        connection = open_stream(server, model="b")
        wait_for(begun.is_set)
        connection.close()
        wait_for(lambda: not server.service.admission.inside)
        exchange = pool.submit(server.post, "/v1/models/b/reload", {})
        wait_for(server.service.registry.places["b"].lock.locked)
        hold.set()
        assert exchange.result(PATIENCE)[0] == 200
        assert shelf.loads == ["a", "b", "b"]
        wait_for(lambda: [backend_of(model).closed for model in shelf.models] == [False, True, False])
        assert text(server, "b") == "I am b"
    assert all(backend_of(model).closed for model in shelf.models)


@pytest.mark.parametrize("by", ["count", "memory"])
def test_an_exchange_of_what_is_not_in_memory_makes_room_as_others_do(shelf: Shelf, by: str) -> None:
    shelf.most = 1 if by == "memory" else 99
    specs = [Spec("a", "a"), Spec("b", "b")]
    with serving(specs, shelf, models_max=1 if by == "count" else 0) as server:
        assert server.post("/v1/models/b/reload", {})[0] == 200
        assert names(server) == ["b"]
        shelf.broken["a"] = nan
        assert server.post("/v1/models/a/reload", {})[0] == 409
        del shelf.broken["a"]
        assert text(server, "a") == "I am a"  # what failed holds no room
        assert names(server) == ["a"]


def test_reloading_what_is_not_there(server: Server) -> None:
    assert server.post("/v1/models/gone/reload", {})[0] == 404


@pytest.mark.parametrize(
    "given, seconds",
    [(5, 5), ("5m", 300), ("1h30m", 5400), ("250ms", 0.25), (-1, FOREVER), ("-1", FOREVER), ("-5m", FOREVER), ("0", 0)],
)
def test_durations(given: Any, seconds: float) -> None:
    assert duration(given) == seconds


@pytest.mark.parametrize("given", ["", "soon", "5 m", "5mm", None, True, "m5", "nan", "-nan", math.nan])
def test_no_durations(given: Any) -> None:
    with pytest.raises(RequestError):
        duration(given)


# Configuration


def test_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "edgert.toml"
    path.write_text(
        'host = "127.0.0.1"\nport = 0\nqueue = 7\n'
        '[models.small]\nmodel = "smollm2"\naliases = ["s"]\nkeep-alive = "5m"\n'
        "ctx-size = 512\nsampling = {temperature = 0.0}\n[models.gemma3]\n"
    )
    flags, models, choices = config.read(path)
    assert choices == {}
    assert flags == {"host": "127.0.0.1", "port": 0, "queue": 7}
    small, gemma = config.specs(models, "edgert.toml")
    assert (small.name, small.source, small.aliases, small.keep_alive) == ("small", "smollm2", ("s",), 300)
    assert small.options == {"n_ctx": 512, "sampling": {"temperature": 0.0}}
    assert (gemma.name, gemma.source, gemma.options, gemma.keep_alive) == ("gemma3", "gemma3", {}, FOREVER)


def test_files_of_windows_editors(tmp_path: Path) -> None:
    """They begin with a byte order mark, which is no part of a flag or a key."""
    (tmp_path / "edgert.toml").write_text("\ufeffqueue = 7\n", "utf-8")
    assert config.read(tmp_path / "edgert.toml")[0] == {"queue": 7}
    (tmp_path / "keys").write_text("\ufeffone\n\ntwo\n", "utf-8")
    others = dict.fromkeys(("is_open", "cors_origin", "max_body", "timeout", "queue_timeout"))
    file = str(tmp_path / "keys")
    flags = {"api_key": ["three"], "api_key_file": file, "host": "127.0.0.1", "allowed_host": [], **others}
    assert settings_of(flags)["api_keys"] == ("three", "one", "two")


@pytest.mark.parametrize(
    "content, said",
    [
        ("x = ", "not TOML"),
        ("colour = 1", "colour is no flag"),
        ("paralel = 1", "did you mean parallel?"),
        ("opn = true", "did you mean open?"),
        ("[models.a]\ncolour = 1", "models.a.colour"),
        ("models = 5", "models must be tables such as [models.NAME], not 5."),
        ('[models.a]\nkeep-alive = "soon"', "models.a.keep-alive must be"),
        ('[models.a]\nctx-size = "x"', "models.a.ctx-size must be an integer, not 'x'"),
        ("[models.a]\nctx-size = true", "models.a.ctx-size must be an integer, not True"),
        (f'[models.a]\nctx-size = "{"x" * 99}"', "models.a.ctx-size must be an integer, not 'xxxxx"),
        ("[models.a]\nctx-size = -5", "models.a.ctx-size is refused: -5 is not in the range"),
        ("[models.a]\nthreads = 0", "models.a.threads is refused: 0 is"),
        ('[models.a]\nwindow = "x"', "models.a.window must be a number"),
        ("[models.a]\nprefix-quota = -1", "models.a.prefix-quota must be an integer from 0"),
        ('[models.a]\nprefix-cache = "all"', "models.a.prefix-cache must be one of shared, user, off, not 'all'."),
        ('[models.a]\nspec-type = "x"', "models.a.spec-type must be one of"),
        ("[models.a]\nspec-max = 100", "models.a.spec-max must be an integer from 1 to"),
        ("[models.a]\nsampling = 5", "models.a.sampling must be an object, which gives names values, not 5."),
        (
            '[models.a]\nsampling = {temperature = "hot"}',
            "models.a.sampling.temperature must be a number from 0 to 100, not 'hot'.",
        ),
        ("[models.a]\nsampling = {heat = 1}", "models.a.sampling.heat is not a parameter"),
        ('[models.a]\naliases = "abc"', "models.a.aliases must be a list of texts"),
        ("[models.a]\nmodel = 5", "models.a.model must be a text, not 5"),
        ("[models.a]\nrpc = 5", "models.a.rpc must be a list or a text"),
        ('port = "x"', "port must be an integer, not 'x'"),
        ("queue = 1.5", "queue must be an integer, not 1.5"),
        ("verbose = 3", "verbose must be true or false, not 3"),
        ("host = 5", "host must be a text, not 5"),
        ("api-key = [5]", "api-key must be a text, not 5"),
        ("keep-alive = false", "keep-alive must be a number or a text"),
        ("choice = [1]", "choice must be tables such as [choice.NAME], not [1]."),
        ('[choice.auto]\nsmall = "a"', "choice.auto.large is missing."),
        ('[choice.auto]\nsmall = "a"\nlarge = "b"\nsure = "x"', "choice.auto.sure must be a number, not 'x'."),
        (
            '[choice.auto]\nsmall = "a"\nlarge = "b"\nsure = 2.5',
            "choice.auto.sure must be a number from 0 to 1, not 2.5.",
        ),
        ('[choice.auto]\nsmall = "a"\nlarge = "b"\ntokens = 1.5', "choice.auto.tokens must be an integer, not 1.5."),
        ('[choice.auto]\nsmall = 5\nlarge = "b"', "choice.auto.small must be a text, not 5."),
        ('[choice.auto]\nsmall = "a"\nlarge = "b"\nbig = 5', "choice.auto.big is not known; known are name, small"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "edgert.toml"
    path.write_text(content)
    result = CliRunner().invoke(serve_command, ["--config", str(path)])
    assert result.exit_code != 0
    assert said in result.output.replace("\n", " ") or said in str(result.exception)


def test_one_text_stands_for_a_list_of_them(tmp_path: Path) -> None:
    path = tmp_path / "edgert.toml"
    path.write_text('api-key = "one"\nalias = ["a", "b"]\nkeep-alive = 300\n')
    context = click.Context(serve_command)
    with context:
        _configured(context, str(path))
    assert context.default_map == {"api_key": ["one"], "alias": ["a", "b"], "keep_alive": 300}


def test_a_value_that_only_the_load_refuses_is_called_what_the_file_calls_it() -> None:
    def load(source: str, **options: Any) -> Any:
        raise RequestError("cache_type_k", "is one of f16, q8_0, q4_0, not 'q9'")

    spec = Spec("a", "a", {"cache_type_k": "q9"}, keys={"cache_type_k": "edgert.toml: models.a.cache-type-k"})

    async def ask() -> None:
        async with Registry([spec], load).use("a"):
            pass

    with pytest.raises(EdgertError, match=r"edgert.toml: models.a.cache-type-k is one of f16") as found:
        asyncio.run(ask())
    assert not isinstance(found.value, RequestError)  # which would be the fault of whoever asked


@pytest.mark.parametrize("content", [b"GGUF\x03\xc3 = 5", b"queue = 7 # \xff"])
def test_a_configuration_that_is_no_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "edgert.toml").write_bytes(content)
    with pytest.raises(EdgertError, match=r"edgert\.toml is no text in UTF-8, from byte \d+ on"):
        config.read(tmp_path / "edgert.toml")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "192.168.1.5"], "--api-key"),
        (["--port", "70000"], "--port"),
        (["-np", "0"], "--parallel"),
        (["--timeout", "nan"], "--timeout"),
        (["--queue-timeout", "inf"], "--queue-timeout"),
    ],
)
def test_flags_that_are_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(serve_command, arguments)
    assert result.exit_code == 2
    assert said in result.output


# edgert top


def test_top_by_its_command() -> None:
    with serving_model(fake_model(hashed, n_ctx=512)) as server:
        for _ in range(3):
            server.events(CHAT, messages=HI, max_tokens=20)
        wait_for(lambda: not server.service.admission.inside)  # a client has its answer a moment before
        result = CliRunner().invoke(cli.group, ["top", server.url, "--once", "--json"])
        assert result.exit_code == 0, result.output
        table = json.loads(result.output)
        assert table["models"] == ["fake"]
        assert table["inside"] == 0
        assert table["first_token_p50_ms"] > 0
        assert table["between_p50_ms"] <= table["between_p99_ms"]
        assert 0 < table["cache_hits"] < 1
        assert table["memory_bytes"] > 1e7
        shown = CliRunner().invoke(cli.group, ["top", server.url, "--once"])
        assert "first token" in shown.output
        assert "fake" in shown.output


def test_top_brings_a_key() -> None:
    settings = Settings(api_keys=("secret",))
    with serving_model(fake_model(hashed, n_ctx=512), settings=settings) as server:
        refused = CliRunner().invoke(cli.group, ["top", server.url, "--once", "--json"])
        assert refused.exit_code == 1
        assert "give its --api-key" in str(refused.exception)
        for given in ({"args": ["--api-key", "secret"]}, {"args": [], "env": {"EDGERT_API_KEY": "secret"}}):
            command = ["top", server.url, "--once", "--json", *given["args"]]
            shown = CliRunner().invoke(cli.group, command, env=given.get("env"))  # type: ignore[arg-type]
            assert json.loads(shown.output)["inside"] == 0, shown.output


def test_top_shows_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an NVML of two GPUs; the second does not tell its load."""

    def load(handle: int) -> Any:
        if handle:
            raise RuntimeError("not supported")
        return SimpleNamespace(gpu=37)

    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetMemoryInfo=lambda i: SimpleNamespace(total=100 << 30, free=(60 + i) << 30),
        nvmlDeviceGetUtilizationRates=load,
        nvmlDeviceGetName=lambda i: f"NVIDIA H{i}00",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with serving_model(fake_model(hashed, n_ctx=512)) as server:
        assert server.ok("/v1/completions", prompt="x", max_tokens=2)
        result = CliRunner().invoke(cli.group, ["top", server.url, "--once", "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.output)["gpus"][:2] == [
            {"name": "NVIDIA H000", "percent": 37.0, "memory_used_bytes": 40 << 30},
            {"name": "NVIDIA H100", "percent": None, "memory_used_bytes": 39 << 30},
        ]
        shown = CliRunner().invoke(cli.group, ["top", server.url, "--once"]).output
        assert "37 % 42.9 GB, 41.9 GB" in shown


def test_top_without_a_server() -> None:
    assert cli.call(["top", "127.0.0.1:1", "--once"]) == 1


def test_percentiles() -> None:
    buckets = [("0.1", 10.0), ("0.2", 30.0), ("+Inf", 40.0)]
    found = {"x_bucket": [({"le": edge}, count) for edge, count in buckets]}
    assert top.percentile(found, None, "x", 0.5) == pytest.approx(0.15)
    assert top.percentile(found, None, "x", 0.99) == pytest.approx(0.2)
    assert top.percentile(found, found, "x", 0.5) is None
    assert top.percentile({}, None, "x", 0.5) is None
