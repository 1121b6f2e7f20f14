"""Replace torch functions during a simulation, so that `meta` tensors behave like tensors on the simulated
device.

Two kinds of override are active until the simulation ends:

1. At torch's dispatcher, kernels for the key AutogradMeta only, through the public `torch.library`. They
replace autocast, and composite operators whose C++ code depends on the device (dropout, attention, softmax,
rms_norm). CPU and CUDA tensors never reach these kernels, so other work of the process is unaffected.

2. In Python, functions whose result depends on a device's name. Modules of torch and transformers import them
by name, also long before a simulation. So the binding of every loaded module is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.errors import RehearsalError
from snugfit.rehearsal.device.attention_choice import Operands, order_in_force
from snugfit.rehearsal.device.autocast import KEY, SWITCH, Autocasting, WeightCache, overriding
from snugfit.rehearsal.device.composites import composites
from snugfit.rehearsal.device.notes import PolicyNotes
from snugfit.rehearsal.device.other_programs import replaced_by_eager, simulated_programs

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.device.policy import Policy


@contextlib.contextmanager
def in_force(policy: Policy, notes: PolicyNotes | None = None) -> Iterator[PolicyNotes]:
    """Context in which tensors on `meta` behave like tensors of the simulated device. Yield the object in
    which replaced functions record warnings and chosen kernels. Raise `RehearsalError` if a replacement has
    no effect.
    """
    import torch

    if _ACTIVE:
        raise RehearsalError(
            "A simulation is already running in this process. Only one can run at a time. Wait for it, "
            "or start another process."
        )
    notes = notes or PolicyNotes()
    cache = WeightCache(notes.claim)
    with contextlib.ExitStack() as undo:
        undo.callback(_ACTIVE.clear)
        _ACTIVE.append(True)
        try:
            # A simulation draws random numbers too (a loader's seed, the HF Trainer's). It must not change
            # the user's sequence.
            undo.enter_context(_preserve_rng())
            undo.enter_context(order_in_force(policy.attention_order))
            library = torch.library.Library("aten", "IMPL")
            undo.callback(library._destroy)
            kernels = composites(policy, notes)
            # Composite operators come first, since autocast registers its casts in front of them.
            with overriding():
                for name, kernel in kernels.items():
                    library.impl(name, kernel, KEY)
            autocasting = Autocasting(library, policy, kernels, cache)
            fill_dynamos_table()
            undo.enter_context(bindings(policy, cache, autocasting.begin, notes))
            undo.enter_context(simulated_programs(notes.doubt))
            undo.enter_context(built_as_on_a_device())
            # If torch moved a function, its override would have no effect and all predictions would be wrong
            # without an error.
            if policy not in _PROBED:
                _probe(policy)
                _PROBED.add(policy)
        except (AttributeError, ImportError, RuntimeError) as error:
            raise RehearsalError(missing_message(error)) from error
        # The attention kernels of the test are not those of the step.
        notes.attention.clear()
        yield notes


_ACTIVE: list[bool] = []

_PROBED: set[Policy] = set()
"""Device policies whose operator overrides passed their test in this process."""


@contextlib.contextmanager
def _preserve_rng() -> Iterator[None]:
    """Context that restores the states of all random generators of the process at its end."""
    import random

    import numpy
    import torch

    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=gpus):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


def _probe(policy: Policy) -> None:
    """Test each replaced operator or function of the simulation with one small example. Raise
    `RehearsalError` if a replacement has no effect.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.optim.optimizer import _default_to_fused_or_foreach

    x = torch.empty(2, 2, 8, 8, device="meta", requires_grad=True)
    weight = torch.empty(8, 8, device="meta", requires_grad=True)
    if policy.fuses_dropout:
        _expect("dropout", "NativeDropoutBackward" in str(torch.dropout(x, 0.5, True).grad_fn))
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        choice = policy.choose_attention(Operands(x, x, x, needs_grad=True))
        name = str(torch.nn.functional.scaled_dot_product_attention(x, x, x).grad_fn).lower()
    _expect("attention", choice == "math" or choice.split("_")[0] in name)
    with torch.autocast("meta", torch.bfloat16):
        low = torch.nn.functional.linear(x, weight)
        _expect("autocast", low.dtype == torch.bfloat16)
        if "softmax.int" in policy.autocast.fp32_result:
            _expect("autocast of softmax", torch.softmax(low, -1).dtype == torch.float32)
    _expect("autocast outside its region", torch.nn.functional.linear(x, weight).dtype == torch.float32)
    _, foreach = _default_to_fused_or_foreach([weight], differentiable=False)
    _expect("foreach optimizers", foreach)


