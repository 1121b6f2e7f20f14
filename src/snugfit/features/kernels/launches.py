"""Recording of the Triton kernels that Liger launches, instead of running them.

The rest of Liger is Python that allocates with torch, and runs on `meta` tensors as on a GPU. A launch is
recorded with the kernel's name and the bytes that it moves. Each tensor that the kernel loads from, or stores
to, counts once. A second pass over a block is assumed to hit the cache. The loaded and stored tensors are
read from the kernel's source, where pointers are parameters that offsets are added to.

Liger compares the type of its tensors' device with "cuda". The result decides the number of rows of partial
sums, and whether a product writes into an existing buffer. In a simulation the type is "meta", so that
constant is replaced in Liger's functions.

If a kernel has several settings, the first is launched. On a GPU Triton's autotuner times them all before the
first launch with each of its keys, in every process. It flushes the cache with a buffer of one size on any
GPU (`get_empty_cache_for_benchmark`, `triton/backends/nvidia/driver.py`). It clones the tensors that a kernel
changes.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
import textwrap
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from snugfit.hub_kernels import quiet
from snugfit.rehearsal.device.autocast import SWITCH
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.record.first_launches import times_anything
from snugfit.units import MIB

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.device.policy import Policy
    from snugfit.rehearsal.record.recorder import Recorder

_OPERATORS = "liger_kernel.ops"
_ATOMICS = ("atomic_add", "atomic_max", "atomic_cas", "atomic_xchg")
_LOADS, _STORES = ("load", *_ATOMICS), ("store", *_ATOMICS)

_FLUSHES = 256 * MIB
"""Bytes of the buffer that Triton's autotuner writes to flush a GPU's cache."""


class Access(NamedTuple):
    """Pointer parameters of a Triton kernel: those that it loads from, and those that it stores to."""

    loaded: frozenset[str]
    stored: frozenset[str]


@contextlib.contextmanager
def triton_launches(policy: Policy, recorder: Recorder) -> Iterator[None]:
    """Context in which launches of Triton kernels are recorded instead of run.

    If Triton or Liger is not imported, the context has no effect.
    """
    if "triton" not in sys.modules or _OPERATORS not in sys.modules:
        yield
        return
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        _note(recorder, kernel, args, kwargs)

    timed: set[Hashable] = set()

    def run_first(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
        key = id(tuner), *_key_of(tuner, given)
        # The autotuner times its configurations before the first launch with a new key, in every process.
        if isinstance(policy, CudaPolicy) and len(tuner.configs) > 1 and key not in timed:
            timed.add(key)
            _time_settings([given[name] for name in tuner.restore_value])
        return tuner.fn.run(*args, **{**kwargs, **tuner.configs[0].all_kwargs()})

    with contextlib.ExitStack() as undo:
        for kind in (JITFunction, InterpretedFunction):
            undo.enter_context(patch.object(kind, "run", run))
        undo.enter_context(patch.object(Autotuner, "run", run_first))
        undo.enter_context(quiet("transformers.configuration_utils"))  # Liger's reads would log messages
        if isinstance(policy, CudaPolicy):
            undo.enter_context(_as_on(policy))
        yield


def _time_settings(changes: Sequence[torch.Tensor]) -> None:
    """Simulate the memory of Triton's autotuning of a kernel: allocate and free copies of the tensors that it
    changes.
    """
    import torch

    if times_anything():
        beside = [torch.empty(_FLUSHES, dtype=torch.uint8, device="meta")]
        beside += [tensor.clone() for tensor in changes]


def _key_of(tuner: Any, arguments: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """Return the autotuner's cache key for a kernel's arguments (`Autotuner.run`,
    `triton/runtime/autotuner.py`)."""
    named = [arguments[name] for name in tuner.keys if name in arguments]
    # Triton's key contains the dtypes of all tensor arguments.
    dtypes = [str(arguments[name].dtype) for name in tuner.arg_names if hasattr(arguments.get(name), "dtype")]
    return *named, *dtypes


def _note(recorder: Recorder, kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    signature = _signature_of(kernel.fn)
    given = {name: value for name, value in kwargs.items() if name in signature.parameters}
    arguments = signature.bind_partial(*args, **given).arguments
    tensors = {name: value for name, value in arguments.items() if hasattr(value, "untyped_storage")}
    access = _access(kernel.fn)
    loaded = [tensor for name, tensor in tensors.items() if name in access.loaded]
    stored = [tensor for name, tensor in tensors.items() if name in access.stored]
    recorder.launch(kernel.fn.__name__.strip("_"), loaded, stored)


_signature_of = functools.cache(inspect.signature)


@functools.cache
def _access(function: Any) -> Access:
    """Return the parameters that a Triton kernel loads from and stores to, read from its source.

    Pointers are followed through assignments; a loaded value is no longer a pointer.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    roots = {argument.arg: {argument.arg} for argument in tree.args.args}
    assignments = [node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AugAssign))]
    for _ in range(2):  # a pointer that is moved at the end of a loop may be used at its beginning
        for node in assignments:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            pointers = _pointers(node.value, roots)
            for name in (
                argument.id
                for target in targets
                for argument in ast.walk(target)
                if isinstance(argument, ast.Name)
            ):
                roots.setdefault(name, set()).update(pointers)
    loaded: set[str] = set()
    stored: set[str] = set()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args:
            pointers = _pointers(call.args[0], roots)
            loaded |= pointers if call.func.attr in _LOADS else set()
            stored |= pointers if call.func.attr in _STORES else set()
    return Access(frozenset(loaded), frozenset(stored))


