"""Flags that several verbs share: llama.cpp's names, each with a twin EDGERT_*."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from edgert.cli.text import text_of

F = TypeVar("F", bound=Callable[..., Any])

CONTEXT = click.IntRange(0, 2**31 - 1)  # the type of -c: positions, or 0 for the model's


class Finite(click.FloatRange):
    """A number in a range; NaN, which compares with no bound, and infinity are in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Raises: click.BadParameter."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no finite number.", param, ctx)
        return found


# Flag of the command line -> field of SamplingParams or Options.
FIELDS = {
    "n_predict": "max_tokens",
    "seed": "seed",
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repeat_penalty",
    "repeat_last_n": "repeat_last_n",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "grammar": "grammar",
    "json_schema": "json_schema",
}


# Flag of the command line -> argument of `edgert.load`, where the names differ.
LOADING = {"model_draft": "draft", "spec_type": "spec", "ctx_size": "n_ctx", "threads": "n_threads"}


def flag(*names: str, **attributes: Any) -> Callable[[F], F]:
    """A click option whose environment twin is made from its long name."""
    long = next(name for name in names if name.startswith("--"))
    attributes.setdefault("envvar", "EDGERT_" + long.partition("/")[0][2:].upper().replace("-", "_"))
    return click.option(*names, **attributes)


def _stack(function: F, decorators: list[Callable[[F], F]]) -> F:
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


class Parts(click.ParamType):
    """Values of a type between commas."""

    def __init__(self, type_: click.ParamType, name: str) -> None:
        self._type, self.name = type_, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """Raises: click.UsageError for what the type refuses."""
        parts = value if isinstance(value, list | tuple) else str(value).split(",")
        return tuple(self._type(part, param, ctx) for part in parts)


class Several(click.ParamType):
    """Values of a type between commas, each once."""

    def __init__(self, type_: click.ParamType) -> None:
        self._type = type_
        self.name = f"{'N' if isinstance(type_, click.types.IntParamType) else type_.name},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        """Raises: click.UsageError for a value that the type refuses."""
        if isinstance(value, list):
            return value
        return list(dict.fromkeys(self._type.convert(part, param, ctx) for part in value.split(",")))


def backend_flags(function: F) -> F:
    """Which engine runs the model, and on what."""
    return _stack(
        function,
        [
            flag("--backend", help="Which engine runs it: auto, cpu, llama, onnx.", default="auto", show_default=True),
            flag(
                "--device",
                metavar="DEVICE",
                help="Where it runs: cpu, gpu, npu, or a name that `edgert devices` shows.  [the fastest]",
            ),
            flag(
                "-ngl",
                "--n-gpu-layers",
                type=click.IntRange(-1),
                help="Layers that llama.cpp gives to GPUs; -1: all.  [as many as fit]",
            ),
            flag(
                "-sm",
                "--split-mode",
                type=click.Choice(["none", "layer", "row", "tensor"]),
                help="How llama.cpp spreads it over several GPUs; none: --main-gpu alone.  [layer]",
            ),
            flag(
                "-ts",
                "--tensor-split",
                type=Parts(click.FLOAT, "N,..."),
                help="Shares of the GPUs, 3,1 for three quarters on the first.  [by free memory]",
            ),
            flag("-mg", "--main-gpu", type=click.IntRange(0), help="The GPU of --split-mode none.  [0]"),
            flag(
                "--rpc",
                type=Parts(click.STRING, "HOST:PORT,..."),
                help="llama.cpp's rpc-servers, whose devices count as GPUs.",
            ),
            flag("--require", is_flag=True, help="End with an error rather than run it elsewhere."),
        ],
    )


def backend_options(flags: dict[str, Any]) -> dict[str, Any]:
    """Takes those of `backend_flags` that were given out of a command's arguments, as `backends.load` takes them."""
    names = "backend", "device", "n_gpu_layers", "split_mode", "tensor_split", "main_gpu", "rpc", "require"
    return {name: value for name in names if (value := flags.pop(name)) is not None and value is not False}


def json_flag(function: F) -> F:
    """--json, which has no twin: a variable must not change what a script parses."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


THREADS_HELP = "Threads; -1, or without it: as many as suit this machine."


class Threads(click.ParamType):
    """A number of threads; -1 stands for None."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Raises: click.UsageError for 0, for what is less than -1, and for what is no number."""
        number = click.INT.convert(value, param, ctx)
        if number == -1:
            return None
        if number < 1:
            self.fail(f"{number} is neither -1 (as many as suit this machine) nor a number from 1 on.", param, ctx)
        return int(number)


