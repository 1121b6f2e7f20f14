"""Compute the work of an operator's kernel on the device: floating-point operations, bytes moved, shapes.

FLOPs of matrix products, convolutions and attention come from torch's own registry
(`torch.utils.flop_counter`). It counts 2 per multiply-add, the convention of all published figures. Bytes are
counted exactly: each input is read once, each output written once, and an operand that is modified counts as
both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from snugfit.rehearsal.record.shadow import NotFollowed, View, tensors_in
from snugfit.rehearsal.trace.trace import (
    CASTS,
    GENERATED,
    MATRIX_PRODUCTS,
    STRIDED,
    TRANSPOSED,
    WITH_BIAS,
    WITH_DROPOUT,
)
from snugfit.units import MIB

if TYPE_CHECKING:
    from snugfit.rehearsal.device.policy import Policy


CONTRACTIONS = "tensor contractions"
NORMALISATIONS = "statistical normalisations"
ELEMENTWISE = "element-wise"
TF32 = "tf32"
GROUPS = (CONTRACTIONS, NORMALISATIONS, ELEMENTWISE)

_CONTRACTING = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "grouped_mm",
    "scaled_mm",
    "addmv",
    "mv",
    "dot",
    "einsum",
)
_NORMALISING = ("norm", "softmax", "sum", "mean", "var", "std", "amax", "argmax", "cumsum", "nll_loss")

LARGEST_CACHED = 50 * MIB
"""Size in bytes from which reading an operand across its rows transfers a whole memory sector per element.

It is the size of an H200's second-level cache. On one H200, T5's position bias of 16 MiB was added at full
speed. One of 64 MiB was added at a fifth of it (2026-11-22).
"""

MATRICES = 3
"""Number of matrix operands in a product. If a grouped product runs group by group, torch creates a view of
each matrix for each group.
"""


KEEPS_CONTEXT = MATRIX_PRODUCTS | {
    "aten::normal_",
    "aten::uniform_",
    "aten::randn",
    "aten::rand",
    "aten::arange",
    "aten::_scaled_dot_product_cudnn_attention",
}
"""Operators whose kernels leave reserved the address space that the CUDA driver reserved with the context."""


class KernelCost(NamedTuple):
    """The work of a kernel on the device: FLOPs, bytes and layout. The fields are those of `Kernel`."""

    flops: int
    nbytes: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    tensors: int
    layout: str
    leading: tuple[int, ...]


def releases_context(operator: str) -> bool:
    """Return True if the CUDA driver releases its reserved address space before the first launch of such a
    kernel.

    The driver reserves 414 MiB of the address space behind the process's first segment when it creates the
    context. After the release, segments of the allocator can use these addresses. So their order depends on
    earlier allocations (`prediction/allocator.py`). Each operator was run in a fresh process without caching
    (`results/h200-2026-11-22/holes.json`). An H200's driver released the space at `fill_`, `ones`, `zeros`,
    `cos`, a cast and efficient attention. It did not at the operators of `KEEPS_CONTEXT`, nor at copies from
    the host. An untested operator counts as releasing, because most kernels are element-wise like those
    above.
    """
    return operator not in KEEPS_CONTEXT


def name_of_call(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the operator's name, with a trailing `_` for a product that adds to its own output (`out=`)."""
    in_place = operator in WITH_BIAS and kwargs.get("out") is args[0]
    return f"{operator}_" if in_place else operator


@functools.lru_cache(maxsize=8192)
def group_of(operator: str) -> str:
    """Return the class of an operator by its work, such as matrix product or pointwise.

    The classes are those of "Data Movement Is All You Need" (Ivanov et al., arXiv 2007.00072): contractions,
    statistical normalisations, element-wise.
    """
    name = operator.rsplit("::", maxsplit=1)[-1].strip("_")
    contracts = any(word in name for word in ("attention", "convolution")) or name in _CONTRACTING
    if contracts and not operator.startswith(GENERATED):  # a generated name lists the fused operators
        return CONTRACTIONS
    if any(word in name for word in _NORMALISING):
        return NORMALISATIONS
    return ELEMENTWISE


