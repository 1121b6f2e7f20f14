"""Python functions that answer by a device's name, answered for the policy's device during a rehearsal.

They are imported by name all over torch and transformers, also long before a rehearsal and also during one.
So every loaded module's binding is replaced, and at the end every binding is put back, wherever it is.

Looking through every name of every module takes longer than a small rehearsal. Where the functions were found
is therefore remembered, and a module is looked through again only when it has more or fewer names than then.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.rehearsal.device.autocast import SWITCH, WeightCache
from snugfit.rehearsal.device.other_programs import replaced_by_eager

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.device.notes import PolicyNotes
    from snugfit.rehearsal.device.policy import Policy


@contextlib.contextmanager
def bindings(
    policy: Policy, cache: WeightCache, begin_autocast: Callable[[], None], notes: PolicyNotes
) -> Iterator[None]:
    """Every loaded module's binding of the functions below replaced; all put back at the end."""
    import torch
    import torch.optim.optimizer
    import torch.utils._foreach_utils as foreach
    from transformers.utils import generic

    from snugfit.rehearsal.device.host_draws import replaced_draws, replaced_functions

    maybe_autocast = generic.maybe_autocast
    clear = torch.clear_autocast_cache
    autocast_init, is_autocast_enabled = torch.autocast.__init__, torch.is_autocast_enabled

    def clear_both() -> None:
        cache.entries.clear()
        clear()

    @functools.wraps(autocast_init)  # Dynamo reads its arguments from the signature
    def on_the_switch(self: Any, device_type: str, *arguments: Any, **keywords: Any) -> None:
        name = SWITCH if device_type in ("meta", "cuda") else device_type
        autocast_init(self, name, *arguments, **keywords)
        if name == SWITCH and self._enabled:
            begin_autocast()

    def is_on(device_type: str = "cuda") -> bool:
        """Without an argument, as peft asks it, the question is about CUDA, on which nothing runs here."""
        on_gpu = device_type == "cuda" and policy.runs_cudnn
        return bool(is_autocast_enabled(SWITCH if on_gpu or device_type == "meta" else device_type))

    def maybe_on_the_switch(device_type: str, *arguments: Any, **keywords: Any) -> Any:
        return maybe_autocast(SWITCH if device_type == "meta" else device_type, *arguments, **keywords)

    replaced: dict[Any, Any] = {
        maybe_autocast: maybe_on_the_switch,
        foreach._get_foreach_kernels_supported_devices: lambda: ["cuda", "xpu", "meta"],
        foreach._get_fused_kernels_supported_devices: lambda: ["cuda", "xpu", "mps", "cpu", "meta"],
        **replaced_by_eager(notes.doubt),
        **replaced_draws(notes.doubt, notes.phase),
        **replaced_functions(),
    }
    from transformers.integrations import moe

    if hasattr(moe, "_can_use_grouped_mm"):  # else transformers decides in another way, or has no such path
        replaced[moe._can_use_grouped_mm] = lambda *operands: policy.uses_grouped_mm
    with (
        patch.object(torch, "clear_autocast_cache", clear_both),
        patch.object(torch.autocast, "__init__", on_the_switch),
        patch.object(torch, "is_autocast_enabled", is_on),
        patch.object(torch, "get_autocast_dtype", _of_the_switch(torch.get_autocast_dtype)),
        patch.object(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype(SWITCH)),
    ):
        _look_for(replaced.keys())
        _rebind(replaced)
        try:
            yield
        finally:
            _rebind({new: old for old, new in replaced.items()})


def fill_dynamos_table() -> None:
    """Dynamo's own table of functions that it need not trace, which it fills when it first looks something
    up: filled during a rehearsal, it would know `math.sqrt` by what stands in for it, and never again by
    itself."""
    if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.get_torch_obj_rule_map()


def _of_the_switch(dtype_of: Callable[[str], torch.dtype]) -> Callable[[str], torch.dtype]:
    """The same question, asked about `meta` too, for which torch has no autocast."""
    return lambda device_type: dtype_of(SWITCH if device_type == "meta" else device_type)


_LOOKED_THROUGH: dict[int, tuple[dict[str, Any], int]] = {}
"""Modules' namespaces, by identity, and how many names each had when it was looked through."""

_MODULES: list[Any] = []
"""The loaded modules at that time. They stay alive for it: another could come to lie where one was."""

_FOUND: dict[tuple[int, str], dict[str, Any]] = {}
"""The namespaces, by identity and name, in which one of the functions was ever found, or may come to be."""

_ORIGINALS: list[Any] = []
"""Which functions were looked for."""


def _rebind(replacements: dict[Any, Any]) -> None:
    """In every loaded module, each name bound to a key of `replacements` is bound to its value."""
    by_id = {id(old): new for old, new in replacements.items()}
    if not _are_as_looked_through():
        _look_through(by_id)
    for (_, name), names in _FOUND.items():
        if (new := by_id.get(id(names.get(name)))) is not None:
            names[name] = new


def _are_as_looked_through() -> bool:
    """Whether the loaded modules are those that were last looked through, each with as many names."""
    modules = list(sys.modules.values())
    if len(modules) != len(_MODULES) or not all(map(operator.is_, modules, _MODULES)):
        return False
    known = _LOOKED_THROUGH.values()
    return [*map(len, (names for names, _ in known))] == [count for _, count in known]


def _look_through(ids: Collection[int]) -> None:
    """Notes where what has one of these ids stands in modules that are new or have other names."""
    own_names = {original.__name__ for original in _ORIGINALS}
    modules = list(sys.modules.values())
    _MODULES[:] = modules
    for module in modules:
        names = getattr(module, "__dict__", None)
        if names is None or _LOOKED_THROUGH.get(id(names), (None, -1))[1] == len(names):
            continue
        _LOOKED_THROUGH[id(names)] = names, len(names)
        for name, value in list(names.items()):
            if id(value) in ids or name in own_names:  # by its name another may stand there just now
                _FOUND[id(names), name] = names


def _look_for(originals: Collection[Any]) -> None:
    """Forgets where functions were found when these are others."""
    if len(originals) == len(_ORIGINALS) and all(map(operator.is_, originals, _ORIGINALS)):
        return
    _ORIGINALS[:] = originals
    _LOOKED_THROUGH.clear()
    _MODULES.clear()
    _FOUND.clear()
