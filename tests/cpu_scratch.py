"""Allocations of a real run on the CPU that a trace does not hold: buffers of the CPU's own kernels.

Law 1 and law 7 remove them from both accounts before they compare them. Each block is born and freed inside
one call of one operator and has no counterpart on a GPU. The policy (`rehearsal/device`) covers the buffers
of a GPU's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aligned import Event

WRAPPER = "PythonSubclass"
"""The profiler's name for the Python code of a wrapper around tensors."""

LEAST = 512
"""Smallest size of a compared block, in bytes."""

ONEDNN = "oneDNN computes in another layout or wider than it stores, and converts on the way"
BLAS = "the CPU's matrix products copy operands whose strides they do not take, other strides than CUDA's"
PER_THREAD = "the CPU's kernel keeps a buffer for each of its threads"
CAST = "the CPU's element-wise kernels read one dtype only, and convert the other operand; CUDA's read both"
SUMS = "the CPU sums half precision that does not lie in order in fp32, and converts before and after"
COMPOSED = "on a CPU bitsandbytes composes torch's operators of what is one kernel on a GPU"
SCRATCH = {
    ("aten::mm", "aten::mm"): ONEDNN,
    ("aten::addmm", "aten::addmm"): ONEDNN,
    ("aten::bmm", "aten::bmm"): ONEDNN,
    ("aten::mm", "aten::clone"): BLAS,
    ("aten::addmm", "aten::clone"): BLAS,
    ("aten::addmm_", "aten::clone"): BLAS,
    ("aten::bmm", "aten::clone"): BLAS,
    ("autograd::engine::evaluate_function: AddBackward0/aten::sum", "aten::_to_copy"): SUMS,
    ("LinearFunctionForZeroStage3Backward/aten::sum", "aten::_to_copy"): SUMS,
    ("aten::sum", "aten::empty"): SUMS,
    ("aten::mean", ""): "the CPU sums half precision in fp32 and converts before and after",
    ("aten::mkldnn_convolution", ""): ONEDNN,
    ("aten::_convolution", ""): ONEDNN,
    ("aten::convolution_backward", ""): ONEDNN,
    ("aten::gelu_backward", ""): ONEDNN,
    (
        "aten::_slow_conv2d_forward",
        "",
    ): "the CPU unfolds the input of a convolution that oneDNN does not take",
    ("aten::native_batch_norm_backward", ""): PER_THREAD,
    ("aten::native_group_norm_backward", ""): PER_THREAD,
    ("aten::native_layer_norm_backward", "aten::resize_"): PER_THREAD,
    ("aten::_scaled_dot_product_flash_attention_for_cpu", ""): PER_THREAD,
    ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", ""): PER_THREAD,
    ("aten::embedding_dense_backward", "aten::clone"): "the CPU copies scattered indices after its result",
    ("aten::add", "aten::_to_copy"): CAST,
    ("aten::add_", "aten::_to_copy"): CAST,
    ("aten::mul", "aten::_to_copy"): CAST,
    ("bitsandbytes::optimizer_update_32bit", ""): COMPOSED,
    ("bitsandbytes::optimizer_update_8bit_blockwise", ""): COMPOSED,
    (
        "aten::masked_select",
        "aten::empty",
    ): "the CPU counts what comes before each element",
    ("aten::masked_select", "aten::_to_copy"): "the CPU sums the mask in int64 for the size of its result",
    ("aten::baddbmm", "aten::baddbmm"): ONEDNN,
    ("aten::baddbmm", "aten::clone"): BLAS,
    ("aten::addmm_", ""): "oneDNN packs a transposed operand of 16 bits",
    ("aten::_scaled_mm", ""): "the CPU multiplies 8-bit floats in fp32, and scales afterwards",
    ("aten::mul_", ""): CAST,
    ("aten::copy_", "aten::empty"): "the CPU transposes in tiles of 60 x 60",
    ("aten::native_dropout_backward", ""): "the CPU composes it of two products",
    ("aten::sort", "aten::arange"): "the CPU sorts positions beside values; CUDA's sort writes them itself",
}
"""Scratch of CPU kernels that a trace does not hold: born and freed inside one call of the first operator.
The second operator, if given, allocates it. `a/b` is an operator `a` that calls `b` directly."""

HOST_TABLES = 2048
"""bitsandbytes' two tables of 256 numbers: it builds them on the host before they move to the device of the
states. An optimizer with one moment uses one of them."""

IN_ANOTHER_ORDER = {
    "aten::convolution_backward": "oneDNN makes the gradients of weight and bias in another order than meta",
    "aten::native_dropout": "what AOTAutograd makes of dropout the CPU composes of a mask and two products",
}
"""Operators whose results are left out of both accounts."""


def compared(events: Sequence[Event]) -> list[Event]:
    """Return the events without those of the CPU's own kernels."""
    generator = torch.get_rng_state().numel()  # checkpointing saves the generator's state, on the host
    return [
        event
        for event in events
        if abs(event.nbytes) >= LEAST
        and not any(
            _is_inside(event, first, others) and (not inner or inner in event.operators[-3:])
            for name in event.inside
            for first, others, inner in _BY_OPERATOR.get(name, ())
        )
        and IN_ANOTHER_ORDER.keys().isdisjoint(event.operators)
        and not (abs(event.nbytes) == generator and not (event.operators or ("",))[-1].startswith("aten::"))
    ]


_BY_OPERATOR: dict[str, list[tuple[str, list[str], str]]] = {}
"""Entries of `SCRATCH` by their first operator: it, the operators that it calls, and the second operator."""
for _outer, _inner in SCRATCH:
    _first, *_others = _outer.split("/")
    _BY_OPERATOR.setdefault(_first, []).append((_first, _others, _inner))


def _is_inside(event: Event, first: str, others: list[str]) -> bool:
    """Return true if the first of these operators calls the others, each from C++ code and not through a
    tensor wrapper, which calls operators itself. The block is born and freed in one call of the first."""
    at = len(event.operators) - 1 - event.operators[::-1].index(first)
    called = event.operators[at + 1 : at + 1 + len(others)]
    return list(called) == others and WRAPPER not in event.operators[at:]
