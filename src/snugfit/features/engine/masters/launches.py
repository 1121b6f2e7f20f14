"""The kernel launches of an update of master weights, as custom operators that a simulation can run on
tensors without data.

A simulated step calls an operator for each launch. The operator allocates nothing and moves the same bytes as
the kernel. A step on a GPU launches the kernels directly. Calling an operator with lists of hundreds of
tensors takes the host longer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from snugfit.errors import RecipeError
from snugfit.features.engine.masters.block import NORM_PROGRAMS

if TYPE_CHECKING:
    from snugfit.features.engine.masters.table import WeightTable

_KERNEL_ON_META = False
"""True while a GPU's step is simulated on `meta` tensors."""

OPERATORS = torch.library.Library("triton", "FRAGMENT")
"""The `torch.library` with the operators of these kernels, named as profiler traces name Triton kernels."""

for _name in ("adamw_of_weights", "adamw_with_8_bit_states"):
    OPERATORS.define(
        f"{_name}(Tensor(a!)[] weights, Tensor(b!)[] states, Tensor[] gradients, Tensor places, "
        "Tensor numbers) -> ()"
    )
OPERATORS.define("squares_of_gradients(Tensor[] gradients, Tensor places, Tensor(a!) sums) -> ()")
OPERATORS.define("norm_of_squares(Tensor sums, Tensor(a!) norm) -> ()")


def writes_in_place(*arguments: Any) -> None:
    """Return None, as the shape function of kernel launches that write their results in place."""


for _name in ("adamw_of_weights", "adamw_with_8_bit_states", "squares_of_gradients", "norm_of_squares"):
    OPERATORS.impl(_name, writes_in_place, "Meta")


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return True if Triton kernels update this tensor: it is on a GPU, or on `meta` in a
    simulation of one.
    """
    return tensor.is_cuda or (tensor.is_meta and _KERNEL_ON_META)


@contextlib.contextmanager
def shapes(*, on_gpu: bool = True) -> Iterator[None]:
    """Context of a simulation in which tensors on `meta` are treated as on a GPU, or without `on_gpu` as on a
    CPU.
    """
    global _KERNEL_ON_META
    before, _KERNEL_ON_META = _KERNEL_ON_META, on_gpu
    try:
        yield
    finally:
        _KERNEL_ON_META = before


def update_weights(
    table: WeightTable,
    numbers: torch.Tensor,
    norm: torch.Tensor | None,
    max_norm: float,
) -> None:
    """Launch one AdamW step for the weights of this table (`kernel.launch_update`)."""
    # An operator call with lists of hundreds of tensors takes the host longer than the kernel launch itself.
    if not numbers.is_meta:
        with triton_named():
            # Triton is imported at the first launch only.
            from snugfit.features.engine.masters import kernel

            kernel.launch_update(table, numbers, norm, max_norm)
        # The kernels change weights without autograd's knowledge, so their versions are increased here.
        torch.autograd.graph.increment_version(table.weights)
        # Copies of gradients are only needed until the kernel has read them.
        table.free_copies()
        return
    among = [number for number, has_one in enumerate(table.has_gradient) if has_one]
    states = [tensor for number in among for tensor in table.tensors_kept(table.states[number])]
    operators = torch.ops.triton
    update = operators.adamw_with_8_bit_states if table.group else operators.adamw_of_weights
    # A simulation records the tensors from which it computes the bytes that the kernel moves.
    update(
        [table.weights[number] for number in among], [state for state in states if state is not None],
        table.gradients(), table.places, numbers,
    )  # fmt: skip
    table.free_copies()


def norm_of(tables: Sequence[WeightTable], sums: torch.Tensor, norm: torch.Tensor) -> None:
    """Write the norm of the gradients in these tables, a scalar, from sums of squares (tables,
    `NORM_PROGRAMS`).
    """
    if norm.is_meta:
        for table, row in zip(tables, sums.unbind(), strict=True):
            torch.ops.triton.squares_of_gradients(table.gradients(), table.places, row)
        take_root(sums, norm)
        return
    with triton_named():
        from snugfit.features.engine.masters import kernel
    for table, row in zip(tables, sums.unbind(), strict=True):
        kernel.launch_sums(table, row)
    take_root(sums, norm)


def take_root(sums: torch.Tensor, norm: torch.Tensor) -> None:
    """Write the gradient norm, a scalar: the square root of the sum of all elements of `sums`."""
    if norm.is_meta:
        torch.ops.triton.norm_of_squares(sums, norm)
        return
    with triton_named():
        from snugfit.features.engine.masters import kernel
    kernel.launch_norm(sums, norm)


def new_sums(tables: Sequence[WeightTable]) -> torch.Tensor:
    """Return a tensor for the sums of squares of gradients (tables, `NORM_PROGRAMS`), in fp32."""
    return torch.empty((len(tables), NORM_PROGRAMS), dtype=torch.float32, device=tables[0].weights[0].device)


@contextlib.contextmanager
def triton_named() -> Iterator[None]:
    """Context for importing Triton kernels: if Triton is missing, it raises a `RecipeError` that names it."""
    try:
        yield
    except ImportError as fault:
        raise RecipeError(
            f"The update of weights with masters is a kernel that Triton compiles, which cannot be imported: "
            f"{fault}. Try: pip install triton, or the recipe 'bf16'."
        ) from None
