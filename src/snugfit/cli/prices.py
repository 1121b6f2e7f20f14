"""The user's prices: a file of them, and single ones on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError

if TYPE_CHECKING:
    from snugfit.planning.fleet.prices import Prices

EXAMPLE = "Write lines such as `h200: 2.5`: a GPU's name, and USD for an hour of it."


def read_prices(file: Path | None, single: Sequence[str]) -> Prices:
    """The prices in `file` (YAML or JSON), and `NAME=PRICE` pairs, which are stronger. Raises `UsageError`
    and `GpuError` for what is no price of a GPU of the table."""
    from snugfit.planning.fleet.prices import Prices

    known = Prices.of(_document(file).items(), str(file)) if file else Prices()
    return known.with_(Prices.of(map(_pair, single), "--price"))


def _document(file: Path) -> dict[Any, Any]:
    from snugfit.user_files import load_json, load_yaml, read_text

    text = read_text(file, what="file of prices")
    document = (load_json if file.suffix.lower() == ".json" else load_yaml)(text, str(file))
    if not isinstance(document, dict) or not document:
        raise UsageError(f"{file}: this holds no prices. {EXAMPLE}")
    return document


def _pair(text: str) -> tuple[str, Any]:
    name, equals, price = text.rpartition("=")
    if not equals or not name.strip():
        raise UsageError(f"--price {text!r}: write NAME=PRICE, for example --price h200=2.5.")
    try:
        return name.strip(), float(price)
    except ValueError:
        return name.strip(), price.strip()
