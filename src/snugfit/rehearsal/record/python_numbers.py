"""Where numbers pass between torch and plain Python, and no operator tells of it.

Numbers leave by `.item()`, `.tolist()`, `.numpy()` and into text; those that were assumed are watched. And
they come in: `torch.tensor` of numbers makes a tensor on `meta` without any, and so does an index written as
a list (`x[:, [-1, 0]]`). Those tensors are given their numbers as shadows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

from snugfit.rehearsal.record.assumed_float import AssumedFloat
from snugfit.rehearsal.record.questions import Questions
from snugfit.rehearsal.record.shadows import Shadows


@contextlib.contextmanager
def numbers_watched(questions: Questions, shadows: Shadows) -> Iterator[None]:
    """Within it, numbers that pass between torch and plain Python are seen."""
    item, tolist, numpy = torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy
    getitem, show, make = torch.Tensor.__getitem__, torch.Tensor.__format__, torch.tensor

    def read_and(read: Callable[..., Any]) -> Callable[..., Any]:
        def read_numbers(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            questions.read(tensor)
            return read(tensor, *arguments, **keywords)

        return read_numbers

    def make_with_shadow(data: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        tensor: torch.Tensor = make(data, *arguments, **keywords)
        if isinstance(data, AssumedFloat):
            if not tensor.is_meta:
                shadows.set_unsure(tensor)
        elif tensor.is_meta and not isinstance(data, torch.Tensor):
            shadows.hold(tensor, make(data, dtype=tensor.dtype, device="cpu"))
        return tensor

    def index_of(part: Any) -> Any:
        if isinstance(part, list) and part and all(isinstance(one, int) for one in part):
            return make_with_shadow(part, device="meta")
        return part

    def get(tensor: torch.Tensor, index: Any) -> torch.Tensor:
        if type(index) in (tuple, list) and tensor.is_meta:
            index = tuple(map(index_of, index)) if type(index) is tuple else index_of(index)
        return getitem(tensor, index)

    def show_number(tensor: torch.Tensor, how: str) -> str:
        if tensor.is_meta and tensor.dim() == 0:  # as on a device, and not as on `meta`
            return format(tensor.detach().item(), how)
        text: str = show(tensor, how)  # type: ignore[no-untyped-call]
        return text

    _device_constructors()  # which remembers the functions that make tensors, by identity
    patched: Any = torch.Tensor
    patched.item = lambda tensor: questions.item_of(tensor, item)
    patched.tolist, patched.numpy, patched.__getitem__ = read_and(tolist), read_and(numpy), get
    patched.__format__ = show_number
    torch.tensor = make_with_shadow
    try:
        yield
    finally:
        del patched.item, patched.tolist, patched.numpy, patched.__getitem__
        patched.__format__ = show
        torch.tensor = make
