"""Emulate CUDA for a user's module, so that code that names CUDA devices runs on `meta`.

A user's module may contain `x.cuda()`, `device="cuda"`, `if x.is_cuda` or `torch.cuda.synchronize()`. In a
simulation, its tensors are on `meta`, and CUDA may be missing. So while such a module is simulated for a GPU,
all functions of torch treat devices named `cuda` as `meta`. For code outside of torch and the libraries,
tensors are on `cuda:0` while the model runs, and CUDA is available.
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
"""Packages whose code gets `meta`, and not `cuda`, as the device of its tensors."""


def _getter(name: str) -> Any:
    """Return the function that `__torch_function__` receives for a read of this property of a tensor."""
    return vars(torch._C.TensorBase)[name].__get__


_GPU, _META = torch.device("cuda", 0), torch.device("meta")
_PROPERTIES: dict[Any, Any] = {
    _getter("is_cuda"): True,
    _getter("is_meta"): False,
    _getter("device"): _GPU,
    torch.Tensor.get_device: 0,
}
_READINGS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
"""Names of the functions of `torch.cuda` that return the amount of memory in use."""

_PLACES = frozenset({torch.Tensor.to, torch.Tensor.new_tensor, torch.Tensor.type})
# Some models of transformers create tensors on the host if their weights are on `meta` (LongT5's buckets).
_NONE_ON_META = re.compile(r"""device\.type != "meta"\s+else None\b""")


def makes_on_the_host(code: ModuleType) -> bool:
    """Return True if a model's source file creates tensors on the host while the weights are on `meta`."""
    return _NONE_ON_META.search(inspect.getsource(code)) is not None


class CudaNames(TorchFunctionMode):
    """A function mode that replaces devices named `cuda` by `meta` in arguments. `phase` returns the current
    phase of the step.

    For the module `only`, or by default for the user's code, tensors are on a GPU.
    """

    def __init__(self, phase: Callable[[], str], only: str = "") -> None:
        super().__init__()
        self._phase, self._only = phase, only

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A property is read from C, so the next frame is the code that reads it.
        if func in _PROPERTIES and args[0].is_meta and self._answers(sys._getframe(1)):
            return _PROPERTIES[func]
        if func is torch.Tensor.cuda:
            return args[0].to(_META)
        if func is torch.Tensor.pin_memory:
            return args[0]
        kwargs = {name: _on_meta(value) for name, value in kwargs.items()} if kwargs else {}
        # These accept the device as a positional argument too.
        if func in _PLACES:
            args = tuple(map(_on_meta, args))
        return func(*args, **kwargs)

    def _answers(self, frame: Any) -> bool:
        if self._phase() not in ("forward", "backward"):
            return False
        return frame.f_globals.get("__name__") == self._only if self._only else _called_by_user_code(frame)


def _on_meta(value: Any) -> Any:
    named = isinstance(value, torch.device) and value.type == "cuda"
    return _META if named or (isinstance(value, str) and value.split(":")[0] == "cuda") else value


def _called_by_user_code(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in LIBRARIES


class _TimedEvent:
    """A replacement for `torch.cuda.Event` in a user's module."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Accept the arguments of a CUDA event; a simulation measures no time."""

    def record(self, stream: Any = None) -> None:
        """Do nothing: a simulated event has no kernel to wait for."""

    def query(self) -> bool:
        """Return True: a simulated event has always occurred."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Return 1, in milliseconds: a simulation measures no time."""
        return 1.0

    wait = synchronize = record


@contextlib.contextmanager
def cuda_names(policy: CudaPolicy, notes: PolicyNotes, wait: Callable[[], None]) -> Iterator[None]:
    """Context in which a user's module runs on `meta` as on CUDA.

    `wait` is called if the module waits for the device.
    """

    def synchronize(device: Any = None) -> None:
        wait()

    def bytes_in_use(*arguments: Any, **keywords: Any) -> int:
        # The memory in use is unknown in a simulation.
        notes.doubt(
            "The model's code reads the GPU memory in use, which is 0 in a prediction. If memory "
            "depends on it, measure the step: snugfit measure."
        )
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
    """Return a function that calls `answer` if the user's code calls it, and `plain` if a library does."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        # Libraries must see the real state, or they would call CUDA for tensors on `meta`.
        chosen = answer if _called_by_user_code(sys._getframe(1)) else plain
        return chosen(*arguments, **keywords)

    return call
