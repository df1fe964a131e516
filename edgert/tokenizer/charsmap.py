"""The rules by which sentencepiece normalizes a text: which characters become which.

Source: sentencepiece's precompiled_charsmap, a double array (darts-clone) of all left sides, whose values are
places in a pool of right sides.
"""

from __future__ import annotations

import numpy as np

_LABEL = 1 << 31 | 0xFF
_NOWHERE = -1
_LONGEST_LEFT = 64  # characters; a damaged array may lead in circles
_LONGEST_RIGHT = 1024  # bytes


class Charsmap:
    """Replaces the longest left side at each place by its right side; "" as blob changes nothing.

    blob:    uint32 size in bytes of the array, the array of uint32, then right sides that end in zero bytes
    Raises:  ValueError when the blob is damaged.
    """

    def __init__(self, blob: bytes = b"") -> None:
        self._units = memoryview(b"").cast("I")
        self._pool = b""
        self._root = _NOWHERE
        self._first: dict[str, tuple[int, str | None]] = {}
        if not blob:
            return
        size = int.from_bytes(blob[:4], "little")
        if len(blob) < 8 or size % 4 or not size or 4 + size >= len(blob) or blob[-1]:
            raise ValueError("its lengths are wrong")
        units = np.frombuffer(blob, "<u4", size // 4, 4).astype(np.uint32)
        values = units[units >> 31 == 1] & 0x7FFFFFFF
        if values.size and values.max() >= len(blob) - 4 - size:
            raise ValueError("a rule lies beyond its end")
        self._units = memoryview(units.tobytes()).cast("I")
        self._pool = blob[4 + size :]
        if max(map(len, self._pool.split(b"\0"))) > _LONGEST_RIGHT:
            raise ValueError("a right side is too long")
        self._root = _base(self._units[0])

    def normalize(self, text: str) -> str:
        if self._root == _NOWHERE:
            return text
        out, i, first = [], 0, self._first
        while i < len(text):
            character = text[i]
            known = first.get(character)
            if known is None:
                known = first[character] = self._step(self._root, character)
            node, new = known
            i = end = i + 1
            last = min(len(text), end + _LONGEST_LEFT - 1)
            while node != _NOWHERE and end < last:
                node, longer = self._step(node, text[end])
                end += 1
                if longer is not None:
                    new, i = longer, end
            out.append(character if new is None else new)
        return "".join(out)

    def _step(self, node: int, character: str) -> tuple[int, str | None]:
        """Where one more character leads, and the right side of what was read so far, if that is a left side."""
        units = self._units
        unit = 0
        for byte in character.encode():
            place = node ^ byte
            if not byte or place >= len(units) or units[place] & _LABEL != byte:
                return _NOWHERE, None
            unit = units[place]
            node = place ^ _base(unit)
        if not unit >> 8 & 1 or node >= len(units) or not units[node] >> 31:
            return node, None
        begin = units[node] & 0x7FFFFFFF
        return node, self._pool[begin : self._pool.index(0, begin)].decode("utf-8", "replace")


def _base(unit: int) -> int:
    """The offset of a node's children."""
    return unit >> 10 << ((unit & 1 << 9) >> 6)


__all__ = ["Charsmap"]
