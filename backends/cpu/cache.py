"""The paged cache of keys and values: which pages belong to which sequence.

Pages hold PAGE positions in every layer at once and are handed out as sequences grow; forks share full pages by
reference count. The memory of a page comes into being when it is first written.
"""

from __future__ import annotations

import numpy as np

from edgert.backends.cpu.layouts import PAGE
from edgert.backends.cpu.memory import aligned
from edgert.errors import DoesNotFitError


class PagedCache:
    """Keys and values in float16 for `n_pages` pages.

    data:   uint8 (n_pages, stride): for each layer and head the keys, then the values, as `kernels/rope.py` says;
            a page of all layers is one piece, so that memory grows page by page even where the system's are large
    table:  int32 (n_seq, max_pages), the page of each PAGE positions of a sequence
    """

    def __init__(self, n_layer: int, n_head_kv: int, head_dim: int, n_seq: int, n_ctx: int, n_pages: int) -> None:
        self.max_pages = -(-n_ctx // PAGE)
        self.n_pages = n_pages
        self._head_bytes = head_dim * PAGE * 2
        self._layer_bytes = n_head_kv * 2 * self._head_bytes
        self.stride = n_layer * self._layer_bytes
        self.data = aligned(n_pages * self.stride).reshape(n_pages, self.stride)
        self.table = np.zeros((n_seq, self.max_pages + 8), np.int32)  # kernels look a few entries ahead
        self.lengths = [0] * n_seq
        self._owned = [0] * n_seq  # pages that each sequence holds
        self._references = np.zeros(n_pages, np.int32)
        self._free = list(range(n_pages - 1, -1, -1))

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use."""
        return (self.n_pages - len(self._free)) * self.stride

    def missing(self, growth: dict[int, int]) -> int:
        """How many pages are lacking for sequences to reach these lengths."""
        needed = sum(max(0, -(-length // PAGE) - self._owned[sequence]) for sequence, length in growth.items())
        return max(0, needed - len(self._free))

    def grow(self, sequence: int, length: int) -> None:
        """Gives a sequence the pages for `length` positions."""
        pages = -(-length // PAGE)
        while self._owned[sequence] < pages:
            page = self._take()
            self.table[sequence, self._owned[sequence]] = page
            self._owned[sequence] += 1
        self.lengths[sequence] = length

    def truncate(self, sequence: int, length: int) -> None:
        """Keeps the first `length` positions."""
        pages = -(-length // PAGE)
        while self._owned[sequence] > pages:
            self._owned[sequence] -= 1
            page = int(self.table[sequence, self._owned[sequence]])
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
        self.lengths[sequence] = length
        if length % PAGE:
            self._own_last(sequence)

    def fork(self, source: int, target: int, length: int) -> None:
        """The empty target shares the source's full pages; a page that both would write to is copied."""
        pages = -(-length // PAGE)
        self.table[target, :pages] = self.table[source, :pages]
        self._references[self.table[source, :pages]] += 1
        self._owned[target] = pages
        self.lengths[target] = length
        if length % PAGE:
            self._own_last(target)

    def _own_last(self, sequence: int) -> None:
        """Copies the last page if it is shared, since the sequence will write to it."""
        place = self._owned[sequence] - 1
        shared = int(self.table[sequence, place])
        if self._references[shared] > 1:
            page = self._take()
            self.data[page] = self.data[shared]
            self._references[shared] -= 1
            self.table[sequence, place] = page

    def _take(self) -> int:
        if not self._free:
            raise DoesNotFitError(
                f"The cache's {self.n_pages * PAGE} positions are all in use: end a sequence, "
                "or load the model with a larger -c/--ctx-size."
            )
        page = self._free.pop()
        self._references[page] = 1
        return page

    def addresses(self, layer: int) -> tuple[int, int]:
        """Where the keys and the values of the layer's first head stand in page 0; pages follow at `stride` bytes."""
        keys = self.data.ctypes.data + layer * self._layer_bytes
        return keys, keys + self._head_bytes
