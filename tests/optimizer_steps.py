"""Run steps of an optimizer over a few weights, on real tensors and on meta tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Call, OptimizerWish


def resolve(call: Call) -> Callable[..., Any]:
    module, _, name = call.path.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


class Births(TorchDispatchMode):
    """Storages that operators allocate, as (operator, bytes), in order. A read of a value returns 1."""

    def __init__(self) -> None:
        super().__init__()
        self.born: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        known = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in known:
                self.born.append((str(func), leaf.untyped_storage().nbytes()))
        if func.namespace == "bitsandbytes":
            self.born.append((str(func), 0))
        return out


@contextmanager
def shapes_of(wish: OptimizerWish) -> Iterator[None]:
    if wish.shapes is None:
        yield
        return
    with resolve(wish.shapes)(**wish.shapes.arguments):
        yield


def small_model(device: str) -> torch.nn.Module:
    """Return tables and matrices on both sides of bitsandbytes' 4,096 elements, some with partial blocks."""
    torch.manual_seed(0)
    with torch.device(device):
        return torch.nn.ModuleDict(
            {
                "table": torch.nn.Embedding(101, 67),
                "small_table": torch.nn.Embedding(4, 8),
                "wide": torch.nn.Linear(67, 129),
                "edge": torch.nn.Linear(64, 64),
                "below": torch.nn.Linear(63, 65),
                "norm": torch.nn.LayerNorm(67),
            }
        )


def three_steps(text: str, device: str) -> tuple[list[list[tuple[str, int]]], dict[str, Any]]:
    """Return births of three optimizer steps, and the final state: shape and dtype by parameter and name."""
    wish = Recipe.parse(text).setup().optimizer
    model = small_model(device)
    if wish.prepare:
        resolve(wish.prepare)(model, **wish.prepare.arguments)
    optimizer = resolve(wish.factory)(list(model.parameters()), lr=1e-3, **wish.factory.arguments)
    steps = []
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with Births() as births:
            optimizer.step()
        steps.append(births.born)
    state = {
        f"{name}.{key}": (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    return steps, state
