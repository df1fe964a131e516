"""An answer on a terminal is broken between words while it comes, not where the terminal's edge happens to be."""

from __future__ import annotations

import re
import shutil

NEAR = 24  # columns from the edge within which a word is held back until it is whole: longer ones are rare
MOST = 256  # characters of a word or of a line's beginning that are looked at together

_PARTS = re.compile(r"\x1b\[[0-9;]*m|\n|\t| +|.", re.DOTALL)
_FENCE = re.compile(r"\s*(?:(`{3,})[^`]*|(~{3,}).*)$")
# Of scripts that have no spaces between words: all but Korean, which has, and emoji.
_IDEOGRAPHIC = re.compile("[\u2e80-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffee\U00020000-\U0003ffff]")
# What may not begin a line there, or end it.
_CLOSING = frozenset("、。，．：；！？）］｝〉》」』】〕〗〙〛”’…‥・ーゝゞ々％ぁぃぅぇぉっゃゅょゎァィゥェォッャュョヮ")
_OPENING = frozenset("（［｛〈《「『【〔〖〘〚“‘")


class Wrapper:
    """Puts line breaks into a text that comes in pieces. Code between fences stays as it is.

    What comes is written at once, but for a word near the edge, which is held back until it ends or does not fit. What
    the terminal itself breaks (a word of more than a line, code) is followed, so that the next break is right.
    """

    def __init__(self) -> None:
        self._width = _columns()
        self._start = 0  # the column where the word begins
        self._word = ""  # since the last place where the line may be broken
        self._gap = ""  # spaces before the word that are not written yet
        self._held = ""  # the end of the word that is not written yet
        self._line = ""  # the beginning of the line as the model has it: whether it is a fence
        self._fence = ""  # that began the code which the text is in

    def push(self, text: str) -> str:
        """What to write now."""
        width = _columns()
        if width != self._width:  # terminals break longer lines anew
            self._width, self._start = width, self._start % width
        return "".join(self._part(part) for part in _PARTS.findall(text))

    def close(self) -> str:
        """What is held back at the end."""
        return self._release()

    def _part(self, part: str) -> str:
        if part == "\n":
            return self._newline()
        if part[0] == "\x1b":
            if not self._held:
                return part
            self._held += part
            return ""
        self._line += part if len(self._line) < MOST else ""
        if part == "\t" or self._fence or _FENCE.match(self._line):
            return self._release() + "".join(map(self._follow, part))
        if part[0] == " ":
            out = self._release()
            self._gap += part
            return out
        out = self._release() if self._word and _may_break(self._word[-1], part) else ""
        return out + self._grow(part)

    def _grow(self, part: str) -> str:
        """What to write once the word has a character more."""
        if not self._word:
            self._start += len(self._gap)
        if not self._held and self._start <= self._width - min(NEAR, self._width // 2):
            gap, self._gap = self._gap, ""
            return gap + self._follow(part)
        self._word, self._held = self._word + part, self._held + part
        if self._start + _cells(self._word) <= self._width and len(self._held) < MOST:
            return ""
        broken, written = "\n" if self._start else "", _PARTS.findall(self._held)
        self._start, self._word, self._gap, self._held = 0, "", "", ""
        return broken + "".join(part if part[0] == "\x1b" else self._follow(part) for part in written)

    def _release(self) -> str:
        """Ends the word, and writes what is held of it."""
        out, spaces = self._gap + self._held, 0 if self._word else len(self._gap)
        self._start = min(self._start + _cells(self._word) + spaces, self._width)
        self._word, self._gap, self._held = "", "", ""
        return out

    def _follow(self, part: str) -> str:
        """The character, written at once; the word goes on where terminals move their cursor."""
        if part == "\t":
            self._start = min((self._start + _cells(self._word)) // 8 * 8 + 8, self._width - 1)
            self._word = ""
            return part
        if len(self._word) >= MOST:
            self._start, self._word = self._start + _cells(self._word), ""
        self._word += part
        if self._start + _cells(self._word) > self._width:
            self._start, self._word = 0, part
        return part

    def _newline(self) -> str:
        out = self._release()
        if self._fence:
            line = self._line.strip()
            if line.startswith(self._fence) and not line.strip(self._fence[0]):
                self._fence = ""
        elif found := _FENCE.match(self._line):
            self._fence = found[1] or found[2]
        self._line, self._start = "", 0
        return out + "\n"


def wrapped_whole(text: str) -> str:
    """A text, broken as its pieces would be."""
    wrapper = Wrapper()
    return wrapper.push(text) + wrapper.close()


def _columns() -> int:
    return max(2, shutil.get_terminal_size().columns)


def _cells(text: str) -> int:
    """The columns that a text takes."""
    if text.isascii():
        return len(text)
    from wcwidth import wcswidth

    return max(0, wcswidth(text))


def _may_break(before: str, after: str) -> bool:
    """Whether a line may be broken between two characters, none of them a space."""
    between = _IDEOGRAPHIC.match(before) or _IDEOGRAPHIC.match(after)
    return between is not None and after not in _CLOSING and before not in _OPENING
