"""Which module runs: the one whose forward is under way, and in backward the one whose forward made the
autograd node that runs.

Autograd numbers its nodes in the order in which they are made. So it is enough to note, at each border of a
module, which number comes next, and to look a running node's number up among the borders.
"""

from __future__ import annotations

import bisect
from typing import Any

import torch


class Whereabouts:
    """Follows a model's modules by global hooks."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._names: dict[int, str] = {}
        self._sequence: list[int] = []
        self._sequence_path: list[str] = []
        self._known = 0  # open modules in which a kernel has run

    def name(self, model: torch.nn.Module) -> None:
        """Modules of this model are called as it calls them, others by their class."""
        self._names = {id(module): name for name, module in model.named_modules()}

    def follow(self) -> list[Any]:
        """Follows from now on; gives the hooks, which somebody must remove."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        return [
            register_module_forward_pre_hook(self._enters),
            register_module_forward_hook(self._leaves, always_call=True),
        ]

    def path(self, phase: str) -> str:
        """The module that runs; nothing outside of all."""
        if self._paths:
            return self._paths[-1]
        if phase == "backward":
            node = torch._C._current_autograd_node()
            if node is not None:
                place = bisect.bisect_right(self._sequence, node._sequence_nr()) - 1
                if place >= 0:
                    return self._sequence_path[place]
        return ""

    def entered(self) -> int:
        """In how many modules the kernel that runs now is the first."""
        found = len(self._paths) - self._known
        self._known = len(self._paths)
        return found

    def _enters(self, module: torch.nn.Module, arguments: Any) -> None:
        name = self._names.get(id(module), type(module).__name__)
        self._paths.append(name)
        self._note(name)

    def _leaves(self, module: torch.nn.Module, arguments: Any, out: Any) -> None:
        if self._paths:
            self._paths.pop()
            self._known = min(self._known, len(self._paths))
        self._note(self._paths[-1] if self._paths else "")

    def _note(self, path: str) -> None:
        """Autograd nodes made from now on belong to `path`."""
        self._sequence.append(torch._C._autograd._get_sequence_nr())
        self._sequence_path.append(path)
