"""Definition of custom operators for the fused operations: a schema, a kernel launch on GPUs, and no work for
tensors without data.

They return nothing. Results are written into arguments after the schema's `*`, and a simulation counts these
as written and not read. Their names begin with `triton::`, as traces name kernels that Triton compiles at
their first launch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError
from snugfit.features.kernels.operations.shapes_on_cpu import is_on_cpu

if TYPE_CHECKING:
    import torch

NAMESPACE = "triton"


def has_kernel(tensor: torch.Tensor) -> bool:
    """Return True if operations on this tensor run a Triton kernel: on a GPU, or in a GPU's simulation."""
    # Tensors on `meta` represent those of a GPU, unless a CPU is simulated.
    return tensor.is_cuda or (tensor.is_meta and not is_on_cpu(tensor))


def activation_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of tensors between matrix products: autocast's if it is on, or that of `x`."""
    import torch

    kind = autocast_device(x)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def autocast_device(x: torch.Tensor) -> str:
    """Return the device type whose autocast applies; in a simulation it is the CPU's."""
    # A simulation switches autocast on for the CPU (`rehearsal/device/autocast.py`).
    return "cpu" if x.is_meta else x.device.type


def define(schema: str, program: str) -> Callable[..., None]:
    """Define an operator of torch, and return a function that calls it.

    `schema` has no namespace: `add_norm(Tensor x, *, Tensor(a!) y) -> ()`. With its first argument on a GPU,
    the operator calls the function of its name in `programs/PROGRAM.py` with all arguments. The kernels of
    that function write the tensors after `*`.
    """
    import torch

    name = schema.partition("(")[0]
    # Operators of a plain `Library` cost less host time than those of `custom_op`.
    library = _library()
    library.define(schema)
    library.impl(name, functools.partial(_launch, program, name), "CUDA")
    library.impl(name, _write_nothing, "Meta")
    operator: Callable[..., None] = getattr(getattr(torch.ops, NAMESPACE), name).default

    def run(first: torch.Tensor, *arguments: Any, **written: Any) -> None:
        # On a GPU the kernel is called directly, because torch's dispatcher costs host time.
        if first.is_cuda:
            program_of(program, name)(first, *arguments, **written)
        else:
            operator(first, *arguments, **written)

    return run


@functools.cache
def _library() -> torch.library.Library:
    import torch

    return torch.library.Library(NAMESPACE, "FRAGMENT")


def _launch(program: str, name: str, *arguments: Any, **written: Any) -> None:
    program_of(program, name)(*arguments, **written)


@functools.cache
def program_of(program: str, name: str) -> Callable[..., None]:
    """Return the function that launches an operation's Triton kernels. Raises `RecipeError` if Triton cannot
    be imported.
    """
    try:
        module = importlib.import_module(f"{__package__}.programs.{program}")
    except ImportError as fault:
        raise RecipeError(
            f"The kernels of 'fused' are compiled by Triton, which cannot be imported: {fault}. Try: pip "
            "install triton, or the recipe 'torch_kernels'."
        ) from None
    launch: Callable[..., None] = getattr(module, name)
    return launch


def _write_nothing(*arguments: Any, **written: Any) -> None:
    """Do nothing: for tensors without data, the caller of the operator has allocated the results already."""
