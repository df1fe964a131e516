"""The paged cache of keys and values: which pages belong to which sequence.

Pages hold PAGE positions and are handed out as sequences grow; forks share full pages by reference count. Layers that
see all positions have pages in common, and so have those of one window, which are given back when the window has
passed them.

Memory that the system holds for the cache is what positions take, but for this waste: a sequence that steps compute has
its last page whole, since kernels read the keys of a page side by side. Once it has rested for some seconds what the
page holds is packed (`shelf.py`), and the page's memory, like that of pages without a sequence, goes back to the
system; not sooner, since fresh memory is slow to get and the next turn of the same reply may come, or another one. So
at most PAGE - 1 positions of each sequence that is being computed are wasted, however many rest and whatever their
lengths are, and parts of the system's pages, which do not end with positions. Large ones, which are faster to read, are
asked for where pages in use fill them; for these to be most of them, pages move to where others have left holes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from edgert.backends.base import RESTED
from edgert.backends.cpu.layouts import AHEAD, BLOCK, CACHE_TYPES, PAGE
from edgert.backends.cpu.pieces import Pieces
from edgert.backends.cpu.shelf import Shelf
from edgert.errors import DoesNotFitError, RequestError
from edgert.quantize.architecture import Architecture

DEFAULT_CACHE_TYPE = "q8_0"
SPARE = 50  # the part of a page of all layers that may be left empty, so that it begins at a page of the system
MOVED = 32 << 20  # bytes of pages that are moved at a time, while replies wait
REACH = 64  # positions of a convolution's inputs that a sequence keeps, as a window: more than any draft has


def n_pages(length: int) -> int:
    """Pages that `length` positions take."""
    return -(-length // PAGE)


def kept_positions(window: int, n_ctx: int, n_batch: int) -> int:
    """Positions that a sequence's pages of a layer with this window may hold; 0: all, since that frees nothing.

    The window, as much before it, so far back a sequence can be cut, and what a step adds.
    """
    kept = 2 * window + n_batch + 2 * PAGE
    return kept if window and kept < n_ctx else 0


@dataclass(frozen=True)
class Kept:
    """What a layer keeps of each position: keys and values of heads, or a row of float32.

    window:  positions that a token sees; 0: all
    """

    window: int
    n_head_kv: int
    head_dim: int
    n_row: int = 0

    def head_bytes(self, type_k: str, type_v: str) -> int:
        """Bytes of a head's keys and values in a page."""
        return sum(CACHE_TYPES[name].page_bytes(self.head_dim) for name in (type_k, type_v))

    def page_bytes(self, type_k: str, type_v: str) -> int:
        return self.n_head_kv * self.head_bytes(type_k, type_v) + 4 * PAGE * self.n_row


def kept_by_layers(a: Architecture) -> list[Kept]:
    """What each layer keeps. Convolutions see a few positions, and are kept a longer window, to be cut back by it."""
    return [
        Kept(REACH, 0, 0, a.n_embd)
        if layer.n_taps
        else Kept(layer.window, layer.n_head_kv if layer.kv_layer is None else 0, layer.head_dim)
        for layer in a.layers
    ]


def cache_bytes(layers: Sequence[Kept], n_ctx: int, n_batch: int, type_k: str, type_v: str) -> tuple[int, int]:
    """Bytes of one sequence of n_ctx positions in all layers, and of one position."""
    pages = [n_pages(kept_positions(layer.window, n_ctx, n_batch) or n_ctx) for layer in layers]
    sizes = [layer.page_bytes(type_k, type_v) for layer in layers]
    return sum(n * size for n, size in zip(pages, sizes, strict=True)), sum(sizes) // PAGE


def cache_type(side: str, name: str | None, head_dim: int) -> str:
    """The type of keys ("k") or values ("v") that a name asks for; None: the default for heads of this size.

    Raises: RequestError for a type that is unknown, or that heads of this size cannot have.
    """
    packable = head_dim % BLOCK == 0
    if name is None:
        return DEFAULT_CACHE_TYPE if packable else "f16"
    if name not in CACHE_TYPES:
        raise RequestError(f"cache_type_{side}", f"is {name!r}; the cpu backend has {', '.join(CACHE_TYPES)}")
    if CACHE_TYPES[name].is_packed and not packable:
        raise RequestError(
            f"cache_type_{side}", f"{name} needs heads of a multiple of {BLOCK}, not {head_dim}: use f16"
        )
    return name


