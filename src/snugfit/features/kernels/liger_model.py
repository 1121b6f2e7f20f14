"""Liger-Kernel applied to one model, without changes to the rest of the process.

`_apply_liger_kernel_to_instance` is Liger's own function, which the Trainer calls too. It binds forward
passes to the model's modules. It also replaces names in transformers' files, such as `apply_rotary_pos_emb`.
Then every later model of the process would run Liger's kernels, also with another recipe. So this module
restores the names. Modules of this model that use them get methods that call Liger's functions.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError
from snugfit.features.kernels import liger_table
from snugfit.hub_kernels import import_peft, no_hub_kernels
from snugfit.step.own_forward import OwnForward
from snugfit.versions import version_of

if TYPE_CHECKING:
    import torch

_FILES = "transformers.models."


def import_code() -> None:
    """Import peft and then Liger, which checks for an imported peft.

    Missing kernels of other devices are not logged. Liger looks for them at the first use of a kernel.
    """
    import_peft()
    with no_hub_kernels():
        import liger_kernel.transformers  # noqa: F401
    logging.getLogger("liger_kernel.backends").setLevel(logging.ERROR)


def refuse_without_triton(device: torch.device) -> None:
    """Raise `RecipeError` on a CPU, for which Triton has no compiler. Its interpreter is only for tests."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RecipeError("liger: Liger's kernels run on GPUs alone. Take 'torch_kernels' on a CPU.")


def use_liger(model: torch.nn.Module, **parts: bool) -> None:
    """Apply Liger's kernels to this model's modules.

    `parts` override Liger's defaults: True uses a kernel, False does not. Raises `RecipeError` for a model
    that Liger does not support, or on which it fails.
    """
    import_code()
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    wrapped: Any = model
    # Liger supports the classes of transformers, not adapters around them.
    base = wrapped.get_base_model() if hasattr(model, "peft_config") else wrapped
    model_type = str(getattr(getattr(base, "config", None), "model_type", type(base).__name__))
    if reason := liger_table.why_not_covered(model_type):
        raise RecipeError(reason)
    kinds = dict.fromkeys(type(module) for module in base.modules())
    files = dict.fromkeys(kind.__module__ for kind in kinds if kind.__module__.startswith(_FILES))
    # Liger replaces names in these modules, for every later model of the process.
    names = {name: dict(vars(sys.modules[name])) for name in files}
    # It also replaces forward passes of classes.
    forwards = {kind: vars(kind)["forward"] for kind in kinds if "forward" in vars(kind)}
    try:
        _apply_liger_kernel_to_instance(model=base, **parts)
        changed = {name: _changed_functions(sys.modules[name], before) for name, before in names.items()}
        bound = {kind: vars(kind)["forward"] for kind in forwards if vars(kind)["forward"] != forwards[kind]}
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        version = version_of("liger-kernel")
        raise RecipeError(
            f"Liger {version} fails on {type(base).__name__}: {error}. Try 'torch_kernels'."
        ) from error
    finally:
        # Names are restored even after an error. Otherwise later models would run some of Liger's kernels.
        for name, before in names.items():
            vars(sys.modules[name]).update(before)
        for kind, forward in forwards.items():
            if vars(kind)["forward"] != forward:
                kind.forward = forward
    for module in base.modules():
        if type(module) in bound:
            # Only this model's modules get Liger's forward passes.
            module.forward = OwnForward(bound[type(module)], module)
    for name, functions in changed.items():
        if functions:
            _bind(base, sys.modules[name], functions)


def _changed_functions(file: ModuleType, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the functions of a modeling file that Liger replaced, by name.

    Replaced classes do not matter: they belong to models that are built later.
    """
    return {
        name: value
        for name, value in vars(file).items()
        if isinstance(value, FunctionType) and before.get(name) is not value
    }


def _bind(model: torch.nn.Module, file: ModuleType, changed: Mapping[str, Any]) -> None:
    """Give the model's modules copies of their methods that call Liger's functions in place of those of a
    modeling file. Raises `RecipeError` where other functions of the file call them.
    """
    helpers = [value for value in vars(file).values() if isinstance(value, FunctionType)]
    # A function outside of a class has one namespace for all models of the process.
    if any(_looks_up(helper, file, changed) for helper in helpers):
        raise RecipeError(
            f"Liger changes {', '.join(sorted(changed))} for every model of a process, and snugfit cannot do "
            f"it for one {type(model).__name__}. Try liger(rope=false)."
        )
    # The method gets a namespace of its own, in which it finds Liger's functions.
    names = {**vars(file), **changed}
    kinds = dict.fromkeys(map(type, model.modules()))
    affected = {
        kind: [entry for entry in _methods(kind) if _looks_up(entry[1], file, changed)] for kind in kinds
    }
    for module in model.modules():
        for name, function in affected[type(module)]:
            if name not in vars(module):
                method = FunctionType(
                    function.__code__, names, name, function.__defaults__, function.__closure__
                )
                method.__kwdefaults__ = function.__kwdefaults__
                vars(module)[name] = OwnForward(method, module)


def _methods(kind: type[Any]) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods of a class by name, without decorators."""
    # Inherited methods may use these functions too.
    members: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        members |= vars(base)
    for name, method in members.items():
        # The code of a decorated method is in `__wrapped__`.
        function = getattr(method, "__wrapped__", method)
        if isinstance(function, FunctionType):
            yield name, function


def _looks_up(function: FunctionType, file: ModuleType, changed: Mapping[str, Any]) -> bool:
    return function.__globals__ is vars(file) and not changed.keys().isdisjoint(function.__code__.co_names)
