"""`edgert run`: answers one prompt."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from edgert.cli.flags import flag, grammar_flags, json_flag, model_flags, request_of, sampling_flags
from edgert.cli.loading import load
from edgert.cli.progress import ProgressLine
from edgert.cli.text import TEXT, decoded, text_of
from edgert.cli.verb import verb


@verb()
@model_flags
@click.option("-p", "--prompt", type=TEXT, help="The prompt; standard input, if any, comes after it.")
@click.option("-f", "--file", metavar="FILE", help="A file with the prompt; -: standard input.")
@flag("-sys", "--system", type=TEXT, help="A system message.")
@click.option("--no-chat", "--raw", "raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@sampling_flags
@grammar_flags
@click.option("--stop", multiple=True, type=TEXT, help="End before this text; may be given several times.")
@json_flag
@flag("-v", "--verbose", is_flag=True, help="Say which engine runs, and the rates, on standard error.")
def command(
    prompt: str | None, file: str | None, system: str | None, raw: bool, as_json: bool, verbose: bool, **flags: Any
) -> None:
    """Answers one prompt and stops.

    The prompt becomes the user's message in the model's chat template; --no-chat, or a model without a
    template, continues the bare text. The answer alone goes to standard output, piece by piece; --json
    prints one object instead: text, tokens, finish_reason, timings. Text must be UTF-8: other bytes are
    refused, their place named.
    """
    text = read_prompt(prompt, file)
    request = request_of(flags)
    if flags["stop"]:
        request["stop"] = flags["stop"]
    flags.pop("stop")
    from edgert.cli.answer import FORMAL, Answer, PromptProgress, rates, show

    if not raw and not text.strip():
        raise click.UsageError("The prompt is empty: there is nothing to answer; --raw begins a text from nothing.")
    with load(flags) as model, ProgressLine() as line:
        progress = PromptProgress(line)
        if verbose:
            click.echo(model.engine, err=True)
        if raw or model.template is None:
            if system:
                raise click.UsageError("--system needs a chat template, and none is in use.")
            stream = model.generate(text, True, on_progress=progress, **request)
        else:
            messages = [{"role": "system", "content": system}] if system else []
            stream = model.chat([*messages, {"role": "user", "content": text}], True, on_progress=progress, **request)
        answer = Answer()
        if as_json:
            from edgert.cli.answer import interrupts

            with interrupts(stream.cancel):
                reply = stream.reply()
            answer.finish_reason, answer.stats = reply.finish_reason, reply.stats
            result = {
                "text": reply.text,
                "tokens": reply.tokens,
                "finish_reason": reply.finish_reason,
                "timings": reply.stats.as_dict(),
                "seed": reply.seed,
                "backend": str(model.verdict),
            }
            line.clear()
            click.echo(json.dumps(result, ensure_ascii=False))
        else:
            styled = sys.stdout.isatty()
            show(stream, line, answer, styled, wrap=not (raw or model.template is None or FORMAL & request.keys()))
            if styled or not answer.text.endswith("\n"):
                click.echo()
        if verbose and answer.stats:
            click.echo(rates(answer.stats), err=True)
        if answer.finish_reason == "cancelled":
            raise click.exceptions.Exit(130)


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt of -p, -f and standard input.

    Raises: click.UsageError when there is none; EdgertError for what is not UTF-8.
    """
    parts = [] if prompt is None else [prompt]
    if file is not None and file != "-":
        parts.append(text_of(file))
    if file == "-" or (file is None and not sys.stdin.isatty() and (prompt is None or _is_fed())):
        text = decoded(sys.stdin.buffer.read(), "Standard input")
        if text:
            parts.append(text)
    if not parts:
        raise click.UsageError("There is no prompt: give one with -p, -f or on standard input.")
    return "\n\n".join(part for part in parts if part)


def _is_fed() -> bool:
    """Whether standard input is a file or a pipe; a service's open socket or a device is never waited for."""
    import os
    import stat

    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode)
