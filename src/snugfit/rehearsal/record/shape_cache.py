"""The cache of calls by shapes: an operator that has run on such shapes once need not be worked out again.

On `meta` an operator's kernel only works out the shapes, strides and dtypes of its results, and for many
operators it does so in Python, slower than a GPU would compute the values. What the kernel costs
(`kernels.py`) and what scratch it takes (`device/scratch.py`) follow from the operands' metadata too, and
take as long to work out. Layers repeat, micro-batches repeat and steps repeat, so nearly every call has been
made before with operands of the same shapes. So there is one record of each call, found by operator,
operands' metadata and settings, which keeps

- its result, to be made again as an empty tensor;
- its cost, for products by the precision that is in force;
- its scratch, by policy.

The rest belongs to no policy (policies act above the shape functions), so one cache serves every rehearsal of
the process: a planner's thousand rehearsals work each call out once.

Results are kept of pure operators (whose results share no storage with an operand) and of operators that only
write into their first operand and leave its shape. Of a view never: its storage is its operand's. Some views
deny it in their schema (`aten::_unsafe_view`), so the storages themselves are compared, and not the schema.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from snugfit.rehearsal.device.shapes import SHAPE_FUNCTIONS
from snugfit.rehearsal.record.effects import ASKING, BY_MASKS, SHAPED_BY_DATA, effect_of
from snugfit.rehearsal.record.kernels import PRODUCTS, KernelCost, cost_of

if TYPE_CHECKING:
    from snugfit.rehearsal.device.buffers import Scratch
    from snugfit.rehearsal.device.policy import Policy

LARGEST_CACHE = 200_000
"""Calls that are kept, at about a kilobyte each; a rehearsal makes some hundreds of different ones."""


class KnownCall:
    """An operator on operands of certain shapes, and what was worked out of it."""

    __slots__ = ("costs", "result", "scratch")

    def __init__(self) -> None:
        self.result: Any = None
        """What makes the result again, or True where it is the first operand; None where nothing is known."""
        self.costs: dict[Any, KernelCost | None] = {}
        """By the precision of products of fp32; None for other calls."""
        self.scratch: dict[Any, Scratch] = {}
        """By a policy's number."""


class Operator:
    """An operator, what is often read of it, and its calls."""

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
        self.asks = func in ASKING
        self.by_masks, self.shaped_by_data = func in BY_MASKS, func in SHAPED_BY_DATA
        self.calls: dict[Any, KnownCall] = {}