def _expect(override: str, holds: bool) -> None:
    if not holds:
        import torch

        raise RehearsalError(
            f"torch {torch.__version__} does not accept snugfit's override of {override}, so a prediction "
            f"would be wrong. {TESTED}"
        )


TESTED = "snugfit is tested with torch 2.11 to 2.15. Install one of these."


def missing_message(error: Exception) -> str:
    """Return the message for a function or class of torch or transformers that is missing."""
    import torch
    import transformers

    return (
        f"torch {torch.__version__} or transformers {transformers.__version__} has no such name, "
        f"which a prediction needs: {error} ({type(error).__name__}). {TESTED}"
    )


@contextlib.contextmanager
def bindings(
    policy: Policy, cache: WeightCache, begin_autocast: Callable[[], None], notes: PolicyNotes
) -> Iterator[None]:
    """Context in which all loaded modules use replacements of device-dependent functions."""
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
        """Return True if the simulation's autocast is on; the default device is CUDA, as in peft."""
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

    if hasattr(moe, "_can_use_grouped_mm"):  # others choose in another way, or have no such kernel
        replaced[moe._can_use_grouped_mm] = lambda *operands: policy.uses_grouped_mm
    with (
        patch.object(torch, "clear_autocast_cache", clear_both),
        patch.object(torch.autocast, "__init__", on_the_switch),
        patch.object(torch, "is_autocast_enabled", is_on),
        patch.object(torch, "get_autocast_dtype", _of_the_switch(torch.get_autocast_dtype)),
        patch.object(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype(SWITCH)),
    ):
        _reset_if_new(replaced.keys())
        _rebind(replaced)
        try:
            yield
        finally:
            _rebind({new: old for old, new in replaced.items()})


def fill_dynamos_table() -> None:
    """Fill Dynamo's own table of functions that it need not trace.

    Dynamo fills it at its first lookup, and never again by itself. During a simulation, it would contain the
    replacement of `math.sqrt`.
    """
    if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.get_torch_obj_rule_map()


def _of_the_switch(dtype_of: Callable[[str], torch.dtype]) -> Callable[[str], torch.dtype]:
    """Return a replacement for `torch.get_autocast_dtype` that also accepts the device type `meta`."""
    return lambda device_type: dtype_of(SWITCH if device_type == "meta" else device_type)


# A search through every name of every module takes longer than a small simulation. So the found positions are
# cached, and a module is searched again only if its number of names has changed.

_SEARCHED_MODULES: dict[int, dict[str, Any]] = {}
"""Attribute dictionaries of the modules that were searched for replaced functions, by the module's id."""

_COUNTS: dict[int, int] = {}
"""Number of attributes of each searched module at the last search, in the order of the dictionaries."""

_MODULES: list[Any] = []
"""The modules that were loaded at the last search. The list keeps them alive, so that no other module gets
the same id."""

_REPLACED_IN: dict[tuple[int, str], dict[str, Any]] = {}
"""Attribute dictionaries of modules that contain a replaced function, by (id of the dictionary, attribute
name).
"""

_ORIGINALS: list[Any] = []
"""The original functions that the last search looked for."""


def _rebind(replacements: dict[Any, Any]) -> None:
    """In every loaded module, rebind the names of replaced functions to the values of `replacements`.

    Modules that were imported since the last search are searched too, so that they get the originals back.
    """
    by_id = {id(old): new for old, new in replacements.items()}
    if not _are_unchanged():
        _record_names(by_id)
    for (_, name), names in _REPLACED_IN.items():
        if (new := by_id.get(id(names.get(name)))) is not None:
            names[name] = new


