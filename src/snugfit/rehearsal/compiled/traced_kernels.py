"""Which kernels operators of a traced graph go to: what torch remembers of it, and has wrong on `meta`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def forget_traced_kernels() -> None:
    """Wipes what torch remembers of kernels that traced graphs go to."""
    import torch

    for packet in vars(torch.ops.aten).values():
        for overload in vars(packet).values() if hasattr(packet, "_qualified_op_name") else ():
            if isinstance(overload, torch._ops.OpOverload):
                overload._dispatch_cache.clear()


def composed_as_elsewhere(resolve_key: Callable[..., Any]) -> Callable[..., Any]:
    """Which kernel a traced operator goes to. torch gives some operators that are composed of others (a loss)
    a kernel for shapes in Python, and takes it for one that autograd stands above: on `meta` alone they would
    have no gradient. What has a kernel of its own on a device is not composed there."""
    import torch

    key = torch._C.DispatchKey
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

    def resolve(operator: Any, asked: Any) -> Any:
        composed = asked == key.AutogradMeta and isinstance(operator, torch._ops.OpOverload)
        if composed and not operator.has_kernel_for_dispatch_key(asked):
            name = operator.name()
            if has_kernel(name, key.CompositeImplicitAutograd) and not has_kernel(name, key.CPU):
                return key.CompositeImplicitAutograd
        return resolve_key(operator, asked)

    return resolve
