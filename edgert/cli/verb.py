"""A verb's command line; one that is mistaken says what was probably meant: near spellings, other tools' words."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import click

from edgert.cli.flags import FIELDS

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


def unknown(name: str, known: list[str]) -> click.UsageError:
    """What to say of a verb that there is not."""
    near = get_close_matches(name.lower(), known, 1)
    meant = VERBS.get(name.lower()) or (near[0] if near else None)
    advice = f"did you mean {meant!r}?" if meant in known else "`edgert --help` shows those there are."
    return click.UsageError(f"No such command {name!r}; {advice}")


class Verb(click.Command):
    """The command of a verb."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises: click.UsageError for a flag that there is not and for words that belong behind a flag."""
        ctx.allow_extra_args = True
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if advice := self._advice(error.option_name):
                raise click.UsageError(f"No such option {error.option_name!r}; {advice}", ctx) from error
            raise
        if rest:
            flags = [f"{what} with {flag}" for what, flag in (("the model", "-m"), ("a text", "-p")) if self._has(flag)]
            advice = f"give {' and '.join(flags)}." if flags else f"`{ctx.command_path} --help` shows what it takes."
            raise click.UsageError(f"Unexpected: {' '.join(rest)!r}; {advice}", ctx)
        return rest

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
