"""Dropout of rows by seed, without the scale of the remaining elements, which callers fold into a factor.

The mask is drawn again where it is needed (`philox.py`), and never stored.
"""

from __future__ import annotations

import torch

from snugfit.features.kernels.operations.operators import define, has_kernel
from snugfit.features.kernels.operations.philox import keep_mask

_DROP_ROWS = define(
    "drop_rows(Tensor rows, Tensor seed, int site, int drops, *, Tensor(a!) out) -> ()", "dropped_rows"
)
_ADD_DROPPED_PRODUCT = define(
    "add_dropped_product(Tensor(a!) into, Tensor left, Tensor right, Tensor seed, int site, int drops) -> ()",
    "dropped_rows",
)


def drop_rows(rows: torch.Tensor, seed: torch.Tensor, site: int, drops: int) -> torch.Tensor:
    """Return rows (T, H) with zeros in the place of dropped elements.

    `seed` is one int64. `site` distinguishes masks of one seed, and `drops` of 65,536 draws drop an element.
    """
    if not has_kernel(rows):
        return rows * keep_mask(seed, site, len(rows), rows.size(1), drops)
    out = torch.empty_like(rows)
    _DROP_ROWS(rows, seed, site, drops, out=out)
    return out


def add_dropped_product(
    into: torch.Tensor, left: torch.Tensor, right: torch.Tensor, seed: torch.Tensor, site: int, drops: int
) -> None:
    """Add the product left @ right.T, (T, k) and (H, k), to rows (T, H) in place, but for dropped elements
    (`drop_rows`).
    """
    if has_kernel(into):
        # The product never exists in memory.
        _ADD_DROPPED_PRODUCT(into, left, right, seed, site, drops)
    else:
        product = torch.mm(left, right.t())
        into.add_(product * keep_mask(seed, site, len(product), product.size(1), drops))
