"""Where the host is in the model's code: which module runs, and how many checkpointed parts began.

The module is the one whose forward is under way, and in backward the one whose forward made the autograd node
that runs. Autograd numbers its nodes in the order in which they are made. So it is enough to note, at each
border of a module, which number comes next, and to look a running node's number up among the borders.

On the host a checkpointed part costs time of its own, besides the kernels that run again: when it begins, and
when it begins again in the backward pass, random number states of host and device are saved or restored.
(What its hooks do with each saved tensor was counted once too, and explained nothing that was measured.)
torch reports no checkpoints, but each makes a pair of hooks on saved tensors both times. So during a
rehearsal those pairs are counted. Of selective checkpointing's layers each operator goes through a dispatch
mode, in Python, and is counted there: those that are handed their result never reach the recorder.

An autograd Function that a library writes in Python, as Liger and bitsandbytes do, costs the host time beside
what it launches, forward and backward, and is counted when it begins; so are those of features. Torch's own
and those of the core are not: what they cost is in other constants, or they stand for a part of torch that is
no Function on a GPU.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from snugfit.feature_folders import FOLDER

Hook = Callable[[Any], Any]

_NO_LIBRARY, _COUNTED = ("torch.", "snugfit."), f"{FOLDER}."
"""Where autograd Functions stand that are not counted, and which of these are counted all the same."""


class ModuleTracker:
    """Follows a model's modules by global hooks."""

    def __init__(self) -> None:
        self.checkpoints = 0
        """Checkpointed parts that began since the last kernel; the recorder resets it."""
        self.intercepted = 0
        """Operators that selective checkpointing looked at since then."""
        self.functions = 0
        """Autograd Functions of libraries that began since then, forward or backward."""
        self._calls = [0]  # a number for each call of a module that is open
        self._called = 0
        self._paths: list[str] = []
        self._names: dict[int, str] = {}
        self._sequence: list[int] = []
        self._sequence_path: list[str] = []
        self._with_kernels = 0  # open modules in which a kernel has run

    def name_modules(self, model: torch.nn.Module) -> None:
        """Modules of this model are called as it calls them, others by their class."""
        self._names = {id(module): name for name, module in model.named_modules()}

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Within it, modules and checkpoints are followed."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        with contextlib.ExitStack() as undo:
            undo.callback(register_module_forward_pre_hook(self._enter).remove)
            undo.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            undo.enter_context(self._count_checkpoints())
            undo.enter_context(self._count_functions())
            yield

    def path(self, phase: str) -> str:
        """The module that runs; nothing outside of all."""
        if self._paths:
            return self._paths[-1]
        if phase == "backward":
            node = torch._C._current_autograd_node()
            if node is not None:
                at = bisect.bisect_right(self._sequence, node._sequence_nr()) - 1
                if at >= 0:
                    return self._sequence_path[at]
        return ""

    @property
    def call(self) -> int:
        """A number of the innermost call of a module that is under way; 0 outside of all."""
        return self._calls[-1]

    def forget_counts(self) -> None:
        """Counts from here on."""
        self.checkpoints = self.intercepted = self.functions = 0

    def first_kernel_of(self) -> int:
        """Of how many modules the kernel that runs now is the first."""
        modules = len(self._paths) - self._with_kernels
        self._with_kernels = len(self._paths)
        return modules

    def _enter(self, module: torch.nn.Module, arguments: Any) -> None:
        name = self._names.get(id(module), type(module).__name__)
        self._paths.append(name)
        self._called += 1
        self._calls.append(self._called)
        self._note(name)

    def _leave(self, module: torch.nn.Module, arguments: Any, out: Any) -> None:
        if self._paths:
            self._paths.pop()
            self._calls.pop()
            self._with_kernels = min(self._with_kernels, len(self._paths))
        self._note(self._paths[-1] if self._paths else "")

    def _note(self, path: str) -> None:
        """Autograd nodes made from now on belong to `path`."""
        self._sequence.append(torch._C._autograd._get_sequence_nr())
        self._sequence_path.append(path)

    @contextlib.contextmanager
    def _count_checkpoints(self) -> Iterator[None]:
        from torch.autograd.graph import saved_tensors_hooks
        from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

        init = saved_tensors_hooks.__init__

        def count(pair: Any, pack_hook: Hook, unpack_hook: Hook) -> None:
            self.checkpoints += 1
            init(pair, pack_hook, unpack_hook)

        def with_count(dispatch: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **keywords: Any) -> Any:
                self.intercepted += 1
                return dispatch(*arguments, **keywords)

            return run

        with contextlib.ExitStack() as patches:
            patches.enter_context(patch.object(saved_tensors_hooks, "__init__", count))
            for mode in (_CachingTorchDispatchMode, _CachedTorchDispatchMode):
                dispatch = with_count(mode.__torch_dispatch__)
                patches.enter_context(patch.object(mode, "__torch_dispatch__", dispatch))
            yield

    @contextlib.contextmanager
    def _count_functions(self) -> Iterator[None]:
        from torch.autograd.function import BackwardCFunction, Function

        forward: Any = vars(Function)["apply"]  # written in Python, and since torch 2.14 in C
        backward: Callable[..., Any] = BackwardCFunction.apply

        def apply(kind: type[Function], *arguments: Any, **keywords: Any) -> Any:
            self.functions += _is_counted(kind)
            return forward.__get__(None, kind)(*arguments, **keywords)

        def apply_backward(node: Any, *gradients: Any) -> Any:
            self.functions += _is_counted(node._forward_cls)
            return backward(node, *gradients)

        with (
            patch.object(Function, "apply", classmethod(apply)),
            patch.object(BackwardCFunction, "apply", apply_backward),
        ):
            yield


def _is_counted(function: type[Any]) -> bool:
    where = function.__module__
    return where.startswith(_COUNTED) or not where.startswith(_NO_LIBRARY)
