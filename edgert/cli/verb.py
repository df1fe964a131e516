"""A verb's command line; one that is mistaken says what was probably meant: near spellings, other tools' words."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

import click
from click.core import ParameterSource

from edgert.cli.flags import FIELDS, LOADING
from edgert.errors import RequestError

# What Ollama, pip, llama.cpp's programs and habit call a verb -> what it is here.
VERBS = {
    "list": "ls",
    "download": "pull",
    "fetch": "pull",
    "install": "pull",
    "remove": "rm",
    "delete": "rm",
    "uninstall": "rm",
    "info": "show",
    "generate": "run",
    "complete": "run",
    "server": "serve",
    "ps": "top",
    "create": "quantize",
    "convert": "quantize",
    "benchmark": "bench",
    "ppl": "perplexity",
    "embedding": "embed",
    "check": "doctor",
}

# Likewise flags; those named as a field of a request is come first.
FLAGS = {f"--{field.replace('_', '-')}": f"--{flag.replace('_', '-')}" for flag, field in FIELDS.items()}
FLAGS |= {
    "--num-predict": "--n-predict",
    "--n-ctx": "--ctx-size",
    "--num-ctx": "--ctx-size",
    "--context": "--ctx-size",
    "--system-prompt": "--system",
    "--draft": "--model-draft",
    "--gpu-layers": "--n-gpu-layers",
    "--output-file": "--output",
}

TYPED = "edgert.typed"  # the words of the command line, for who must name one of them
# of a parameter -> of what edgert takes it for
NAMES = FIELDS | LOADING | {"type_name": "type", "tensor_types": "tensor_type", "text_path": "text"}


def unknown(name: str, known: list[str]) -> click.UsageError:
    """What to say of a verb that there is not."""
    near = get_close_matches(name.lower(), known, 1)
    meant = VERBS.get(name.lower()) or (near[0] if near else None)
    advice = f"did you mean {meant!r}?" if meant in known else "`edgert --help` shows those there are."
    return click.UsageError(f"No such command {name!r}; {advice}")


# What click says of a value that is no number.
_NO_NUMBER = re.compile(r" is not a valid (integer|float)(?: range)?\.$")
_NUMBERS = {"integer": "an integer", "float": "a number"}


class Verb(click.Command):
    """The command of a verb."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises: click.UsageError for a flag that there is not and for words that belong behind a flag."""
        ctx.allow_extra_args = True
        typed = [word.partition("=")[0] for word in args]
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            if found := _NO_NUMBER.search(error.message):
                said = f"{error.message[: found.start()]} is not {_NUMBERS[found[1]]}."
                raise click.BadParameter(said, error.ctx, error.param, error.param_hint) from error
            raise
        except click.NoSuchOption as error:
            if advice := self._advice(error.option_name):
                raise click.UsageError(f"No such option {error.option_name!r}; {advice}", ctx) from error
            raise
        if rest:
            flags = [f"{what} with {flag}" for what, flag in (("the model", "-m"), ("a text", "-p")) if self._has(flag)]
            advice = f"give {' and '.join(flags)}." if flags else f"`{ctx.command_path} --help` shows what it takes."
            raise click.UsageError(f"Unexpected: {' '.join(rest)!r}; {advice}", ctx)
        ctx.meta[TYPED] = typed
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Raises: click.UsageError naming what the user wrote, where Python's name of it has a wrong value."""
        try:
            return super().invoke(ctx)
        except RequestError as error:
            if name := self._written(ctx, error.field):
                raise click.UsageError(f"{name} {error.reason}.", ctx) from error
            raise

    def _written(self, ctx: click.Context, field: str) -> str:
        """What stands on the command line, or in the environment, for an argument; "" where nothing does."""
        for parameter in self.params:
            name = parameter.name or ""
            named = field in (name, NAMES.get(name)) or f"--{field.replace('_', '-')}" in parameter.opts
            if not named or field == "model":  # which is no value, but what it leads to
                continue
            source = ctx.get_parameter_source(name)
            if source == ParameterSource.COMMANDLINE:
                flags = [flag for flag in parameter.opts if flag.startswith("--")]
                return next((flag for flag in flags if flag in ctx.meta[TYPED]), flags[0] if flags else name)
            if source == ParameterSource.ENVIRONMENT:
                return str(parameter.envvar)
            if source == ParameterSource.DEFAULT_MAP:
                return f"--config: {name.replace('_', '-')}"
        return ""

    def _advice(self, name: str) -> str:
        """What to say of a flag that there is not; "" where nothing is known that near spellings do not tell."""
        meant = FLAGS.get(name)
        if meant and self._has(meant):
            return f"did you mean {meant!r}?"
        if name in ("-m", "--model") and any(isinstance(parameter, click.Argument) for parameter in self.params):
            return "the model has no flag here: it comes right behind the verb."
        return ""

    def _has(self, flag: str) -> bool:
        return any(flag in parameter.opts for parameter in self.params)


def verb() -> Any:
    """Makes a function the command of a verb."""
    return click.command(cls=Verb)
