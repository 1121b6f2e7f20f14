"""Bytes and seconds of collectives as measured, from data sheets, or estimated: the rows of `evidence.json`.

A row adds `value` times the count that its `formula` names, for its quantity and operator. Its condition must
be among those that hold. An empty operator or condition fits all.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any


@cache
def evidence() -> tuple[Mapping[str, Any], ...]:
    """Return the rows of `evidence.json`: measured or published bytes and seconds of exchanges between
    GPUs.
    """
    text = resources.files(__package__).joinpath("evidence.json").read_text(encoding="utf-8")
    return tuple(json.loads(text))


def total(
    quantity: str,
    operator: str = "",
    conditions: Collection[str] = (),
    counts: Mapping[str, float] = MappingProxyType({"once": 1}),
) -> float:
    """Return the sum of a quantity (bytes or seconds) over the rows of `evidence.json` for this operator and
    these conditions. `counts` are the values of the variables in their formulas, such as the number of GPUs.
    """
    return sum(
        float(row["value"]) * counts.get(row["formula"], 0)
        for row in _rows(quantity)
        if row["operator"] in ("", operator) and (not row["condition"] or row["condition"] in conditions)
    )


def devices(quantity: str) -> set[str]:
    """Return the keys of the GPU models on which a quantity was measured."""
    return {row["device"] for row in _rows(quantity)}


@cache
def _rows(quantity: str) -> tuple[Mapping[str, Any], ...]:
    return tuple(row for row in evidence() if row["quantity"] == quantity)