def cost_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> KernelCost | None:
    """Return the work of this operator's kernel (FLOPs, bytes, ...), or None for views and for operators
    without a kernel."""
    if func.is_view or func._schema.name in _NO_KERNEL:
        return None
    only_written = _only_written(func)
    named = dict(zip(_argument_names(func), args, strict=False)) | kwargs
    inputs = list(tensors_in([value for name, value in named.items() if name not in only_written]))
    outputs = list(tensors_in(out))
    if not any(tensor.device.type == "meta" for tensor in (*inputs, *outputs)):
        return None
    # An operator may return an operand that it writes; it must not count twice as an output.
    returned = {id(tensor) for tensor in outputs}
    outputs += [
        tensor for tensor in tensors_in(_tensors_written(func, args, kwargs)) if id(tensor) not in returned
    ]
    moved = sum(map(_nbytes, (*inputs, *outputs)))
    gathered = inputs[_GATHERING.get(func._schema.name, len(inputs)) :][:1]
    for table in gathered:  # only the selected rows are read, not the whole table
        moved -= max(0, _nbytes(table) - sum(map(_nbytes, outputs)))
    # The backward pass needs only the shape of this operand, so its bytes are not moved.
    if func._schema.name in _UNREAD:
        moved -= _nbytes(inputs[1])
    flops = flops_of(func, args, kwargs, out)
    # Without a formula for its FLOPs, a kernel counts one per output element. Its bytes determine its
    # seconds.
    flops = sum(tensor.numel() for tensor in outputs) if flops is None else flops
    shapes = tuple(tuple(tensor.shape) for tensor in inputs[:3])
    # The first operand of `addmm` is the bias. The matrices after it determine the precision of the
    # arithmetic.
    operand = (inputs or outputs)[1 if func._schema.name in WITH_BIAS else 0]
    dtype, layout = _arithmetic(func, operand), _layout(func, args, kwargs, inputs, outputs)
    return KernelCost(flops, moved, shapes, dtype, len(inputs), layout, _leading(func, inputs, outputs))


def cost_of_generated(
    reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], layout: str
) -> KernelCost:
    """Return the work of a kernel that a compiler generated. It reads each of `reads` and writes each of
    `writes` once."""
    operands = [*reads, *writes]
    shapes = tuple(tuple(tensor.shape) for tensor in operands[:3])
    flops, dtype = sum(tensor.numel() for tensor in writes), str(operands[0].dtype)
    return KernelCost(flops, sum(map(_nbytes, operands)), shapes, dtype, len(operands), layout, ())


def _layout(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Any], outputs: list[Any]
) -> str:
    """Return the layout of a kernel's operands, on which its speed depends: see `Kernel.layout`."""
    if "attention" in func._schema.name:
        return WITH_DROPOUT if _argument(func, args, kwargs, "dropout_p") else ""
    if torch.Tag.pointwise in func.tags or func._schema.name in _COPYING:
        return _pointwise_layout([tensor for tensor in (*inputs, *outputs) if tensor.device.type == "meta"])
    return ""


def _leading(func: Any, inputs: list[Any], outputs: list[Any]) -> tuple[int, ...]:
    """Return the leading dimensions (strides) of a matrix product's operands, or () for other operators."""
    name = func._schema.name
    if name not in MATRIX_PRODUCTS:
        return ()
    matrices = [*(inputs[1:3] if name in WITH_BIAS else inputs[:2]), *outputs[:1]]
    # One of the last two strides is 1, and the other one is BLAS's leading dimension.
    return tuple(max(matrix.stride()[-2:]) for matrix in matrices if matrix.dim() > 1)


def _pointwise_layout(operands: list[Any]) -> str:
    """Return the layout of pointwise operands, by the rules of torch's TensorIterator.

    torch has one kernel for operands with equal strides, another that computes each element's offset, and a
    third that casts.
    """
    last = operands[-1]
    # TensorIterator merges the dimensions of dense operands with equal strides into one.
    same_layout = all(
        operand.shape == last.shape and operand.stride() == last.stride() for operand in operands
    ) and torch.ops.aten.is_non_overlapping_and_dense.default(last)
    if not same_layout:
        return TRANSPOSED if any(map(_across, operands)) else STRIDED
    floats = [operand.dtype for operand in operands if operand.is_floating_point()]
    narrows = len(operands) == 2 and floats[:1] == [torch.float32]  # torch has a separate kernel for it
    return CASTS if len(set(floats)) > 1 and not narrows else ""


