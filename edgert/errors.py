"""What edgert raises when the input or the machine is at fault. This module imports nothing when it is loaded."""

SHOWN = 60  # characters of a wrong value that an error repeats


class EdgertError(Exception):
    """Base of every error that edgert raises on purpose: one sentence, what, where, what to do."""

    def __reduce__(self) -> tuple[object, ...]:
        # Without it an error of several arguments cannot come back from a process of a pool, which waits forever.
        return _rebuilt, (type(self), self.args), self.__dict__


class ModelFileError(EdgertError):
    """A model file is damaged, incomplete, or not a model file at all."""


class UnsupportedFormatError(EdgertError):
    """The file is sound, but uses something that edgert does not know; the message lists what it does."""


class BackendUnavailableError(EdgertError):
    """A backend cannot run here; the message says the command that would change that."""


class DoesNotFitError(EdgertError):
    """Not enough memory; the message says needed, available and the nearest remedy."""


class ContextFullError(EdgertError):
    """A prompt is longer than the context; carries both counts.

    whole:  whether the prompt's is exact; else it has at least so many, and was counted no further
    """

    def __init__(self, n_tokens: int, n_ctx: int, whole: bool = True) -> None:
        self.n_tokens, self.n_ctx, self.whole = n_tokens, n_ctx, whole
        count = f"{n_tokens}" if whole else f"at least {n_tokens}"
        super().__init__(
            # in words by which clients (litellm) know this error
            f"The prompt has {count} tokens, which exceeds the available context size of {n_ctx}: "
            "shorten the prompt or load the model with a larger -c/--ctx-size."
        )


class RequestError(EdgertError):
    """A request's field has a wrong value; `field` names it."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        self.reason = reason
        super().__init__(f"{field}: {reason}")

    @classmethod
    def wrong(cls, field: str, accepted: str, value: object) -> "RequestError":
        """The error for a value that is not what is accepted, such as "an integer from 1 to 8"."""
        return cls(field, f"must be {accepted}, not {shown(value)}")


class QueueFullError(EdgertError):
    """No place is left in the queue; `retry_after` is the seconds in which those that wait will have begun."""

    def __init__(self, n_waiting: int, retry_after: float) -> None:
        self.n_waiting = n_waiting
        self.retry_after = retry_after
        super().__init__(f"{n_waiting} requests wait already: try again in {retry_after:.0f} s.")


class QueueTimeoutError(EdgertError):
    """A request waited for its turn as long as it may; `seconds` is how long, `retry_after` as in QueueFullError."""

    def __init__(self, seconds: float, retry_after: float) -> None:
        self.seconds = seconds
        self.retry_after = retry_after
        super().__init__(f"The request waited {seconds:.1f} s and did not begin: try again in {retry_after:.0f} s.")


class SessionError(EdgertError):
    """A saved session is damaged, or belongs to another model or another kind of cache."""


def shown(value: object) -> str:
    """A value in an error, as Python writes it: on one line, and no longer than is read, however large it is."""
    import numbers
    import reprlib

    writer = reprlib.Repr()
    writer.maxlevel, writer.maxstring, writer.maxother = 2, SHOWN - 10, SHOWN
    try:
        # NumPy's numbers are written as numbers.
        text = str(value) if isinstance(value, numbers.Number) else " ".join(writer.repr(value).split())
    except Exception:  # an integer of too many digits, or an object that cannot be written
        text = f"a value of the type {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."


def _rebuilt(kind: type[EdgertError], arguments: tuple[object, ...]) -> EdgertError:
    return kind.__new__(kind, *arguments)
