"""Products of fp32 matrices in TF32, put onto what was rehearsed without: nothing differs but what such
products are computed in, so a plan rehearses once for both."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError

if TYPE_CHECKING:
    from snugfit.rehearsal.tape import Kernel, Tape


def under(matmul: str, tape: Tape) -> Tape:
    """A tape that was rehearsed with plain products of fp32 matrices, as it is under this precision."""
    changed = kernels_under(matmul, tape.kernels)
    return tape if changed is tape.kernels else replace(tape, kernels=changed)


def kernels_under(matmul: str, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """The same for kernels; the very same where there is no such product among them."""
    from snugfit.rehearsal.kernels import PRODUCTS, TF32

    if matmul == "ieee":
        return kernels
    if matmul != TF32:
        raise SnugfitError(f"a plan knows no products in {matmul!r}")
    found = [kernel.operator in PRODUCTS and kernel.dtype == "torch.float32" for kernel in kernels]
    if not any(found):
        return kernels
    return tuple(
        kernel._replace(dtype=TF32) if is_product else kernel
        for kernel, is_product in zip(kernels, found, strict=True)
    )
