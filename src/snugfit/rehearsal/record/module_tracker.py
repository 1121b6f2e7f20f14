"""Track the `nn.Module` whose code runs, and count checkpointed regions and autograd Functions in Python.

In forward, the active module is the one whose forward method runs. In backward, it is the one whose forward
created the running autograd node.

A checkpointed region takes host time in addition to launching the recomputed kernels. So does a library's
autograd Function in Python (Liger, bitsandbytes), forward and backward.
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

# The cost of torch's and the core's Functions is in other constants. Some replace parts of torch that are C++
# on a GPU.
_NO_LIBRARY, _COUNTED = ("torch.", "snugfit."), f"{FOLDER}."
"""Prefixes of the modules whose autograd Functions are not counted, and of exceptions among them that are
counted.
"""


class ModuleTracker:
    """Tracker of the `nn.Module` whose code runs, by global module hooks."""

    def __init__(self) -> None:
        self.checkpoints = 0
        """Number of checkpointed regions that began since the last kernel."""
        self.intercepted = 0
        """Number of operators since the last kernel that selective checkpointing intercepted."""
        self.functions = 0
        """Number of autograd Functions of libraries that began since the last kernel, forward or backward."""
        self._calls = [0]  # a number for each active call of a module
        self._called = 0
        self._paths: list[str] = []
        self._names: dict[int, str] = {}
        self._sequence: list[int] = []
        self._sequence_path: list[str] = []
        self._with_kernels = 0  # active modules in which a kernel has run

    def name_modules(self, model: torch.nn.Module) -> None:
        """Name this model's modules by their dotted names; other modules are named by their class."""
        self._names = {id(module): name for name, module in model.named_modules()}

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Context in which the running module is tracked, and checkpointed regions and autograd Functions are
        counted."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        with contextlib.ExitStack() as undo:
            undo.callback(register_module_forward_pre_hook(self._enter).remove)
            # `always_call`, because checkpointing ends a recomputation early with an exception.
            undo.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            undo.enter_context(self._count_checkpoints())
            undo.enter_context(self._count_functions())
            yield

    def path(self, phase: str) -> str:
        """Return the name of the active module in this phase; empty outside of all modules."""
        if self._paths:
            return self._paths[-1]
        if phase == "backward":
            node = torch._C._current_autograd_node()
            if node is not None:
                # Autograd numbers its nodes as it creates them, so the last entry up to the number has the
                # node's module.
                at = bisect.bisect_right(self._sequence, node._sequence_nr()) - 1
                if at >= 0:
                    return self._sequence_path[at]
        return ""

    @property
    def call(self) -> int:
        """Number of the module call that runs now, the innermost one; 0 outside of all modules."""
        return self._calls[-1]

    def reset_counts(self) -> None:
        """Reset the counts since the last kernel: checkpointed regions, intercepted operators, autograd
        Functions."""
        self.checkpoints = self.intercepted = self.functions = 0

    def first_kernel_of(self) -> int:
        """Return the number of active modules without a kernel before this one. Count them as modules with a
        kernel from now on.
        """
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
        """Set the module name for autograd nodes that are created from now on."""
        self._sequence.append(torch._C._autograd._get_sequence_nr())
        self._sequence_path.append(path)

    @contextlib.contextmanager
    def _count_checkpoints(self) -> Iterator[None]:
        from torch.autograd.graph import saved_tensors_hooks
        from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

        init = saved_tensors_hooks.__init__

        # torch does not report checkpoints, but each creates such a pair of hooks, in forward and when it is
        # recomputed.
        def count(pair: Any, pack_hook: Hook, unpack_hook: Hook) -> None:
            self.checkpoints += 1
            init(pair, pack_hook, unpack_hook)

        def with_count(dispatch: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **keywords: Any) -> Any:
                # Selective checkpointing passes each operator through Python. A cached result never reaches
                # the recorder.
                self.intercepted += 1
                return dispatch(*arguments, **keywords)

            return run

        with contextlib.ExitStack() as patches:
            # A separate cost of the hooks per saved tensor was tried, and it explained no measurement.
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
            # `apply` is bound by hand: the original is a class method in Python, or a C function.
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
    module = function.__module__
    return module.startswith(_COUNTED) or not module.startswith(_NO_LIBRARY)
