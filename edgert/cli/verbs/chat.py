"""`edgert chat`: the chat screen."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from edgert import store
from edgert.cli.flags import flag, grammar_flags, model_flags, request_of, sampling_flags
from edgert.cli.loading import load
from edgert.cli.progress import ProgressLine
from edgert.cli.text import TEXT, decoded
from edgert.cli.verb import verb
from edgert.errors import ContextFullError, EdgertError
from edgert.folders import data_root

if TYPE_CHECKING:
    from edgert.cli.terminal import Terminal
    from edgert.model import Model
    from edgert.reply import Stats
    from edgert.stream import Stream

DRAFTS = ("draft_n", "draft_n_accepted")  # of `Stats`


@verb()
@model_flags
@flag("-sys", "--system", type=TEXT, help="A system message.")
@sampling_flags
@grammar_flags
@flag("-v", "--verbose", is_flag=True, help="Show the rates after each answer.")
def command(system: str | None, verbose: bool, **flags: Any) -> None:
    """Talks with a model in this terminal; without -m, with smollm2.

    Write a message and press Enter; /? shows the commands, Ctrl+C stops an answer, Ctrl+D or /bye leaves.
    When standard input is not a terminal, all of it is one message: the answer goes to standard output.
    Bytes that are not UTF-8 are replaced in what you type, and refused in files and standard input.
    """
    from edgert.cli.terminal import Terminal
    from edgert.conversation import Conversation

    request = request_of(flags)
    name = store.DEFAULT if flags["model"] is None else flags["model"]
    piped = None if sys.stdin.isatty() else decoded(sys.stdin.buffer.read(), "Standard input")
    if piped is not None and not piped.strip():
        raise click.UsageError("Standard input is empty: there is nothing to answer.")
    with Terminal() as terminal, load(flags, terminal.quiet) as model:
        if model.template is None:
            raise EdgertError(
                f"{name} has no chat template: give one with --chat-template, or continue text with "
                "`edgert run --no-chat`."
            )
        chat = Chat(model, Conversation(system, model=name), request, verbose, terminal)
        if piped is not None:
            chat.conversation.ask(piped)
            if not chat.answer():
                raise EdgertError("The message was not answered.")
            return
        chat.loop()


class Chat:
    """One conversation on the screen.

    request:     fields of SamplingParams and Options that every answer asks for
    attachment:  text of files to put before the next message
    totals:      sums over all answers, by the names of `Stats`
    """

    def __init__(
        self, model: Model, conversation: Any, request: dict[str, Any], verbose: bool, terminal: Terminal
    ) -> None:
        from edgert.cli.chat_commands import COMMANDS
        from edgert.cli.terminal import Prompt

        self.model = model
        self.conversation = conversation
        self.request = request
        self.verbose = verbose
        self.attachment = ""
        self._last: Stats | None = None  # of the last answer, if the conversation then ended with it
        self._last_messages: list[dict[str, str]] = []
        self.totals = dict.fromkeys(
            ("answers", "cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "timed_n", *DRAFTS), 0.0
        )
        self.sessions = data_root() / "conversations"
        self.prompt = Prompt(data_root() / "history", [f"/{name}" for name in (*COMMANDS, "bye")])
        self.terminal = terminal
        self._ahead: Stream | None = None
        self._line = ProgressLine()

    def say(self, text: str) -> None:
        """Prints something that the user asked for."""
        from edgert.cli.answer import printable

        click.echo(printable(text))

    def note(self, text: str) -> None:
        """Prints a remark, dimmed."""
        from edgert.cli.terminal import wrapped

        click.secho(wrapped(text), dim=True, err=not sys.stdout.isatty())

    def complain(self, text: str) -> None:
        """Prints what went wrong, as one sentence in red."""
        from edgert.cli.terminal import wrapped

        click.secho(wrapped(" ".join(text.split())), fg="red", err=True)

    def describe(self) -> str:
        """What model this is and what runs it."""
        lines = [f"model    {self.conversation.model}", f"engine   {self.model.engine}"]
        lines += [f"         {name}: {value}" for name, value in self.model.verdict.details.items()]
        lines += [f"tried    {trial}" for trial in self.model.verdict.trials]
        lines.append(f"context  {self.model.n_ctx} tokens")
        return "\n".join(lines)

    def loop(self) -> None:
        """Reads and answers until the user leaves."""
        from edgert.cli.chat_commands import execute, split
        from edgert.cli.terminal import unquote

        self.note(f"{self.conversation.model} · {self.model.engine}")
        while True:
            try:
                text = self.prompt.read()
            except KeyboardInterrupt:
                self.note("Ctrl+D or /bye leaves.")
                continue
            if text is None:
                return
            try:
                if text.startswith("/"):
                    if not execute(self, *split(text)):
                        return
                    continue
                text = unquote(text)
                if not text.strip():
                    continue
                if self.attachment:
                    text, self.attachment = f"{self.attachment}\n\n{text}", ""
                self.conversation.ask(text)
                self.answer()
            except EdgertError as error:
                self.complain(str(error))

    def read_ahead(self) -> None:
        """Lets the engine read the conversation while the user writes."""
        if self.conversation.turns:
            try:
                self._ahead = self.model.chat(self.conversation.messages()[:-1], True, max_tokens=0)
            except EdgertError:  # it is told when the conversation goes on
                self._ahead = None

    def answer(self) -> bool:
        """Answers the conversation's last message, and keeps what came of it; false when nothing came.

        Raises: click.ClickException never; an error of the model is shown and the message taken back.
        """
        from edgert.cli.answer import FORMAL, Answer, PromptProgress, rates, show

        if self._ahead is not None:
            self._ahead.cancel()  # what it has read stays in the cache
            self._ahead = None
        answer, problem = Answer(), ""
        styled = sys.stdout.isatty()
        try:
            with self.terminal.quiet():
                stream = self.model.chat(
                    self.conversation.messages(),
                    True,
                    on_progress=PromptProgress(self._line),
                    **self.request,
                )
                show(stream, self._line, answer, styled, wrap=not FORMAL & self.request.keys())
        except KeyboardInterrupt:
            answer.finish_reason = "cancelled"
        except ContextFullError as error:
            problem = f"{error} /clear begins anew, /undo takes the last exchange back."
        except EdgertError as error:
            problem = str(error)
        except Exception as error:
            problem = f"The answer failed ({type(error).__name__}: {error})."
        kept = False
        try:
            if answer.text and (styled or not answer.text.endswith("\n")):
                click.echo()
        finally:
            kept = self.conversation.answer(answer.text)
        if problem:
            self.complain(problem)
        if answer.finish_reason == "cancelled":
            self.note("Stopped." if kept else "Stopped before the answer began; the message is taken back.")
        elif answer.finish_reason == "length":
            self.note("The answer was cut: the context or the limit on its tokens (-n) is used up.")
        elif not kept and not problem:
            self.note("The model had nothing to say; the message is taken back.")
        if answer.stats:
            self._count(answer.stats, kept)
            if self.verbose:
                self.note(f"{rates(answer.stats)} · context {self.used()}/{self.model.n_ctx}")
        if styled:
            click.echo()
        return kept

    def used(self) -> int:
        """Tokens of the context that the conversation takes: as the last answer left it, or as it is read next."""
        messages = self.conversation.messages()
        if self._last is not None and messages == self._last_messages:
            return self._last.cache_n + self._last.prompt_n + self._last.predicted_n
        return len(self.model.render(messages, add_generation_prompt=False)) if self.conversation.turns else 0

    def _count(self, stats: Stats, kept: bool) -> None:
        self._last, self._last_messages = (stats if kept else None), self.conversation.messages()
        self.totals["answers"] += 1
        self.totals["timed_n"] += stats.timed_n
        for name, value in stats.as_dict().items():
            if name in self.totals:
                self.totals[name] += value
