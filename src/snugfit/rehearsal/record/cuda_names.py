"""What a user's module asks of CUDA by name, answered as the GPU would.

A module of the user's own may say `x.cuda()`, `device="cuda"`, `if x.is_cuda`, `torch.cuda.synchronize()`.
In a rehearsal its tensors are on `meta`, and there may be no CUDA at all. So while such a module is rehearsed
for a GPU, devices named `cuda` are `meta` to every function of torch. To code that is neither torch's nor a
library's and asks, a tensor is on `cuda:0` while the model runs, and CUDA is there. What no rehearsal can
answer (how much memory is in use) is answered with 0, as a doubt.

Some models of transformers' own ask whether their weights are on `meta`, and make tensors on the host if so
(`makes_on_the_host`, LongT5's buckets). To their file, and to it alone, a tensor is on a GPU too.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from snugfit.rehearsal.device.notes import PolicyNotes
from snugfit.rehearsal.device.policy import CudaPolicy

LIBRARIES = frozenset({"torch", "snugfit", "transformers", "accelerate", "peft", "bitsandbytes", "datasets"})
"""Packages whose code is told the truth about its tensors."""


def _getter(name: str) -> Any:
    """The function by which a mode sees that this property is read."""
    return vars(torch._C.TensorBase)[name].__get__


_GPU, _META = torch.device("cuda", 0), torch.device("meta")
_PROPERTIES: dict[Any, Any] = {
    _getter("is_cuda"): True,
    _getter("is_meta"): False,
    _getter("device"): _GPU,
    torch.Tensor.get_device: 0,
}
_READINGS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
"""Functions of `torch.cuda` that tell how much memory is in use."""

_PLACES = frozenset({torch.Tensor.to, torch.Tensor.new_tensor, torch.Tensor.type})
_NONE_ON_META = re.compile(r"""device\.type != "meta"\s+else None\b""")


def makes_on_the_host(code: ModuleType) -> bool:
    """Whether a model's file takes no device for its tensors where its weights are on `meta`."""
    return _NONE_ON_META.search(inspect.getsource(code)) is not None


class CudaNames(TorchFunctionMode):
    """Devices named `cuda` are `meta`; `phase` gives that of the step. To the file called `only`, or else to
    the user's code, a tensor is on a GPU."""

    def __init__(self, phase: Callable[[], str], only: str = "") -> None:
        super().__init__()
        self._phase, self._only = phase, only

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PROPERTIES and args[0].is_meta and self._answers(sys._getframe(1)):
            return _PROPERTIES[func]
        if func is torch.Tensor.cuda:
            return args[0].to(_META)
        if func is torch.Tensor.pin_memory:
            return args[0]
        kwargs = {name: _on_meta(value) for name, value in kwargs.items()} if kwargs else {}
        if func in _PLACES:
            args = tuple(map(_on_meta, args))
        return func(*args, **kwargs)

    def _answers(self, frame: Any) -> bool:
        if self._phase() not in ("forward", "backward"):
            return False
        return frame.f_globals.get("__name__") == self._only if self._only else _asked_by_the_user(frame)


def _on_meta(value: Any) -> Any:
    named = isinstance(value, torch.device) and value.type == "cuda"
    return _META if named or (isinstance(value, str) and value.split(":")[0] == "cuda") else value


def _asked_by_the_user(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in LIBRARIES


class _TimedEvent:
    """What `torch.cuda.Event` is to a user's module."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Takes what an event takes, and times nothing."""

    def record(self, stream: Any = None) -> None:
        """Does nothing, for nothing runs."""

    def query(self) -> bool:
        """Says that everything has run."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds between two events: one."""
        return 1.0

    wait = synchronize = record


@contextlib.contextmanager
def cuda_names(policy: CudaPolicy, notes: PolicyNotes, wait: Callable[[], None]) -> Iterator[None]:
    """Within it, a user's module may ask for CUDA by name; `wait` is called where it waits for the device."""

    def synchronize(device: Any = None) -> None:
        wait()

    def bytes_in_use(*arguments: Any, **keywords: Any) -> int:
        notes.doubt("The model's code asks how much GPU memory is in use. The prediction answers 0.")
        return 0

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": synchronize,
        "get_device_capability": lambda device=None: policy.capability,
        "is_bf16_supported": lambda including_emulation=True: policy.capability >= (8, 0),
        "empty_cache": lambda: None,
        "set_device": lambda device: None,
        "Event": _TimedEvent,
        **dict.fromkeys(_READINGS, bytes_in_use),
    }
    with contextlib.ExitStack() as undo:
        for name, answer in answers.items():
            answer_user = _by_caller(getattr(torch.cuda, name), answer)
            undo.enter_context(patch.object(torch.cuda, name, answer_user))
        undo.enter_context(CudaNames(notes.phase))
        yield


def _by_caller(plain: Any, answer: Any) -> Any:
    """The answer for the user's code, and the plain function for libraries."""

    def ask(*arguments: Any, **keywords: Any) -> Any:
        chosen = answer if _asked_by_the_user(sys._getframe(1)) else plain
        return chosen(*arguments, **keywords)

    return ask