def _pointers(value: ast.expr, roots: Mapping[str, set[str]]) -> set[str]:
    """Return the names of the pointer parameters in an expression of a kernel's source; `roots` has those of
    each variable.
    """
    if isinstance(value, ast.Name):
        return set(roots.get(value.id, ()))
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Sub)):
        return _pointers(value.left, roots) | _pointers(value.right, roots)
    return set()


@contextlib.contextmanager
def _as_on(policy: CudaPolicy) -> Iterator[None]:
    """Context in which Liger's Python code behaves as on a given GPU, although tensors are on `meta`."""
    import liger_kernel.utils as liger
    import torch

    autocast_dtype = torch.get_autocast_dtype

    def properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            multi_processor_count=policy.common_choice(lambda gpu_policy: gpu_policy.multiprocessors)
        )

    def capability(device: Any = None) -> tuple[int, int]:
        return policy.common_choice(lambda gpu_policy: gpu_policy.capability)

    def dtype_of(device_type: str) -> torch.dtype:
        return autocast_dtype(SWITCH if device_type in ("cuda", "meta") else device_type)

    files = [module for name, module in sys.modules.items() if name.startswith(_OPERATORS)]
    functions = {
        id(value): value
        # Liger compares device types with "cuda", but in a simulation the type is "meta".
        for file in files
        for value in vars(file).values()
        if isinstance(value, FunctionType) and "cuda" in value.__code__.co_consts
    }
    with contextlib.ExitStack() as undo:
        undo.enter_context(patch.object(torch.cuda, "get_device_properties", properties))
        undo.enter_context(patch.object(torch.cuda, "get_device_capability", capability))
        undo.enter_context(patch.object(torch, "get_autocast_dtype", dtype_of))
        for file in files:
            if getattr(file, "infer_device_arch", None) is liger.infer_device_arch:
                undo.enter_context(
                    patch.object(file, "infer_device_arch", lambda: liger._infer_nvidia_arch(0))
                )
        for function in functions.values():
            code = function.__code__
            # The code object is replaced, because other modules refer to the function itself.
            undo.callback(setattr, function, "__code__", code)
            constants = tuple("meta" if constant == "cuda" else constant for constant in code.co_consts)
            function.__code__ = code.replace(co_consts=constants)
        yield