class Pool:
    """The pages of some layers.

    A sequence's entries are its pages in order; with `refined` keys, before them one for what rounding left of the
    keys of the first page. Entries before `first` have been given back.

    data:   uint8 (n_pages, stride): for each layer and head the keys, then the values, as `cache_write.py` says;
            a page of all layers is one piece, so that memory grows page by page
    step:   bytes from one page to the next
    table:  int32 (n_seq, entries), the page of each entry of a sequence
    shelf:  what entries of sequences at rest hold, whose pages are empty meanwhile
    """

    def __init__(self, stride: int, lead: int, n_seq: int, max_pages: int, size: int, spare: int = 0) -> None:
        self.stride, self.lead, self.size = stride, lead, size
        self._pieces = Pieces(size, stride, spare, large=True)
        self.data, self.step = self._pieces.data, self._pieces.step
        self.shelf = Shelf(n_seq * (1 + lead))
        self.table = np.zeros((n_seq, lead + max_pages + AHEAD), np.int32)
        self.first = [0] * n_seq
        self.end = [0] * n_seq
        self._references = np.zeros(size, np.int32)
        self._free = list(range(size))  # a heap: the lowest are taken first, so that those in use stand close

    @property
    def used(self) -> int:
        """Pages in use."""
        return self.size - len(self._free)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use, and of those at rest what they hold."""
        return (self.used - len(self.shelf)) * self.stride + self.shelf.used_bytes

    def entries(self, length: int) -> int:
        """Entries of a sequence of `length` positions."""
        return self.lead + n_pages(length) if length else 0

    def lacking(self, growth: dict[int, int]) -> int:
        """How many pages are lacking for sequences to reach these lengths."""
        needed = sum(max(0, self.entries(length) - self.end[sequence]) for sequence, length in growth.items())
        return max(0, needed - len(self._free))

    def grow(self, sequence: int, length: int) -> None:
        """Gives a sequence the pages for `length` positions."""
        end, taken = self.entries(length), list[int]()
        try:
            while self.end[sequence] < end:
                taken.append(self._take())
                self.table[sequence, self.end[sequence]] = taken[-1]
                self.end[sequence] += 1
        finally:
            self._pieces.use(taken)

    def release(self, sequence: int, position: int) -> None:
        """Gives back the pages that lie wholly before a position."""
        whole, first = position // PAGE, self.first[sequence]
        if whole and (end := min(self.lead + whole, self.end[sequence])) > first:
            self._drop(self.table[sequence, first:end])
            self.first[sequence] = end

    def truncate(self, sequence: int, length: int) -> None:
        """Keeps the first `length` positions, and makes the last page the sequence's own."""
        end = self.entries(length)
        if self.end[sequence] > (kept := max(end, self.first[sequence])):
            self._drop(self.table[sequence, kept : self.end[sequence]])
            self.end[sequence] = kept
        if not end:
            self.first[sequence] = self.end[sequence] = 0
        self._own_last(sequence, length)

    def fork(self, source: int, target: int, length: int) -> None:
        """The empty target shares the source's full pages; a page that both would write to is copied."""
        first, end = self.first[source], self.entries(length)
        shared = self.table[source, first:end]
        self.table[target, first:end] = shared
        self._references[shared] += 1
        self.first[target], self.end[target] = (first, end) if end else (0, 0)
        self._own_last(target, length)

    def held(self, sequence: int) -> NDArray[np.int32]:
        """The pages of the sequence's entries, int32."""
        return self.table[sequence, self.first[sequence] : self.end[sequence]]

    def adopt(self, sequence: int, first: int, length: int) -> NDArray[np.int32]:
        """Gives an empty sequence pages of its own for entries [first, those of length); returns them."""
        self.first[sequence] = self.end[sequence] = first
        self.grow(sequence, length)
        return self.held(sequence)

    def page(self, sequence: int, entry: int) -> NDArray[np.uint8]:
        """What the page of an entry holds, uint8 (stride,)."""
        return self.data[self.table[sequence, entry]]

    def own(self, sequence: int, entry: int) -> bool:
        """Whether the sequence has an entry, with a page that no other one has."""
        held = self.first[sequence] <= entry < self.end[sequence]
        return held and bool(self._references[self.table[sequence, entry]] == 1)

    def lay_down(self, sequence: int, entry: int, parts: Sequence[NDArray[np.uint8]]) -> None:
        """Packs what an entry's own page holds, and empties it."""
        self.shelf.put((sequence, entry), parts)
        self._pieces.empty([int(self.table[sequence, entry])], rested=True)

    def pick_up(self, sequence: int, entry: int, parts: Sequence[NDArray[np.uint8]]) -> None:
        """Puts back into an entry's page what it held."""
        self._pieces.use([int(self.table[sequence, entry])])
        self.shelf.take((sequence, entry), parts)

    @property
    def oldest(self) -> float:
        """Since when the first memory has not been in use that is yet to be given back; inf: there is none."""
        return min(self._pieces.oldest, self.shelf.oldest)

    def give_back(self, until: float) -> None:
        """Gives back what has not been in use since a time of `monotonic`."""
        rested = self._pieces.rested(until)
        if len(rested) and self._pieces.large:
            self._close_ranks(rested)
        self._pieces.give_back(rested)
        self.shelf.give_back(until)

    def _close_ranks(self, rested: NDArray[np.int32]) -> None:
        """Moves the last pages in use to where some have rested, so that large pages of the system stay whole."""
        used = np.flatnonzero(self._pieces.used)[::-1]
        n = min(len(used), len(rested), 1 + MOVED // self.step)
        n = int((rested[:n] < used[:n]).sum())
        if not n:
            return
        holes, used = rested[:n], used[:n]
        for hole, page in zip(holes.tolist(), used.tolist(), strict=True):
            self._pieces.move(page, hole)
        places = np.arange(self.size, dtype=np.int32)
        places[holes], places[used] = used, holes
        self._references = self._references[places]
        for sequence, (first, end) in enumerate(zip(self.first, self.end, strict=True)):
            self.table[sequence, first:end] = places[self.table[sequence, first:end]]
        self._free = np.flatnonzero(self._references == 0).tolist()  # ascending, as a heap may be

    def _own_last(self, sequence: int, length: int) -> None:
        if length % PAGE:
            self._own(sequence, self.end[sequence] - 1)
            if self.lead and length < PAGE:
                self._own(sequence, 0)

    def _own(self, sequence: int, entry: int) -> None:
        """Copies a page if it is shared, since the sequence will write to it."""
        shared = int(self.table[sequence, entry])
        if self._references[shared] > 1:
            page = self._take()
            self._pieces.use([page])
            self.data[page] = self.data[shared]
            self._references[shared] -= 1
            self.table[sequence, entry] = page

    def _drop(self, pages: NDArray[np.int32]) -> None:
        self._references[pages] -= 1
        if len(free := pages[self._references[pages] == 0]):
            self._pieces.empty(free)
            for page in free.tolist():
                heapq.heappush(self._free, page)

    def _take(self) -> int:
        if not self._free:
            raise DoesNotFitError(
                f"The cache's {self.size * PAGE} positions are all in use: end a sequence, "
                "or load the model with a larger -c/--ctx-size."
            )
        page = heapq.heappop(self._free)
        self._references[page] = 1
        return page


class PagedCache:
    """Keys and values of all layers, and inputs of their convolutions.

    n_batch:  positions that a sequence may grow by at once
    n_pages:  of the layers that see everything

    Of layers with a window each sequence keeps the window's positions, and as many before them: so far back it can
    be truncated, or a fork begin.
    """

    def __init__(
        self,
        layers: Sequence[Kept],
        n_seq: int,
        n_ctx: int,
        n_pages: int,
        n_batch: int,
        type_k: str = "f16",
        type_v: str = "f16",
    ) -> None:
        self.type_k, self.type_v = type_k, type_v
        self.max_pages = -(-n_ctx // PAGE)
        self.lengths = [0] * n_seq
        self._layers = layers
        self._rested: dict[int, float] = {}  # sequences at rest that are not packed yet, and since when
        self._packed: dict[int, list[tuple[int, int, int]]] = {}  # by sequence: windows, entries, positions they hold
        lead = int(CACHE_TYPES[type_k].refined)
        # A window that is nearly the context frees nothing.
        kept = {layer.window: kept_positions(layer.window, n_ctx, n_batch) for layer in layers}
        self._window_of = [layer.window if kept[layer.window] else 0 for layer in layers]
        self.pools: dict[int, Pool] = {}
        self._places: list[int] = []  # bytes from the page's beginning to each layer's part
        strides = dict.fromkeys(sorted(set(self._window_of)), 0)
        for window, layer in zip(self._window_of, layers, strict=True):
            self._places.append(strides[window])
            strides[window] += layer.page_bytes(type_k, type_v)
        for window, stride in strides.items():
            size = n_seq * (lead + -(-kept[window] // PAGE)) if window else n_pages + lead * n_seq
            self.pools[window] = Pool(stride, lead, n_seq, self.max_pages, size, sum(strides.values()) // SPARE)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use."""
        return sum(pool.used_bytes for pool in self.pools.values())

    @property
    def free_positions(self) -> int:
        """Positions that free pages hold; layers with a window always have theirs."""
        pool = self.pools.get(0)
        return (pool.size - pool.used if pool else len(self.lengths) * self.max_pages) * PAGE

    @property
    def token_bytes(self) -> int:
        """Bytes of one position in all layers."""
        return sum(pool.stride for pool in self.pools.values()) // PAGE

    def missing(self, growth: dict[int, int]) -> int:
        """How many pages are lacking for sequences to reach these lengths; layers with a window always have theirs."""
        return self.pools[0].lacking(growth) if 0 in self.pools else 0

    def grow(self, sequence: int, length: int) -> None:
        """Gives a sequence the pages for `length` positions."""
        self._wake(sequence)
        for window, pool in self.pools.items():
            if window:
                pool.release(sequence, self.lengths[sequence] - 2 * window)
            pool.grow(sequence, length)
        self.lengths[sequence] = length

    def reachable(self, sequence: int, length: int) -> int:
        """The most of the first `length` positions that `truncate` and `fork` can go on from: `length`, or 0."""
        for window, pool in self.pools.items():
            held_from = max(0, pool.first[sequence] - pool.lead) * PAGE
            if held_from > max(0, length + 1 - window):
                return 0
        return length

    def truncate(self, sequence: int, length: int) -> None:
        """Keeps the first `length` positions, which are reachable."""
        self._wake(sequence, forget=not length)
        self.lengths[sequence] = length
        for pool in self.pools.values():
            pool.truncate(sequence, length)
        if not length:
            self._tidy()

    def shorten(self, sequence: int, length: int) -> None:
        """Forgets what lies behind the first `length` positions, but keeps its pages, which are soon written to."""
        self.lengths[sequence] = length

    def fork(self, source: int, target: int, length: int) -> None:
        """The empty target shares the first `length` positions, which are reachable."""
        rested = self._wake(source)
        self.lengths[target] = length
        try:
            for pool in self.pools.values():
                pool.fork(source, target, length)
        finally:
            if rested:
                self.rest(source)

    def rest(self, sequence: int) -> None:
        """Holds no more of a sequence than its positions take once it has rested, until it is needed again."""
        if sequence in self._packed or sequence in self._rested or not self.lengths[sequence]:
            return
        for pool in self.pools.values():
            pool.truncate(sequence, self.lengths[sequence])
        self._rested[sequence] = monotonic()
        self._tidy()

    @property
    def oldest(self) -> float:
        """Since when the first memory has rested that is yet to be given back; inf: there is none."""
        return min([next(iter(self._rested.values()), np.inf), *(pool.oldest for pool in self.pools.values())])

    def give_back(self, until: float = np.inf) -> None:
        """Gives back what has rested since a time of `monotonic`."""
        for sequence in [sequence for sequence, since in self._rested.items() if since <= until]:
            del self._rested[sequence]
            self._pack(sequence)
        for pool in self.pools.values():
            pool.give_back(until)

    def _tidy(self) -> None:
        """Gives back what has rested for long."""
        if self.oldest <= (until := monotonic() - RESTED):
            self.give_back(until)

    def _pack(self, sequence: int) -> None:
        """Packs what the sequence's last page holds, and what rounding left of its first keys."""
        length, laid = self.lengths[sequence], list[tuple[int, int, int]]()
        for window, pool in self.pools.items():
            entries = [(entry, min(length, PAGE)) for entry in range(pool.lead)]
            entries += [(pool.end[sequence] - 1, length % PAGE)] * (length % PAGE > 0)
            for entry, n in entries:
                if pool.own(sequence, entry):
                    pool.lay_down(sequence, entry, self._held(pool.page(sequence, entry), window, n, entry < pool.lead))
                    laid.append((window, entry, n))
        self._packed[sequence] = laid

    def _wake(self, sequence: int, *, forget: bool = False) -> bool:
        """Unpacks what was packed when the sequence had rested; whether it was at rest."""
        if self._rested.pop(sequence, None) is not None:
            return True
        laid = self._packed.pop(sequence, None)
        for window, entry, n in laid or ():
            pool = self.pools[window]
            page = pool.page(sequence, entry)
            pool.pick_up(sequence, entry, [] if forget else self._held(page, window, n, entry < pool.lead))
        return laid is not None

    def addresses(self, layer: int) -> tuple[int, int, int, int, int]:
        """For the layer: the table of pages and its row's length, keys and values of the first head in page 0, and
        the bytes from a page to the next."""
        pool = self.pools[self._window_of[layer]]
        table = pool.table.ctypes.data + pool.lead * pool.table.itemsize
        keys = pool.data.ctypes.data + self._places[layer]
        key_bytes = CACHE_TYPES[self.type_k].page_bytes(self._layers[layer].head_dim)
        return table, pool.table.shape[1], keys, keys + key_bytes, pool.step

    def save(self, sequence: int, length: int) -> tuple[list[dict[str, int]], list[NDArray[np.uint8]]]:
        """For each pool which entries follow, and copies of their pages, uint8 (entries, stride)."""
        facts, chunks = [], []
        rested = self._wake(sequence)
        for window, pool in self.pools.items():
            first, end = pool.first[sequence], pool.entries(length)
            facts.append({"window": window, "first": first, "end": end, "stride": pool.stride})
            pages = pool.data[pool.table[sequence, first:end]]
            if length % PAGE and len(pages):
                self._clear(pages[-1], window, length % PAGE)
                if length < PAGE:
                    self._clear(pages[0], window, length)
            chunks.append(pages)
        if rested:
            self.rest(sequence)
        return facts, chunks

    def _clear(self, page: NDArray[np.uint8], window: int, used: int) -> None:
        """Zeros the positions of a page from `used` on: they may be of a sequence that this one was forked from."""
        whole = page.copy()
        page[:] = 0
        for part, kept in zip(self._held(page, window, used), self._held(whole, window, used), strict=True):
            part[...] = kept

    def _held(self, page: NDArray[np.uint8], window: int, n: int, keys_only: bool = False) -> list[NDArray[np.uint8]]:
        """What a page of a pool holds of its first n positions, as views of it."""
        found: list[NDArray[np.uint8]] = []
        start = 0
        own = [layer for layer, its_window in zip(self._layers, self._window_of, strict=True) if its_window == window]
        for layer, some in itertools.groupby(own):  # mostly all are alike
            count = len(list(some))
            part = page[start : (start := start + count * layer.page_bytes(self.type_k, self.type_v))]
            if layer.n_row:
                found.append(part.reshape(count, PAGE, -1)[:, :n])
            elif layer.n_head_kv:
                found += self._held_by_heads(part.reshape(count * layer.n_head_kv, -1), layer.head_dim, n, keys_only)
        return found

    def _held_by_heads(
        self, heads: NDArray[np.uint8], head_dim: int, n: int, keys_only: bool
    ) -> Iterator[NDArray[np.uint8]]:
        start = 0
        for side, name in (("k", self.type_k), ("v", self.type_v))[: 1 if keys_only else 2]:
            kind = CACHE_TYPES[name]
            middle, stop = (start + size for size in (head_dim * PAGE * kind.bits // 8, kind.page_bytes(head_dim)))
            codes, scales = heads[:, start:middle], heads[:, middle:stop]
            if side == "k":
                yield codes.reshape(len(heads), -1, PAGE, 4 if kind.is_packed else 2)[:, :, :n]
            elif not kind.is_packed:
                yield codes.reshape(len(heads), PAGE, -1)[:, :n]
            else:
                quads, rest = divmod(n, 4)
                codes = codes.reshape(len(heads), PAGE // 4, -1, 4)
                yield codes[:, :quads]
                if rest:
                    yield codes[:, quads, :, :rest]
            if kind.is_packed:
                yield scales.reshape(len(heads), -1, PAGE, 2)[:, :, :n]
            start = stop

    def matches(self, facts: list[dict[str, int]], length: int, n_bytes: int) -> bool:
        """Whether `restore` can take what `save` gave."""
        expected = 0
        for (window, pool), fact in zip(self.pools.items(), facts, strict=True):
            first, end = fact["first"], fact["end"]
            if (
                type(first) is not int
                or fact["window"] != window
                or fact["stride"] != pool.stride
                or end != pool.entries(length)
            ):
                return False
            held_from = max(0, first - pool.lead) * PAGE
            if not 0 <= first <= end or (first and (not window or held_from > max(0, length + 1 - window))):
                return False
            expected += (end - first) * pool.stride
        return expected == n_bytes

    def restore(self, sequence: int, facts: list[dict[str, int]], length: int, data: NDArray[np.uint8]) -> None:
        """Fills an empty sequence with what `save` gave."""
        start = 0
        for pool, fact in zip(self.pools.values(), facts, strict=True):
            pages = pool.adopt(sequence, fact["first"], length)
            stop = start + len(pages) * pool.stride
            pool.data[pages] = data[start:stop].reshape(len(pages), pool.stride)
            start = stop
        self.lengths[sequence] = length

    def repeatable(self, sequence: int) -> bool:
        """Whether a sequence is of whole pages, none of which has been given back."""
        length = self.lengths[sequence]
        return length > 0 and length % PAGE == 0 and not any(pool.first[sequence] for pool in self.pools.values())

    def repeat(self, sequence: int, length: int, n_batch: int) -> None:
        """Lets a repeatable sequence grow to `length` by copies of its pages, n_batch positions at a time."""
        n = n_pages(self.lengths[sequence])
        whole = {window: pool.data[pool.held(sequence)[pool.lead :]] for window, pool in self.pools.items()}
        while (start := self.lengths[sequence]) < length:
            self.grow(sequence, min(length, start + n_batch))
            for window, pool in self.pools.items():
                entries = np.arange(n_pages(start), n_pages(self.lengths[sequence]))
                pool.data[pool.table[sequence, pool.lead + entries]] = whole[window][entries % n]

    def keys(self, layer: int, sequence: int) -> NDArray[np.float32]:
        """float32 (n_head_kv, positions, head_dim): packed keys of 4 bits of a sequence that does not rest."""
        kind, pool = CACHE_TYPES[self.type_k], self.pools[self._window_of[layer]]
        kept = self._layers[layer]
        n_head_kv, head_dim, head_bytes = kept.n_head_kv, kept.head_dim, kept.head_bytes(self.type_k, self.type_v)
        pages = pool.held(sequence)[pool.lead :]
        start = self._places[layer]
        raw = pool.data[pages, start : start + n_head_kv * head_bytes].reshape(len(pages), n_head_kv, -1)
        n_bytes = head_dim * PAGE // 2
        codes = raw[..., :n_bytes].reshape(len(pages), n_head_kv, head_dim // BLOCK, 4, PAGE, 4)
        both = np.stack([codes & 15, codes >> 4], axis=3).astype(np.float32) - kind.offset
        scales = np.ascontiguousarray(raw[..., n_bytes : kind.page_bytes(head_dim)]).view(np.float16)
        scales = scales.reshape(len(pages), n_head_kv, head_dim // BLOCK, 1, 1, PAGE, 1).astype(np.float32)
        # (page, head, block, half, row, place, dimension) -> (head, page, place, block, half, row, dimension)
        values = (both * scales).transpose(1, 0, 5, 2, 3, 4, 6)
        return np.ascontiguousarray(values).reshape(n_head_kv, len(pages) * PAGE, head_dim)
