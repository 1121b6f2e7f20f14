"""Dropout masks in programs: the bits that `philox.keep_mask` draws in plain torch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def keep_tile(seed, site, rows, columns, drops, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BEGIN):  # type: ignore[no-untyped-def]
    """Return the mask of the remaining elements of a tile, (ROWS, COLUMNS).

    `rows` (ROWS) are its rows. `BEGIN` is its first column, a multiple of 8. `columns` is the width of a row,
    and `seed` an address. A row has a draw for each 8 columns.
    """
    GROUPS: tl.constexpr = COLUMNS // 8
    groups = BEGIN // 8 + tl.arange(0, GROUPS)
    # A counter per group of eight columns, as in `philox.py`.
    counters = rows[:, None] * ((columns + 7) // 8) + groups[None, :]
    zeros = counters * 0
    first, second, third, fourth = tl.philox(tl.load(seed), counters, zeros + site, zeros, zeros)
    # Joins interleave the words, so that neighbours are in the order of `philox.py`.
    even = tl.join(tl.join(first & 0xFFFF, third & 0xFFFF), tl.join(second & 0xFFFF, fourth & 0xFFFF))
    odd = tl.join(tl.join(first >> 16, third >> 16), tl.join(second >> 16, fourth >> 16))
    numbers = tl.reshape(tl.join(even, odd), (ROWS, COLUMNS))
    return numbers.to(tl.int32) >= drops
