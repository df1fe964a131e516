"""Text from outside: UTF-8, or refused with the place named. What is typed into a chat alone is mended.

A byte order mark before it says how it is encoded, as editors on Windows do, and is no part of it.
"""

from __future__ import annotations

import codecs
import os
from typing import Any

import click

from edgert.errors import EdgertError
from edgert.folders import written

BYTE_ORDER_MARK = "\ufeff"


def decoded(data: bytes, name: str) -> str:
    """The text of bytes, every one of them but for a byte order mark: no line end is changed or taken away.

    name:  where the bytes are from, as a sentence begins with it

    Raises: EdgertError naming the first byte that is not UTF-8.
    """
    try:
        return data.decode().removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        what = "is UTF-16" if utf16 else f"is not UTF-8 at byte {error.start}"
        raise EdgertError(f"{name} {what}: convert it first, for example with `iconv -t UTF-8`.") from None


def text_of(file: str) -> str:
    """The text of a file, named as someone wrote it.

    Raises: click.UsageError when it cannot be read; EdgertError for what is not UTF-8.
    """
    try:
        data = written(file).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte, which no path has
        raise click.UsageError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    return decoded(data, file)


class Text(click.ParamType):
    """An argument that is text. Python decodes arguments as the locale says, which without one is ASCII."""

    name = "TEXT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Raises: click.UsageError naming the first byte that is neither UTF-8 nor the locale's."""
        try:
            return os.fsencode(value).decode()
        except UnicodeEncodeError:  # no bytes of the system's: a default, or a text of another program's
            return str(value)
        except UnicodeDecodeError as error:
            if any("\ud800" <= character <= "\udfff" for character in value):
                self.fail(f"it is not UTF-8 at byte {error.start}.", param, ctx)
            return str(value)


TEXT = Text()