def threads_flag(function: F) -> F:
    """-t, as llama.cpp has it."""
    return flag("-t", "--threads", type=Threads(), help=THREADS_HELP)(function)


CACHE_FLAGS = [
    flag(
        f"-ct{side}",
        f"--cache-type-{side}",
        metavar="TYPE",
        help=f"How {what} are cached: f16, q8_0, q4_0; without it, what suits the model.",
    )
    for side, what in (("k", "keys"), ("v", "values"))
]


def model_flags(function: F) -> F:
    """Which model, and how it is loaded."""
    return _stack(
        function,
        [
            flag("-m", "--model", metavar="MODEL", help="The model; without it, smollm2."),
            flag("-c", "--ctx-size", type=CONTEXT, help="Context in tokens; 0: the model's."),
            threads_flag,
            backend_flags,
            *CACHE_FLAGS,
            flag(
                "--chat-template",
                metavar="TEMPLATE",
                help="In place of the file's: a Jinja template, @FILE, or gemma, llama3, chatml, phi3.",
            ),
            flag("-md", "--model-draft", metavar="MODEL", help="A small model of the same vocabulary that guesses."),
            flag(
                "--spec-type",
                help="Which guesses are tried: auto, draft, ngram, off.  [auto with a draft, else off]",
            ),
            flag(
                "--spec-max",
                "--draft-max",
                "--spec-draft-n-max",
                "spec_max",
                type=int,
                help="Most tokens guessed at once.  [15]",
            ),
            flag(
                "--spec-min",
                "--draft-min",
                "--spec-draft-n-min",
                "spec_min",
                type=int,
                help="Always guess so many, paying or not.  [0]",
            ),
            flag(
                "--spec-p-min",
                "--draft-p-min",
                "--spec-draft-p-min",
                "spec_p_min",
                type=float,
                help="Guess no token that the draft holds less probable.  [0]",
            ),
        ],
    )


def sampling_flags(function: F) -> F:
    """How tokens are chosen; a flag that is absent leaves the model file's own default."""
    return _stack(
        function,
        [
            flag("-n", "--n-predict", type=int, help="Most tokens to generate; -1: until the model ends."),
            flag("-s", "--seed", type=int, help="Seed; -1: another one each time."),
            flag("--temp", type=float, help="Temperature; 0: always the likeliest token.  [0.8]"),
            flag("--top-k", type=int, help="Choose among the k likeliest; 0: all.  [40]"),
            flag("--top-p", type=float, help="Choose among those that make up this probability.  [0.95]"),
            flag("--min-p", type=float, help="Drop tokens less likely than this share of the best.  [0.05]"),
            flag("--repeat-penalty", type=float, help="Penalty on tokens seen lately; 1: none.  [1.0]"),
            flag("--repeat-last-n", type=int, help="How many latest tokens penalties see; -1: all.  [64]"),
            flag("--presence-penalty", type=float, help="Subtracted once from tokens seen.  [0]"),
            flag("--frequency-penalty", type=float, help="Subtracted per occurrence from tokens seen.  [0]"),
        ],
    )


class TextOrFile(click.ParamType):
    """A text, or @FILE."""

    name = "TEXT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Raises: as `text_of`."""
        text = str(value)
        return text_of(text[1:]) if text.startswith("@") else text


def grammar_flags(function: F) -> F:
    """What every answer must look like."""
    return _stack(
        function,
        [
            flag("--grammar", type=TextOrFile(), metavar="GBNF", help="Answers follow this grammar, or that of @FILE."),
            flag(
                "-j",
                "--json-schema",
                type=TextOrFile(),
                metavar="SCHEMA",
                help="Answers are JSON of this schema, or that of @FILE; {}: any JSON.",
            ),
        ],
    )


def request_of(flags: dict[str, Any]) -> dict[str, Any]:
    """Takes the sampling flags that were given out of a command's arguments, as fields of a request.

    Raises: RequestError naming the field whose value is out of range.
    """
    from edgert.options import Options, SamplingParams

    given = {field: flags.pop(name, None) for name, field in FIELDS.items()}
    request = {field: value for field, value in given.items() if value is not None}
    Options.of(SamplingParams(), **request)
    return request
