"""A cache of operator calls by shapes, so that equal calls are computed once.

On `meta`, an operator's kernel only computes shapes, strides and dtypes of its results. For many operators it
does so in Python, slower than a GPU computes the values. The kernel's cost (`kernels.py`) and its temporary
buffers (`device/scratch.py`) also follow from the operands' metadata, and take as long to compute. Layers,
micro-batches and steps repeat, so nearly every call has occurred before with operands of the same shapes. So
each call has one cache entry, with operator, operands' metadata and settings as its key.

Results do not depend on the simulated device, so one cache serves all simulations of the process.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from snugfit.rehearsal.device.shapes import SHAPE_FUNCTIONS
from snugfit.rehearsal.record.effects import MASK_INDEXING, SHAPED_BY_DATA, VALUE_READS, effect_of
from snugfit.rehearsal.record.kernels import PRODUCTS, KernelCost, cost_of

if TYPE_CHECKING:
    from snugfit.rehearsal.device.buffers import Scratch
    from snugfit.rehearsal.device.policy import Policy

LARGEST_CACHE = 200_000
"""Largest number of cached operator calls, each of about a kilobyte. One simulation has some hundreds of
different calls.
"""


class KnownCall:
    """Cached result, work (FLOPs, bytes) and temporary buffers of an operator on operands of certain
    shapes."""

    __slots__ = ("costs", "result", "scratch")

    def __init__(self) -> None:
        self.result: Any = None
        """Shape, strides and dtype of the result, or True if the operator works in place; None if nothing is
        cached."""
        self.costs: dict[Any, KernelCost | None] = {}
        """Work of the kernel (FLOPs and bytes) by the precision of fp32 products. The key is None for
        operators that do not depend on it.
        """
        self.scratch: dict[Any, Scratch] = {}
        """Temporary buffers of the kernel, by the number of the device policy (`_number_of`)."""


class Operator:
    """An operator with properties of its schema, and its cached calls."""

    __slots__ = (
        "aliasing",
        "asks",
        "by_masks",
        "calls",
        "effect",
        "func",
        "is_composite",
        "is_product",
        "is_view",
        "name",
        "shape_function",
        "shaped_by_data",
    )

    def __init__(self, func: Any) -> None:
        self.func = func
        self.name: str = func._schema.name
        self.is_view: bool = func.is_view
        self.is_composite = _is_composite(func)
        self.is_product = self.name in PRODUCTS
        self.aliasing = _aliasing(func)
        self.shape_function = SHAPE_FUNCTIONS.get(func)
        self.effect = effect_of(func)
        self.asks = func in VALUE_READS
        self.by_masks, self.shaped_by_data = func in MASK_INDEXING, func in SHAPED_BY_DATA
        self.calls: dict[Any, KnownCall] = {}


class ShapeCache:
    """Cache that runs operators on `meta` tensors and reuses results and kernels' work of equal calls."""

    def __init__(self) -> None:
        self._operators: dict[int, Operator] = {}  # by id, which hashes faster than an operator
        self._size = 0

    def operator(self, func: Any) -> Operator:
        """Return the cached properties and calls of this operator."""
        operator = self._operators.get(id(func))
        if operator is None:
            operator = self._operators[id(func)] = Operator(func)
        return operator

    def call(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KnownCall | None:
        """Return the cache entry of this operator call, or None if there is no reliable key.

        A key is reliable if the results' shapes depend only on the metadata of `meta` tensors and on plain
        arguments.
        """
        try:
            # Without a dtype argument, some results have the default dtype, which changes while a model is
            # built.
            key = _key(args), _key(kwargs.items()) if kwargs else (), torch.get_default_dtype()
        except _NotAKey:
            return None
        call = operator.calls.get(key)
        if call is None:
            # Clearing the cache is rare, and cheaper than recording the order of use at each call.
            if self._size >= LARGEST_CACHE:
                self._size = 0
                for known in self._operators.values():
                    known.calls.clear()
            call = operator.calls[key] = KnownCall()
            self._size += 1
        return call

    def run(
        self, operator: Operator, call: KnownCall | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of the operator on these meta operands, from the cache if possible."""
        if operator.shape_function is not None:
            return operator.shape_function(*args, **kwargs)
        aliasing = operator.aliasing
        # A view shares its operand's storage, so no template can recreate it.
        if aliasing == "other" or call is None:
            return operator.func(*args, **kwargs)
        if call.result is not None:
            return _make(call.result) if aliasing == "pure" else args[0] if aliasing == "in place" else None
        if aliasing != "pure":
            return _run_in_place(operator, call, args, kwargs)
        out = operator.func(*args, **kwargs)
        # The schema of some views hides their sharing (`aten::_unsafe_view`), so the storages are compared.
        if not _shares(out, (args, tuple(kwargs.values()))):
            call.result = _template(out)
        return out

    def cost(
        self,
        operator: Operator,
        call: KnownCall | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> KernelCost | None:
        """Return the work (FLOPs, bytes, ...) of an operator call's kernel, or None without a kernel."""
        if call is None:
            return cost_of(operator.func, args, kwargs, out)
        # Only fp32 products may run in TF32, so only their cost depends on the setting.
        depends = operator.is_product and args[0].dtype is torch.float32
        precision = _precision() if depends else None
        if precision not in call.costs:
            call.costs[precision] = cost_of(operator.func, args, kwargs, out)
        return call.costs[precision]


SHAPE_CACHE = ShapeCache()
"""The cache of all simulations of this process."""


class ScratchCache:
    """A cache of kernels' temporary buffers on one device."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        # A policy that compares GPUs must see each call, so it gets a number that no other cache entry has.
        self._number = _number_of(policy) if policy.remembers_scratch else next(_NUMBERS)

    def of(self, operator: Operator, call: KnownCall | None, args: tuple[Any, ...], out: Any) -> Scratch:
        """Return the temporary buffers of this operator call's kernel."""
        if call is None:
            return self.policy.scratch(operator.name, args, out)
        # a convolution's copies depend on the precision too
        key = (self._number, _precision()) if operator.is_product else self._number
        scratch = call.scratch.get(key)
        if scratch is None:
            scratch = call.scratch[key] = self.policy.scratch(operator.name, args, out)
        return scratch


_NUMBERS = itertools.count()


@functools.cache
def _number_of(policy: Policy) -> int:
    """Return a unique number of this policy, which hashes faster than the policy."""
    return next(_NUMBERS)


def _precision() -> Any:
    """Return the precision of fp32 matrix products that is set now, as a part of a cache key."""
    backends: Any = torch.backends
    return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision


def _run_in_place(operator: Operator, call: KnownCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if operator.aliasing == "of a list":
        args = _distinct_elements(args)
    before = _key(args[:1])
    out = operator.func(*args, **kwargs)
    # An operator that resizes its operand must run again each time.
    if (out is None or out is args[0]) and _key(args[:1]) == before:
        call.result = True
    return out


def _distinct_elements(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the operands, with lists reduced to one element for each distinct shape, stride and dtype.

    `meta` computes each element of a foreach operator alone, and a deep model has thousands of equal ones.
    """
    # Lists of equal length are processed together: the elements at one position form one call.
    columns = [arg for arg in args if isinstance(arg, (tuple, list)) and len(arg) == len(args[0])]
    rows = {_key(row): row for row in zip(*columns, strict=True)}
    cut = iter([list(column) for column in zip(*rows.values(), strict=True)] or [[] for _ in columns])
    return tuple(next(cut) if any(arg is column for column in columns) else arg for arg in args)


_META = torch.device("meta")


class _NotAKey(Exception):
    """Error: an operator's operand cannot be part of a cache key, so the call is not cached."""


def _aliasing(func: Any) -> str:
    """Return a word that describes how an operator's results share storage with its operands, by its schema.

    `pure` operators share no storage. `in place` operators return their first operand. `of a list` operators
    write into each tensor of a list and return nothing, as foreach optimizers do. All others are `other`.
    """
    schema = func._schema
    written = [argument.alias_info is not None for argument in schema.arguments]
    returned = [result.alias_info is not None for result in schema.returns]
    only_first = written[:1] == [True] and not any(written[1:])
    if func.is_view or not (returned or only_first):
        return "other"
    if not any(written) and not any(returned):
        return "pure"
    if only_first and not returned:
        return "of a list"
    if only_first and returned == [True] and str(schema.returns[0].type) == "Tensor":
        return "in place"
    return "other"


def _is_composite(func: Any) -> bool:
    """Return True if the operator only calls other operators, on every device."""
    keys, has_kernel, name = torch._C.DispatchKey, torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    composed = has_kernel(name, keys.CompositeImplicitAutograd) and not has_kernel(name, keys.CPU)
    return composed and name not in _KERNELS_OF_CUDA


_KERNELS_OF_CUDA = frozenset({"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"})
"""Operators that have kernels only on CUDA. They are missing in a torch without CUDA."""


_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Types of operator arguments that become parts of a cache key unchanged."""


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    key: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            key.append((kind, value))
        elif isinstance(value, torch.Tensor):
            if not value.is_meta:
                raise _NotAKey
            key.append((value.shape, value.stride(), value.dtype, value.storage_offset()))
        elif isinstance(value, (tuple, list)):
            key.append(_key(value))
        # The state of a generator changes with each call.
        elif isinstance(value, torch.Generator):
            raise _NotAKey
        else:
            key.append((kind, value))
    return tuple(key)


def _template(out: Any) -> Any:
    """Return a description of an operator's result (shape, strides, dtype) from which the cache recreates it;
    None if none can. A missing result (the gradient of a frozen weight) has an empty template.
    """
    if out is None:
        return ()
    if isinstance(out, torch.Tensor):
        result = (out.shape, out.stride(), out.dtype)
        if out.device.type != "meta" or out.storage_offset() or type(out) is not torch.Tensor:
            return None
        # A result in a larger storage than its shape needs would be recreated too small.
        whole = torch.empty_strided(*result[:2], dtype=out.dtype, device="meta")
        same = whole.untyped_storage().nbytes() == out.untyped_storage().nbytes()
        return result if same else None
    if isinstance(out, (tuple, list)):
        items = [_template(item) for item in out]
        return None if any(item is None for item in items) else (type(out), items)
    return None


def _shares(out: Any, operands: Any) -> bool:
    """Return True if a result of an operator shares the storage of an operand or of another result, as a view
    does.
    """
    results = list(_storages(out))
    # Two results in one storage could not be recreated one by one.
    return len(set(results)) < len(results) or not set(results).isdisjoint(_storages(operands))


def _storages(value: Any) -> Iterator[int]:
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage()._cdata
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _storages(item)


def _make(template: Any) -> Any:
    if not template:
        return None
    if isinstance(template[0], torch.Size):
        shape, stride, dtype = template
        return torch.empty_strided(shape, stride, dtype=dtype, device=_META)
    kind, items = template
    return kind(_make(item) for item in items)
