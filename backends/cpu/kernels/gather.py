"""Sorts a step's rows by the expert that each goes to: every expert then has a run of slots, one for each of its rows.

The table that results is what the kernels of `experts.py` and `expert_tiles.py` walk over.
"""

from __future__ import annotations

from collections.abc import Callable

from edgert.backends.cpu.isa import Isa
from edgert.backends.cpu.simd import put_u32, put_word, u32_at, word

ARGUMENTS = (
    "ids",  # int64 (rows, n_used): the experts of every row of the step
    "shares",  # float32 (rows, n_used)
    "n_used",
    "n_expert",
    "first_row_at",  # address of the int64 first row of those that are sorted
    "n_rows_at",
    "unit",  # runs start at multiples of it
    "table",  # int64 (n_expert, 3): of each expert that has rows its number, its first slot, how many
    "n_active_at",  # where the number of such experts goes
    "n_slots_at",  # where the number of slots goes
    "rows",  # int64 (n_slots): the row of each slot
    "slot_shares",  # float32 (n_slots)
    "counts",  # int64 (n_expert) of scratch
)


def build(isa: Isa) -> Callable[[int, int, int], None]:
    """A kernel of one thread. A run's slots stand in the order of their rows; those that fill it up repeat the last."""

    def gather(thread, n_threads, a):
        if thread == 0:
            ids, shares, n_used, n_expert = word(a, 0), word(a, 1), word(a, 2), word(a, 3)
            first, n_rows = word(word(a, 4), 0), word(word(a, 5), 0)
            unit, table, rows, slot_shares, counts = word(a, 6), word(a, 7), word(a, 10), word(a, 11), word(a, 12)
            for i in range(n_expert):
                put_word(counts + 8 * i, 0)
            for i in range(first * n_used, (first + n_rows) * n_used):
                place = counts + 8 * word(ids, i)
                put_word(place, word(place, 0) + 1)
            n_active, slot = 0, 0
            for i in range(n_expert):
                count = word(counts, i)
                if count:
                    entry = table + 24 * n_active
                    put_word(entry, i)
                    put_word(entry + 8, slot)
                    put_word(entry + 16, count)
                    n_active += 1
                put_word(counts + 8 * i, slot)
                slot += (count + unit - 1) // unit * unit
            put_word(word(a, 8), n_active)
            put_word(word(a, 9), slot)
            for row in range(first, first + n_rows):
                for j in range(row * n_used, (row + 1) * n_used):
                    place = counts + 8 * word(ids, j)
                    at = word(place, 0)
                    put_word(place, at + 1)
                    put_word(rows + 8 * at, row)
                    put_u32(slot_shares + 4 * at, u32_at(shares + 4 * j))
            for i in range(n_active):
                begin, count = word(table, 3 * i + 1), word(table, 3 * i + 2)
                for at in range(begin + count, begin + (count + unit - 1) // unit * unit):
                    put_word(rows + 8 * at, word(rows, begin + count - 1))

    return gather
