"""What was said so far: a history that always alternates, whatever happened to the last answer."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgert.errors import EdgertError

FORMAT = "edgert conversation 1"


@dataclass
class Conversation:
    """A system message, if any, and turns of user and assistant, as `Model.chat` takes them.

    model:  the name it was held with
    """

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    model: str = ""

    def messages(self) -> list[dict[str, str]]:
        """All messages in order."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + [dict(turn) for turn in self.turns]

    def ask(self, text: str) -> None:
        """Adds a user's message. Raises: ValueError when the one before is still without an answer."""
        if self.turns and self.turns[-1]["role"] == "user":
            raise ValueError("the last message has no answer yet")
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> bool:
        """Adds what the model said, even if it was stopped half-way.

        Without any text the question is taken back, because templates refuse two user messages in a row;
        false then.
        """
        if text.strip():
            self.turns.append({"role": "assistant", "content": text})
            return True
        self.undo()
        return False

    def undo(self) -> str | None:
        """Forgets the last question and its answer; the question, or None when there is none."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return None

    def forget_answer(self) -> bool:
        """Forgets the last answer, so that it can be given anew; false when there is none."""
        if not self.turns or self.turns[-1]["role"] != "assistant":
            return False
        self.turns.pop()
        return True

    def clear(self) -> None:
        """Forgets all turns; the system message stays."""
        self.turns.clear()

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"format": FORMAT, "model": self.model, "system": self.system, "turns": self.turns}

    def save(self, path: Path) -> None:
        """Writes the conversation as JSON; an older file of the name stays whole until the new one is.

        Raises: EdgertError when it cannot be written.
        """
        from edgert.files import replace

        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self.as_dict(), ensure_ascii=False, indent=1), encoding="utf-8")
            part.chmod(0o600)  # what was said is the user's own
            replace(part, path)
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise EdgertError(f"{path} cannot be written: {error.strerror}.") from error

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Reads what `save` wrote. Raises: EdgertError when it is something else."""
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise EdgertError(f"{path} cannot be read as a saved conversation ({error}).") from error
        return cls.from_dict(content, path)

    @classmethod
    def from_dict(cls, content: Any, path: Path) -> Conversation:
        """What `as_dict` gave, found in a file. Raises: EdgertError when it is something else."""
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise EdgertError(f"{path} is not a conversation that edgert saved.")
        system, model = content.get("system"), content.get("model")
        turns: Any = content.get("turns")
        roles = ("user", "assistant")
        sound = (
            isinstance(turns, list)
            and len(turns) % 2 == 0
            and all(
                isinstance(turn, dict)
                and set(turn) == {"role", "content"}
                and turn["role"] == roles[i % 2]
                and isinstance(turn["content"], str)
                for i, turn in enumerate(turns)
            )
        )
        if not sound or not isinstance(system, str | None) or not isinstance(model, str):
            raise EdgertError(f"{path} is damaged: its turns are not those of user and assistant in turn.")
        return cls(system, turns, model)