class ShapeCache:
    """Runs operators on meta tensors and says what they cost, from memory where it can."""

    def __init__(self) -> None:
        self._operators: dict[int, Operator] = {}  # by id, which hashes faster than an operator does
        self._size = 0

    def operator(self, func: Any) -> Operator:
        """What is known of this operator."""
        operator = self._operators.get(id(func))
        if operator is None:
            operator = self._operators[id(func)] = Operator(func)
        return operator

    def call(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KnownCall | None:
        """The record of this call. None where its results' shapes may depend on more than the metadata of
        tensors on `meta` and what else is given."""
        try:
            # Without a dtype, some results take the default one, which models are built under.
            key = _key(args), _key(kwargs.items()) if kwargs else (), torch.get_default_dtype()
        except _NotAKey:
            return None
        call = operator.calls.get(key)
        if call is None:
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
        """What the operator gives on these meta operands."""
        if operator.shape_function is not None:
            return operator.shape_function(*args, **kwargs)
        aliasing = operator.aliasing
        if aliasing == "other" or call is None:
            return operator.func(*args, **kwargs)
        if call.result is not None:
            return _make(call.result) if aliasing == "pure" else args[0] if aliasing == "in place" else None
        if aliasing != "pure":
            return _run_in_place(operator, call, args, kwargs)
        out = operator.func(*args, **kwargs)
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
        """What this call's kernel costs; None where there is none."""
        if call is None:
            return cost_of(operator.func, args, kwargs, out)
        depends = operator.is_product and args[0].dtype is torch.float32
        precision = _precision() if depends else None
        if precision not in call.costs:
            call.costs[precision] = cost_of(operator.func, args, kwargs, out)
        return call.costs[precision]


SHAPE_CACHE = ShapeCache()
"""What every rehearsal of this process remembers."""


class ScratchCache:
    """What kernels take for themselves under one policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._number = _number_of(policy) if policy.remembers_scratch else next(_NUMBERS)

    def of(self, operator: Operator, call: KnownCall | None, args: tuple[Any, ...], out: Any) -> Scratch:
        """The scratch of this call."""
        if call is None:
            return self.policy.scratch(operator.name, args, out)
        # what a convolution copies depends on the precision too
        key = (self._number, _precision()) if operator.is_product else self._number
        scratch = call.scratch.get(key)
        if scratch is None:
            scratch = call.scratch[key] = self.policy.scratch(operator.name, args, out)
        return scratch


_NUMBERS = itertools.count()


@functools.cache
def _number_of(policy: Policy) -> int:
    """A number of this policy's own, which hashes faster than the policy does."""
    return next(_NUMBERS)


def _precision() -> Any:
    """What products of fp32 operands are computed in."""
    backends: Any = torch.backends
    return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision


def _run_in_place(operator: Operator, call: KnownCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if operator.aliasing == "of a list":
        args = _distinct_elements(args)
    before = _key(args[:1])
    out = operator.func(*args, **kwargs)
    if (out is None or out is args[0]) and _key(args[:1]) == before:
        call.result = True
    return out


def _distinct_elements(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the operands with their lists cut to elements of different metadata. `meta` computes each
    element of a foreach operator alone, and a deep model has thousands of equal ones."""
    columns = [arg for arg in args if isinstance(arg, (tuple, list)) and len(arg) == len(args[0])]
    rows = {_key(row): row for row in zip(*columns, strict=True)}
    cut = iter([list(column) for column in zip(*rows.values(), strict=True)] or [[] for _ in columns])
    return tuple(next(cut) if any(arg is column for column in columns) else arg for arg in args)


_META = torch.device("meta")


class _NotAKey(Exception):
    """An operand by which no call may be found again."""


def _aliasing(func: Any) -> str:
    """`pure`, `in place` (returns its first operand), `of a list` (writes into each tensor of it and returns
    nothing, as foreach optimizers do) or `other`, from the operator's schema."""
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
    """Whether it only calls other operators, on every device."""
    keys, has_kernel, name = torch._C.DispatchKey, torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    composed = has_kernel(name, keys.CompositeImplicitAutograd) and not has_kernel(name, keys.CPU)
    return composed and name not in _KERNELS_OF_CUDA


_KERNELS_OF_CUDA = frozenset({"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"})
"""What CUDA alone has kernels for, which a torch without CUDA does not know."""


_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Types of most arguments that are no tensors."""


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
        elif isinstance(value, torch.Generator):
            raise _NotAKey
        else:
            key.append((kind, value))
    return tuple(key)


def _template(out: Any) -> Any:
    """What makes the same again; None where nothing does. A result that is not there (the gradient of what is
    frozen) has an empty one."""
    if out is None:
        return ()
    if isinstance(out, torch.Tensor):
        result = (out.shape, out.stride(), out.dtype)
        if out.device.type != "meta" or out.storage_offset() or type(out) is not torch.Tensor:
            return None
        whole = torch.empty_strided(*result[:2], dtype=out.dtype, device="meta")
        same = whole.untyped_storage().nbytes() == out.untyped_storage().nbytes()
        return result if same else None
    if isinstance(out, (tuple, list)):
        items = [_template(item) for item in out]
        return None if any(item is None for item in items) else (type(out), items)
    return None


def _shares(out: Any, operands: Any) -> bool:
    """Whether a result lies in an operand's storage, or in another result's."""
    results = list(_storages(out))
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
