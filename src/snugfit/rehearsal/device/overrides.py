"""A policy put in force: for the time of a rehearsal, `meta` tensors behave as the policy's device would.

Two kinds of override, both taken back when the rehearsal ends:

1. At torch's dispatcher, kernels for the key AutogradMeta only, through the public `torch.library`: composite
   operators whose C++ body asks the device (dropout, attention, softmax, rms_norm), and autocast. CPU and
   CUDA tensors never pass these kernels, so other work of the process is unharmed.
2. In Python, functions that answer by a device's name. They are imported by name all over torch and
   transformers, also long before a rehearsal, so every loaded module's binding is replaced, and every
   binding is put back, those of modules imported meanwhile too.

An override that no longer takes hold, because a torch release moved something, would make every figure
quietly wrong. So `_probe` runs one small example of each, once for each policy of a process, and compares
what came out; and something that is not there any more is named.

Random numbers that a rehearsal draws (a loader's seed, the HF Trainer's) are taken back too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from snugfit.errors import RehearsalError
from snugfit.rehearsal.device.attention_choice import Operands, order_in_force
from snugfit.rehearsal.device.autocast import KEY, Autocasting, WeightCache, overriding
from snugfit.rehearsal.device.bindings import bindings, fill_dynamos_table
from snugfit.rehearsal.device.building import built_as_on_a_device
from snugfit.rehearsal.device.composites import composites
from snugfit.rehearsal.device.notes import PolicyNotes
from snugfit.rehearsal.device.other_programs import rehearsed_instead
from snugfit.rehearsal.device.recurrent import flattened_weights

if TYPE_CHECKING:
    from snugfit.rehearsal.device.policy import Policy


@contextlib.contextmanager
def in_force(policy: Policy, notes: PolicyNotes | None = None) -> Iterator[PolicyNotes]:
    """Within it, meta tensors behave as the policy's device. Yields the notes that its overrides write on.
    Raises `RehearsalError` when an override does not take hold."""
    import torch

    if _ACTIVE:
        raise RehearsalError("A simulation is already running in this process. Only one can run at a time.")
    notes = notes or PolicyNotes()
    cache = WeightCache(notes.claim)
    with contextlib.ExitStack() as undo:
        undo.callback(_ACTIVE.clear)
        _ACTIVE.append(True)
        try:
            undo.enter_context(_random_numbers_kept())
            undo.enter_context(order_in_force(policy.attention_order))
            library = torch.library.Library("aten", "IMPL")
            undo.callback(library._destroy)
            kernels = composites(policy, notes)
            with overriding():
                for name, kernel in kernels.items():
                    library.impl(name, kernel, KEY)
            autocasting = Autocasting(library, policy, kernels, cache)
            fill_dynamos_table()
            undo.enter_context(bindings(policy, cache, autocasting.begin, notes))
            undo.enter_context(rehearsed_instead(notes.doubt))
            undo.enter_context(built_as_on_a_device())
            if policy.runs_cudnn:
                undo.enter_context(flattened_weights())
            if policy not in _PROBED:
                _probe(policy)
                _PROBED.add(policy)
        except (AttributeError, ImportError, RuntimeError) as error:
            raise RehearsalError(missing_message(error)) from error
        notes.attention.clear()
        yield notes


_ACTIVE: list[bool] = []

_PROBED: set[Policy] = set()
"""Policies whose overrides were seen to take hold in this process."""


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Restores the state of every generator of the process."""
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
    """One small example of each override; raises `RehearsalError` when one does not take hold."""
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


def _expect(what: str, holds: bool) -> None:
    if not holds:
        import torch

        raise RehearsalError(
            f"torch {torch.__version__} does not accept snugfit's override of {what}, so a prediction "
            f"would be wrong. {TESTED}"
        )


TESTED = "snugfit is tested with torch 2.11 to 2.15."


def missing_message(error: Exception) -> str:
    """What to say when something that a rehearsal relies on is not where it was."""
    import torch
    import transformers

    return (
        f"torch {torch.__version__} or transformers {transformers.__version__} does not have what a "
        f"prediction needs: {error} ({type(error).__name__}). {TESTED}"
    )