def _across(operand: torch.Tensor) -> bool:
    """Return True if a kernel reads this large operand across its rows: consecutive elements of a read are
    not adjacent in memory.
    """
    is_strided = operand.dim() > 0 and operand.stride(-1) > 1 and operand.size(-1) > 1
    return is_strided and _nbytes(operand) > LARGEST_CACHED


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Return the value of an operator's argument by name, given or by default."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[at] if at < len(args) else kwargs.get(name, argument.default_value)
    return None


def reads_groups(func: Any, args: tuple[Any, ...], policy: Policy) -> bool:
    """Return True if a grouped product reads its groups on the host, and launches a product for each."""
    return func is torch.ops.aten._grouped_mm.default and not policy.fuses_groups(args[0].dtype)


def split_groups(args: tuple[Any, ...], kwargs: dict[str, Any], cost: KernelCost) -> list[KernelCost]:
    """Return the work of a grouped product (experts) split into one product per group, with groups of equal
    size. (M, K) by (G, K, N) is split by rows, (N, M) by (M, K) by the inner dimension.
    """
    ends = args[2] if len(args) > 2 else kwargs.get("offs")
    groups = args[0].size(0) if ends is None else ends.size(0)
    (rows, inner), columns = args[0].shape[-2:], args[1].shape[-1]
    if args[0].dim() == args[1].dim():
        # The groups' real sizes depend on data. Equal groups, rounded up, have about the same sum.
        inner = -(-inner // groups)
    else:
        rows = -(-rows // groups)
    shapes, leading = ((rows, inner), (inner, columns)), (inner, columns, columns)
    tensors = min(cost.tensors, 2)
    product = KernelCost(
        cost.flops // groups, cost.nbytes // groups, shapes, cost.dtype, tensors, "", leading
    )
    return [product] * groups


def copies_in(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True if this operator copies a tensor from the host to the device."""
    if func is _COPY:
        return bool(args[0].device.type != "cpu" and args[1].device.type == "cpu")
    return func is _TO_COPY and args[0].device.type == "cpu"


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that the operator writes, including those that it does not return."""
    return [
        args[at] if at < len(args) else kwargs[name]
        for at, name in _arguments_written(func)
        if at < len(args) or name in kwargs
    ]


@functools.cache
def _only_written(func: Any) -> frozenset[str]:
    """Return the names of arguments that the operator writes but does not read: keyword-only ones, and `out`
    at any position, as of bitsandbytes' operators.
    """
    schema = func._schema.arguments
    # An attention's backward pass has an `out` too, which it only reads.
    return frozenset(name for at, name in _arguments_written(func) if schema[at].kwarg_only | (name == "out"))


@functools.cache
def _argument_names(func: Any) -> tuple[str, ...]:
    """Return the names of the operator's arguments, in the order of its schema."""
    return tuple(map(attrgetter("name"), func._schema.arguments))


@functools.cache
def _arguments_written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return positions and names of the arguments that the operator writes."""
    return tuple(
        (at, argument.name)
        for at, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _arithmetic(func: Any, operand: torch.Tensor) -> str:
    """Return the dtype in which a kernel computes: its operand's dtype, or TF32 for some products and
    convolutions.
    """
    if operand.dtype is torch.float32 and func._schema.name in PRODUCTS:
        backends: Any = torch.backends
        backend = backends.cudnn.conv if "conv" in func._schema.name else backends.cuda.matmul
        return TF32 if backend.fp32_precision == TF32 else str(operand.dtype)
    return str(operand.dtype)


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """Return an operator's FLOPs by torch's registry, or None if it has no formula.

    The registry has no grouped products. Its formulas for attention do not support grouped queries: keys and
    values then count once per query head that uses them. They also count the half that a causal mask skips,
    and all tokens before a window, which are subtracted here.
    """
    if func._schema.name == "aten::_grouped_mm":
        return _grouped_flops(args[0], args[1])
    # The registry has only the out-of-place variants of operators.
    out_of_place = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::").rstrip("_"), None)
    formula = flop_registry.get(func._overloadpacket) or flop_registry.get(out_of_place)
    if formula is None:
        return None
    # Backward has the output's gradient in front of the query.
    first = 1 if "backward" in func._schema.name else 0
    if "attention" in func._schema.name and args[first].size(1) != args[first + 1].size(1):
        heads = args[first].size(1)
        ungrouped = [
            operand.new_empty((operand.size(0), heads, *operand.shape[2:]))
            for operand in args[first + 1 : first + 3]
        ]
        args = (*args[: first + 1], *ungrouped, *args[first + 3 :])
    args = tuple(
        operand for operand in args if not isinstance(operand, torch.dtype)
    )  # a product's `out_dtype`
    spared = 2 if _argument(func, args, kwargs, "is_causal") else 1
    whole = int(formula(*args, **kwargs, out_val=out)) // spared
    window = _argument(func, args, kwargs, "window_size_left")
    if spared == 1 or window is None or window < 0:
        return whole
    # A tile of queries reads the window of its first token, and the tile's own keys.
    share = min(1.0, (window + TILE) / max(1, _argument(func, args, kwargs, "max_k")))
    return int(whole * share * (2 - share))


def _grouped_flops(first: torch.Tensor, second: torch.Tensor) -> int:
    """Return the FLOPs of a product over groups (experts).

    The groups divide a dimension (rows, columns or inner dimension) if an operand has no group dimension.
    Those are (M, K) by (G, K, N), (G, M, K) by (K, N), and (M, K) by (K, N). In (G, M, K) by (G, K, N), each
    group is whole.
    """
    whole = first.size(0) if first.dim() == second.dim() == 3 else 1
    return 2 * whole * first.size(-2) * first.size(-1) * second.size(-1)


PRODUCTS = MATRIX_PRODUCTS | {"aten::convolution", "aten::convolution_backward"}
"""Operators on fp32 tensors that torch runs with cuBLAS and cuDNN, which may compute them in TF32."""

_TO_COPY = torch.ops.aten._to_copy.default
_COPY = torch.ops.aten.copy_.default

_COPYING = frozenset({"aten::_to_copy", "aten::clone", "aten::copy_"})

_GATHERING = dict.fromkeys(
    ("aten::embedding", "aten::index", "aten::index_select", "aten::gather", "aten::nll_loss_forward"), 0
)
"""Operators that read a few elements of a large operand, each with the index of that operand."""

_UNREAD = frozenset({"aten::nll_loss_backward"})
"""Operators that use only the shape of their second operand."""

_NO_KERNEL = frozenset(
    {
        "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::detach", "aten::alias",
        "aten::lift_fresh", "aten::new_empty", "aten::new_empty_strided", "aten::_unsafe_view",
        "prim::device", "aten::resize_",
    }
)  # fmt: skip


TILE = 128
"""Number of queries and of keys in a tile of FlashAttention. It is the size in the names of the kernels that
an H200 runs for RoBERTa-large (results/h200-2026-11-27/profile-roberta.json)."""

_ENDS = {"aten::_flash_attention_forward": 3, "aten::_flash_attention_backward": 6}
"""Index, by operator, of the argument with the cumulative sequence lengths of queries.

The next argument has those of keys. The two after it are the longest lengths of queries and of keys.
"""


def cost_by_lengths(
    cost: KernelCost | None,
    operator: str,
    args: tuple[Any, ...],
    view_of: Callable[[torch.Tensor], View | None],
) -> KernelCost | None:
    """Return the work of attention over sequences of several lengths, with corrected FLOPs if the cumulative
    lengths are known.

    FlashAttention computes tiles of `TILE` queries and keys. On tensors without data, torch's formula treats
    each sequence as long as the longest. A padded row of an encoder may be three sequences, two of them short
    or empty. Then the formula returns three times the FLOPs or more.
    """
    at = _ENDS.get(operator)
    if cost is None or at is None or args[at] is None:
        return cost
    ends = [_numbers(argument, view_of) for argument in args[at : at + 2]]
    if ends[0] is None or ends[1] is None:
        return cost
    lengths = [argument.diff() for argument in ends if argument is not None]
    # Sequences fill whole tiles, so their lengths are rounded up.
    queries, keys = (-(-length // TILE) * TILE for length in lengths)
    whole = len(lengths[0]) * int(args[at + 2]) * int(args[at + 3])
    # The formula's FLOPs are an upper bound, which rounding up to tiles must not exceed.
    share = min(1.0, int((queries * keys).sum()) / whole) if whole else 1.0
    return cost._replace(flops=int(cost.flops * share))


def _numbers(ends: torch.Tensor, view_of: Callable[[torch.Tensor], View | None]) -> torch.Tensor | None:
    view = view_of(ends) if ends.is_meta else None
    # Sequence ends that follow from weights have no value on the CPU.
    try:
        return None if view is None else view.tensor().long()
    except NotFollowed:
        return None
