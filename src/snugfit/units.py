"""Conversion of bytes and seconds to text, and of a user's text to bytes.

In the code bytes are `int` and seconds are `float`. Text has MiB or GiB (powers of two), the units of GPUs,
the allocator and nvidia-smi. A user's `16GB` means 16 * 10**9, since the written unit counts. A number
without a unit is refused rather than guessed.
"""

from __future__ import annotations

import math
import re

from snugfit.errors import UsageError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_UNITS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB,
}  # fmt: skip
_AMOUNT = re.compile(r"\s*([+-]?[0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_LARGEST = 1 << 50
"""Largest accepted amount, a pebibyte: more than any machine's memory, so larger amounts are typing
mistakes."""


def parse_bytes(text: str, *, quantity: str = "memory", alternative: str = "") -> int:
    """Return the bytes in text such as `24GiB`, `16000MB` or `1.5 GiB`.

    `alternative` ends the hint of an error with further notations. Raises `UsageError` for no unit, an
    unknown unit, zero, a negative amount, or more than a pebibyte.
    """
    hint = f"Write a number and a unit: 24GiB, 16GB, 16000MiB{alternative}."
    match = _AMOUNT.fullmatch(text)
    if not match:
        raise UsageError(f"{quantity}: {text!r} is not an amount of memory. {hint}")
    number, unit = float(match[1]), match[2].upper()
    if number <= 0:
        raise UsageError(f"{quantity}: {text!r} is not a positive amount. {hint}")
    if not unit:
        raise UsageError(f"{quantity}: {text!r} has no unit. Try {text.strip()}GiB. {hint}")
    if unit not in _UNITS:
        raise UsageError(f"{quantity}: {text!r} has the unknown unit {match[2]!r}. {hint}")
    amount = number * _UNITS[unit]
    if not math.isfinite(amount) or amount > _LARGEST:
        raise UsageError(f"{quantity}: {text!r} is more than any machine has. {hint}")
    if amount < 1:
        raise UsageError(f"{quantity}: {text!r} is less than a byte. {hint}")
    return int(amount)


def show_bytes(amount: int) -> str:
    """Return text such as `6.42 GiB`, `315.0 MiB`, `12.0 KiB` or `40 B`: four figures or fewer."""
    size = abs(amount)
    if size >= GIB:
        return f"{amount / GIB:.2f} GiB"
    if size >= MIB:
        return f"{amount / MIB:.1f} MiB"
    if size >= KIB:
        return f"{amount / KIB:.1f} KiB"
    return f"{amount} B"


def show_mib(amount: int) -> str:
    """Return whole MiB with thousands separators, as readers of nvidia-smi expect: `14,949`."""
    return f"{round(amount / MIB):,}"


def show_seconds(seconds: float) -> str:
    """Return text such as `1.23 s`, `45.1 ms` or `12 µs`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"


def show_per_cent(part: float, whole: float) -> str:
    """Return the difference of `part` from `whole` in per cent, signed: `-44.6 %`."""
    return f"{100 * (part - whole) / whole:+.1f} %" if whole else "n/a"
