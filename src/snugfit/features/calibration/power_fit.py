"""Constants of `prediction/power.py` for one GPU, from the rows of `power_probe.py`.

Each constant follows from the rows in which it dominates. No other constant is changed to fit a row:

- idle power: a kernel that only waits,
- energy of a byte: a sum of two tensors,
- energy of a FLOP: products and attention, after the idle power and the energy of their bytes,
- limit, and exponent of the clock: rows at the power limit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from snugfit.prediction.power import PowerRates

WAIT, SUM, HALF = "wait", "add", "half"
"""First words of the names of rows: a kernel that waits, a sum of two tensors, and a kernel that runs half of
the time."""

LIMITED_SHARE = 0.9
"""Share of the clock's readings with the reason `power` from which a row counts as power-limited."""

SMALLEST_FALL = 0.03
"""Smallest fall of the clock, as a share of the highest one, from which the exponent is computed."""


def fit_power(rows: Sequence[Mapping[str, Any]], known: PowerRates) -> PowerRates:
    """Return the power of the GPU with these rows. Its highest clock is the highest one that they have.

    Precisions without a row have the energy of `known`, scaled by the mean ratio of the measured ones.
    Without a row at the power limit, the limit and the exponent are those of `known`. Raises `ValueError` if
    a necessary row is missing.
    """
    highest_mhz = float(max((row["highest_mhz"] for row in rows), default=known.highest_mhz))
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_kind.setdefault(str(row["name"]).removeprefix(f"{HALF} ").split()[0], []).append(row)
    if missing := sorted({WAIT, SUM} - by_kind.keys()):
        raise ValueError(f"the power of {' and '.join(missing)} was not measured")
    idle = statistics.fmean(row["watts"] for row in by_kind[WAIT])
    byte = statistics.fmean((row["watts"] - idle) / _rate(row, "kernel_bytes") for row in by_kind[SUM])

    def flop(row: Mapping[str, Any]) -> float:
        arithmetic = row["watts"] - idle - byte * _rate(row, "kernel_bytes")
        # A FLOP takes energy in proportion to the clock.
        return float(arithmetic / _rate(row, "kernel_flops") * highest_mhz / row["mhz"])

    measured = {
        kind: statistics.fmean(map(flop, by_kind[kind])) for kind in known.flop_joules if kind in by_kind
    }
    ratios = [math.log(joules / known.flop_joules[kind]) for kind, joules in measured.items()]
    ratio = math.exp(statistics.fmean(ratios)) if ratios else 1.0
    limited = [row for row in rows if row.get("power_limited", 0) >= LIMITED_SHARE and not row["half"]]
    exponents = [
        math.log(row["launch_seconds"] / row["burst_seconds"]) / math.log(highest_mhz / row["mhz"])
        for row in limited
        if row["mhz"] < (1 - SMALLEST_FALL) * highest_mhz and row["launch_seconds"] > row["burst_seconds"]
    ]
    return replace(
        known,
        idle_watts=idle,
        byte_joules=byte,
        flop_joules={kind: measured.get(kind, joules * ratio) for kind, joules in known.flop_joules.items()},
        limit_watts=statistics.median(row["watts"] for row in limited) if limited else known.limit_watts,
        elasticity=statistics.median(exponents) if exponents else known.elasticity,
        highest_mhz=highest_mhz,
    )


def _rate(row: Mapping[str, Any], key: str) -> float:
    """Return the FLOPs or bytes per second of a row."""
    return float(row[key] / row["launch_seconds"])