def _are_unchanged() -> bool:
    """Return True if no module was loaded, and no name was added to one, since the last search for replaced
    functions.
    """
    if [*sys.modules.values()] != _MODULES:  # a list compares identities first
        return False
    return [*map(len, _SEARCHED_MODULES.values())] == [*_COUNTS.values()]


def _record_names(ids: Collection[int]) -> None:
    """Record the module attributes that are bound to replaced functions, given by id. Only new or changed
    modules are searched.
    """
    own_names = {original.__name__ for original in _ORIGINALS}
    modules = list(sys.modules.values())
    _MODULES[:] = modules
    for module in modules:
        names = getattr(module, "__dict__", None)
        if names is None or _COUNTS.get(id(names)) == len(names):
            continue
        _SEARCHED_MODULES[id(names)], _COUNTS[id(names)] = names, len(names)
        for name, value in list(names.items()):
            if id(value) in ids or name in own_names:  # the name may be bound to another object now
                _REPLACED_IN[id(names), name] = names


def _reset_if_new(originals: Collection[Any]) -> None:
    """Clear the recorded module attributes that are bound to replaced functions, if these functions are
    new.
    """
    if len(originals) == len(_ORIGINALS) and all(map(operator.is_, originals, _ORIGINALS)):
        return
    _ORIGINALS[:] = originals
    _SEARCHED_MODULES.clear()
    _COUNTS.clear()
    _MODULES.clear()
    _REPLACED_IN.clear()


DEVICE_OF_CONTEXT = "get_torch_context_manager_or_global_device"
"""Function of transformers that returns the device on which a model is constructed."""


@contextlib.contextmanager
def built_as_on_a_device() -> Iterator[None]:
    """Context in which models and adapters on `meta` are initialised and cast as on a real device.

    Libraries skip initialisation on `meta`. A part of it creates temporary tensors (Whisper's sinusoids,
    rotary frequencies), which leave gaps between the weights. In a measured Whisper, these gaps were half a
    percent of the reserved bytes. peft creates adapters in fp32 and casts them to the dtype of their layer
    and back, also with gaps. An initialisation that reads values fails here, and its rest is skipped.
    """
    from transformers import modeling_utils

    with contextlib.ExitStack() as undo:
        if hasattr(modeling_utils, DEVICE_OF_CONTEXT):  # other versions create models on any device
            import torch

            undo.enter_context(patch.object(modeling_utils, DEVICE_OF_CONTEXT, lambda: torch.device("cuda")))
        model: Any = modeling_utils.PreTrainedModel
        if hasattr(model, "initialize_weights"):
            undo.enter_context(
                patch.object(model, "initialize_weights", _until_error(model.initialize_weights))
            )
        if (tuners := sys.modules.get("peft.tuners.tuners_utils")) is not None:
            layer = tuners.BaseTunerLayer
            name = "_move_adapter_to_device_of_base_layer"
            undo.enter_context(patch.object(layer, name, _cast_too(getattr(layer, name))))
        yield


def _until_error(initialize: Any) -> Any:
    def initialize_what_goes(model: Any) -> None:
        with contextlib.suppress(NotImplementedError, RuntimeError):
            initialize(model)

    return initialize_what_goes


def _cast_too(event: Any) -> Any:
    """Return a replacement of peft's function that moves an adapter to its base layer's device and dtype; it
    also casts on `meta`.
    """
    import torch

    def move_and_cast(layer: Any, adapter_name: str, *arguments: Any, **keywords: Any) -> None:
        event(layer, adapter_name, *arguments, **keywords)
        weight = getattr(layer.get_base_layer(), "weight", None)
        if weight is None or not weight.is_meta or not weight.is_floating_point():
            return
        for name in layer.adapter_layer_names:
            part = getattr(layer, name, None)
            if isinstance(part, torch.nn.ModuleDict) and adapter_name in part:
                part[adapter_name] = part[adapter_name].to(dtype=weight.dtype)

    return move_and_cast
