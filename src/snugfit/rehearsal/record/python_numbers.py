"""Where numbers pass between torch and plain Python, and no operator tells of it.

Numbers leave by `.item()`, `.tolist()`, `.numpy()` and into text; those that were assumed are watched. And
they come in: `torch.tensor` of numbers makes a tensor on `meta` without any, which is given its numbers as a
shadow. (So does an index that is written as a list: `index_lists.py`.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._device import _device_constructors

from snugfit.rehearsal.record.assumed_float import AssumedFloat
from snugfit.rehearsal.record.questions import Questions
from snugfit.rehearsal.record.shadows import Shadows


@contextlib.contextmanager
def numbers_watched(questions: Questions, shadows: Shadows) -> Iterator[None]:
    """Within it, numbers that pass between torch and plain Python are seen."""
    item, tolist, numpy = torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy
    show, make = torch.Tensor.__format__, torch.tensor

    def read_and(read: Callable[..., Any]) -> Callable[..., Any]:
        def read_numbers(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            questions.read(tensor)
            return read(tensor, *arguments, **keywords)

        return read_numbers

    def read_one(tensor: torch.Tensor) -> Any:
        plain = not tensor.is_meta and not shadows.is_unsure(tensor)  # an optimizer's step counters
        return item(tensor) if plain else questions.item_of(tensor, item)

    def make_with_shadow(data: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        data = _numbers_of(data) if isinstance(data, (list, tuple)) else data
        tensor: torch.Tensor = make(data, *arguments, **keywords)
        if any(isinstance(one, AssumedFloat) for one in (data if isinstance(data, list) else [data])):
            if not tensor.is_meta:
                shadows.set_unsure(tensor)
        elif tensor.is_meta and not isinstance(data, torch.Tensor):
            shadows.set(tensor, make(data, dtype=tensor.dtype, device="cpu"))
        return tensor

    def show_number(tensor: torch.Tensor, how: str) -> str:
        if tensor.is_meta and tensor.dim() == 0:  # as on a device, and not as on `meta`
            return format(tensor.detach().item(), how)
        text: str = show(tensor, how)  # type: ignore[no-untyped-call]
        return text

    _device_constructors()  # which remembers the functions that make tensors, by identity
    methods: Any = {"item": read_one, "tolist": read_and(tolist), "numpy": read_and(numpy)}
    with (
        patch.multiple(torch.Tensor, **methods, __format__=show_number),
        patch.object(torch, "tensor", make_with_shadow),
    ):
        yield


def _numbers_of(data: list[Any] | tuple[Any, ...]) -> list[Any]:
    """Numbers of these, where tensors on `meta` are among them: torch would ask those out of our sight."""
    return [
        _numbers_of(one)
        if isinstance(one, (list, tuple))
        else one.item()
        if isinstance(one, torch.Tensor) and one.is_meta and not one.dim()
        else one
        for one in data
    ]
