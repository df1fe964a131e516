"""The commands of the chat screen: what a line that begins with / does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgert.cli.text import decoded
from edgert.conversation import Conversation
from edgert.errors import EdgertError, RequestError
from edgert.folders import written

if TYPE_CHECKING:
    from edgert.cli.verbs.chat import Chat

# What /set parameter takes -> field of a request; Ollama's and llama.cpp's names are understood too.
PARAMETERS = {
    "temperature": "temperature",
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repeat_penalty",
    "repeat_last_n": "repeat_last_n",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "max_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "stop": "stop",
}
MOST_READ = 8 << 20  # bytes of a file that /read takes

HELP = '''\
/set parameter NAME VALUE   temperature, top_k, top_p, min_p, seed, max_tokens, stop, ...
/set system TEXT            the system message; without a text, none
/set verbose | quiet        rates after each answer, or not
/set history | nohistory    keep what you type for the next time, or not
/show [info|parameters|system|template|messages]
/read FILE                  put a text file before your next message
/regen                      answer the last message anew
/undo                       take the last message and its answer back
/clear                      begin anew; the system message stays
/save NAME  /load NAME      keep this conversation; go on with one
/stats                      tokens, rates, cache, memory
/? or /help                 this
/bye                        leave; so does Ctrl+D

"""                         begin and end a message of several lines; Alt+Enter starts a line
Ctrl+C                      stop the answer'''


def split(line: str) -> tuple[str, str]:
    """(command, the rest) of a line that begins with a slash."""
    name, rest = re.fullmatch(r"/(\S*)(.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
    return name, rest.strip()


def execute(chat: Chat, name: str, rest: str) -> bool:
    """Runs a command; false when the chat is over. Raises: EdgertError with what to tell the user."""
    if name in ("bye", "exit", "quit"):
        return False
    action = COMMANDS.get(name)
    if action is None:
        near = get_close_matches(name, COMMANDS, 1)
        meant = f"did you mean /{near[0]}? " if near else ""
        raise EdgertError(
            f'There is no command /{name}: {meant}/? shows those there are. Put a message between """ and """.'
        )
    action(chat, rest)
    return True


def _help(chat: Chat, rest: str) -> None:
    chat.say(HELP)


def _set(chat: Chat, rest: str) -> None:
    what, _, value = rest.partition(" ")
    value = value.strip()
    if what == "parameter":
        _set_parameter(chat, value)
    elif what == "system":
        chat.conversation.system = _unquoted(value) or None
        chat.note("The system message is set." if value else "There is no system message now.")
    elif what in ("verbose", "quiet"):
        chat.verbose = what == "verbose"
        chat.note("Rates are shown." if chat.verbose else "Rates are not shown.")
    elif what in ("history", "nohistory"):
        chat.prompt.keep_history = what == "history"
        chat.note("What you type is kept." if chat.prompt.keep_history else "What you type is not kept.")
    else:
        raise EdgertError("/set takes parameter, system, verbose, quiet, history or nohistory: see /?.")


def _unquoted(text: str) -> str:
    for quote in ('"""', '"', "'"):
        if len(text) >= 2 * len(quote) and text.startswith(quote) and text.endswith(quote):
            return text[len(quote) : -len(quote)]
    return text


def _set_parameter(chat: Chat, rest: str) -> None:
    from edgert.options import Options

    name, _, value = rest.partition(" ")
    value = value.strip()
    if name in ("num_ctx", "n_ctx"):
        raise EdgertError("The context is chosen when a model is loaded: start the chat with -c.")
    field = PARAMETERS.get(name)
    if field is None or not value:
        known = ", ".join(dict.fromkeys(PARAMETERS.values()))
        raise EdgertError(f"Write /set parameter NAME VALUE, where NAME is one of {known}.")
    parsed: Any = _unquoted(value)
    if field != "stop":
        try:
            parsed = json.loads(value)
        except ValueError:
            raise EdgertError(f"{name} must be a number, not {value!r}.") from None
    try:
        Options.of(chat.model.defaults, **{field: parsed})
    except RequestError as error:
        raise EdgertError(f"{error.field} {error.reason}.") from error
    chat.request[field] = parsed
    chat.note(f"{field} is {parsed!r}.")


def _show(chat: Chat, rest: str) -> None:
    if rest in ("", "info"):
        chat.say(chat.describe())
    elif rest == "parameters":
        from edgert.options import Options

        options = Options.of(chat.model.defaults, **chat.request)
        values = {
            name: getattr(options.sampling, name)
            for name in dict.fromkeys(PARAMETERS.values())
            if hasattr(options.sampling, name)
        }
        values |= {"max_tokens": options.max_tokens, "stop": list(options.stop)}
        values |= {name: -1 for name in ("seed", "max_tokens") if values[name] is None}  # as /set takes them
        chat.say("\n".join(f"{name:<20}{value}" for name, value in values.items()))
    elif rest == "system":
        chat.say(chat.conversation.system or "There is no system message.")
    elif rest == "template":
        source = getattr(chat.model.template, "source", None)
        chat.say(source or "The model has no chat template.")
    elif rest == "messages":
        lines = [f"{turn['role']}: {turn['content']}" for turn in chat.conversation.messages()]
        chat.say("\n\n".join(lines) or "Nothing has been said yet.")
    else:
        raise EdgertError("/show takes info, parameters, system, template or messages.")


def _read(chat: Chat, rest: str) -> None:
    if not rest:
        raise EdgertError("Write /read FILE.")
    path = written(_unquoted(rest))
    try:
        if path.stat().st_size > MOST_READ:
            raise EdgertError(f"{path} has more than {MOST_READ >> 20} MB: give a shorter file.")
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte, which no path has
        raise EdgertError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if b"\0" in data[:4096]:
        raise EdgertError(f"{path} is not a text file.")
    text = decoded(data, str(path))
    chat.attachment = f"{chat.attachment}\n\n{text}" if chat.attachment else text
    tokens = len(chat.model.tokenize(text, add_special=False))
    chat.note(f"{path.name}: {len(text):,} characters, {tokens:,} tokens; it comes before your next message.")


def _regen(chat: Chat, rest: str) -> None:
    before = list(chat.conversation.turns)
    if not chat.conversation.forget_answer():
        raise EdgertError("There is no answer to give anew.")
    if not chat.answer():
        chat.conversation.turns = before


def _undo(chat: Chat, rest: str) -> None:
    question = chat.conversation.undo()
    if question is None:
        raise EdgertError("There is nothing to take back.")
    short = " ".join(question.split())
    chat.note(f"Taken back: {short[:60]}{'…' if len(short) > 60 else ''}")


def _clear(chat: Chat, rest: str) -> None:
    chat.conversation.clear()
    chat.attachment = ""
    chat.note("The conversation begins anew.")


def _session(chat: Chat, name: str, verb: str) -> Path:
    """The file of a saved conversation, with the cache (.session) or, as older versions wrote it, without (.json)."""
    if not re.fullmatch(r"[\w][\w. -]{0,63}", name):
        raise EdgertError(f"Write /{verb} NAME, where NAME has letters, digits, '.', '_' and '-'.")
    return chat.sessions / f"{name}.session"


def _save(chat: Chat, rest: str) -> None:
    path = _session(chat, rest, "save")
    plain = chat.sessions / f"{rest}.json"
    conversation = chat.conversation
    read = ""
    if conversation.turns and "session" in chat.model.backend.capabilities:
        n = chat.model.save_session(path, conversation.messages(), transcript=conversation.as_dict())
        plain.unlink(missing_ok=True)
        read = f", with {n:,} tokens that need not be read again"
    else:
        conversation.save(plain)
        path.unlink(missing_ok=True)
    chat.note(f"Saved{read}; /load {rest} goes on with it.")


def _load(chat: Chat, rest: str) -> None:
    from edgert import session
    from edgert.cli.answer import printable
    from edgert.cli.terminal import wrapped

    path = _session(chat, rest, "load")
    plain = chat.sessions / f"{rest}.json"
    if not path.is_file() and not plain.is_file():
        names = sorted({file.stem for end in ("session", "json") for file in chat.sessions.glob(f"*.{end}")})
        raise EdgertError(f"No conversation {rest!r} is saved; those that are: {', '.join(names) or 'none'}.")
    model = chat.conversation.model
    obstacle: EdgertError | None = None
    if path.is_file():
        found = session.read(path)
        conversation = Conversation.from_dict(found.transcript, path)
        try:
            chat.model.restore_session(found)
        except EdgertError as error:  # of another model, or another type of cache: it is read again
            obstacle = error
    else:
        conversation = Conversation.load(plain)
    chat.conversation = conversation
    turns = len(conversation.turns) // 2
    other = f", held with {conversation.model}" if conversation.model != model else ""
    conversation.model = model
    if obstacle or not path.is_file():
        chat.read_ahead()
    why = f" It is read again: {obstacle}" if obstacle and not other else ""
    chat.note(f"Loaded {turns} exchange{'s' if turns != 1 else ''}{other}.{why}")
    if turns:
        question, answer = (turn["content"] for turn in conversation.turns[-2:])
        short = question if len(question) < 400 else question[:200] + " … " + question[-180:]
        chat.say(wrapped(f">>> {short}\n{printable(answer)}"))


def _stats(chat: Chat, rest: str) -> None:
    from edgert.cli.answer import guesses

    total, memory, details = chat.totals, chat.model.backend.memory(), chat.model.verdict.details
    read, per_token = total["prompt_n"] + total["cache_n"], memory.pop("kv_per_token", 0)
    exchanges = len(chat.conversation.turns) // 2
    lines = [f"answers       {total['answers']:.0f} since the start"]
    if total["answers"]:
        rate = _per_second(total["prompt_n"], total["prompt_ms"])
        lines.append(f"prompt        {read:.0f} tokens, {total['cache_n']:.0f} of them from the cache; {rate}")
        rate = _per_second(total["timed_n"], total["predicted_ms"])
        lines.append(f"generated     {total['predicted_n']:.0f} tokens; {rate}")
    if total["draft_n"]:
        lines.append(f"drafts        {guesses(total['draft_n'], total['draft_n_accepted'])}")
    held = f"{exchanges} exchange{'s' if exchanges != 1 else ''}"
    lines.append(f"context       {chat.used()} of {chat.model.n_ctx} tokens: {held}")
    lines.append(f"memory        {', '.join(f'{name} {size / 1e6:.0f} MB' for name, size in memory.items())}")
    if per_token:
        kinds = f"keys {details['type_k']}, values {details['type_v']}"
        lines.append(f"cache         {kinds}, {per_token / 1e3:.1f} kB per token")
    chat.say("\n".join(lines))


def _per_second(count: float, milliseconds: float) -> str:
    return f"{1e3 * count / milliseconds:.1f} tok/s" if milliseconds else "no time measured"


COMMANDS: dict[str, Callable[[Any, str], None]] = {
    "?": _help,
    "help": _help,
    "set": _set,
    "show": _show,
    "read": _read,
    "regen": _regen,
    "undo": _undo,
    "clear": _clear,
    "save": _save,
    "load": _load,
    "stats": _stats,
}
