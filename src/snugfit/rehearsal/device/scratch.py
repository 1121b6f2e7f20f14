"""Temporary GPU memory that kernels allocate and free while they run.

Each rule returns allocations and frees in order, with markers for the operator's own outputs (`OUTPUTS`,
first by default). The rules come from torch's sources if a source exists. They were compared with allocator
histories recorded on one H200 (sm_90, 132 multiprocessors, torch 2.11). Temporary memory without a source and
without a recording is not modelled; it affects reserved bytes only.

`_COMPOSED` has the rules for every device, because torch composes one dispatched operator from several.
`CUDA_RULES` has the rules of CUDA's kernels, to which features add their own during a simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from snugfit.rehearsal.device import convolution, indexing, sorting
from snugfit.rehearsal.device.buffers import OUTPUTS, Buffer, GpuSize, Scratch, nest


def composed_scratch(operator: str, arguments: Sequence[Any], out: Any) -> Scratch:
    """Return the temporary buffers of an operator that torch composes from others on every device."""
    rule = _COMPOSED.get(operator)
    return rule(arguments, out) if rule else ()


def cuda_scratch(operator: str, arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    """Return the temporary buffers that the CUDA kernel of this operator allocates."""
    rule = CUDA_RULES.get(operator)
    return rule(arguments, out, gpu) if rule else composed_scratch(operator, arguments, out)


def _safe_softmax(arguments: Sequence[Any], out: Any) -> Scratch:
    # The buffer marks rows that are all minus infinity (`native/transformers/attention.cpp`).
    rows = out.numel() // max(out.size(int(arguments[1])), 1)
    temporaries = Buffer("is -inf", out.numel()), Buffer("all -inf", rows), Buffer("zero", out.element_size())
    return (OUTPUTS, *nest(*temporaries))


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _operand_copy(arguments: Sequence[Any], out: Any) -> Scratch:
    operand = arguments[0]
    # A sum into another dtype converts its operand first (`cum_ops`, `make_reduction` in
    # `native/ReduceOps*`).
    if operand.dtype == out.dtype:
        return ()
    return (OUTPUTS, *nest(Buffer("operand", operand.numel() * out.element_size())))


def _elements(arguments: Sequence[Any], out: Any) -> Scratch:
    """Return the temporary buffer of a loss that is reduced to one number: the losses of all elements."""
    # Losses whose result is one number store all elements (`native/Loss.cpp`, `native/BinaryOps.cpp`).
    stored = out.untyped_storage().nbytes()
    return (OUTPUTS, *nest(Buffer("elements", stored))) if stored > out.nbytes else ()


def _huber(arguments: Sequence[Any], out: Any) -> Scratch:
    elements = arguments[0].numel() * out.element_size()
    return nest(Buffer("elements", elements), during=(OUTPUTS,)) if not out.dim() else ()


def _logsumexp(arguments: Sequence[Any], out: Any) -> Scratch:
    # The maxima are tested for infinity before the sum (`logsumexp_out_impl`, `native/ReduceOps.cpp`).
    maxima, shifted = Buffer("maxima", out.nbytes), Buffer("shifted", _nbytes(arguments[0]))
    tested = nest(Buffer("absolute maxima", out.nbytes), Buffer("is infinite", out.numel()))
    return nest(maxima, during=(*tested, *nest(shifted, during=(OUTPUTS,))))


def _with_logits(arguments: Sequence[Any], out: Any) -> Scratch:
    elements = arguments[0].numel() * out.element_size()
    log_sigmoid, loss = Buffer("log-sigmoid", elements), Buffer("elements", elements)
    weights: Scratch = ()
    if len(arguments) > 3 and arguments[3] is not None:
        less_one = Buffer("pos_weight - 1", _nbytes(arguments[3]))
        weights = (*nest(less_one, during=(Buffer("weights", elements),)), Buffer("weights", -elements))
    reduced = nest(loss, during=(OUTPUTS,)) if not out.dim() else (OUTPUTS,)
    return nest(log_sigmoid, during=(*weights, *reduced))


def _mean_within(arguments: Sequence[Any], out: Any) -> Scratch:
    """Return the temporary buffer of a loss, in which torch computes the mean before it copies it out."""
    return (OUTPUTS, *nest(Buffer("mean", out.element_size()))) if not out.dim() else ()


def _soft_margin_backward(arguments: Sequence[Any], out: Any) -> Scratch:
    elements = out.numel() * out.element_size()
    exponent = nest(Buffer("-target", elements), Buffer("exponent", elements))
    z = Buffer("exp", elements)
    return (*exponent[:2], z, *exponent[2:], OUTPUTS, Buffer("exp", -elements))


def _layer_norm(arguments: Sequence[Any], out: Any) -> Scratch:
    # A non-contiguous input is copied (`expect_contiguous`, `native/layer_norm.cpp`).
    return _contiguous(arguments[0])


def _layer_norm_backward(arguments: Sequence[Any], out: Any) -> Scratch:
    gradient, operand = arguments[0], arguments[1]
    copies = (OUTPUTS, *_contiguous_copy(gradient))
    if operand.is_contiguous():
        return copies
    return nest(Buffer("contiguous input", _nbytes(operand)), during=copies)


def _fft(arguments: Sequence[Any], out: Any) -> Scratch:
    # Rows to transform are contiguous (`_exec_fft`, `native/mkl/SpectralOps.cpp`, `native/cuda`).
    operand, dims = arguments[0], arguments[1]
    rows = operand.movedim(dims[0], -1) if len(dims) == 1 else operand
    return (OUTPUTS, *_contiguous_copy(rows))


def _contiguous(operand: Any) -> Scratch:
    if operand.is_contiguous():
        return ()
    return nest(Buffer("contiguous input", _nbytes(operand)), during=(OUTPUTS,))


def _max_of_all(arguments: Sequence[Any], out: Any) -> Scratch:
    # Without a dimension, torch finds the maximum in a contiguous copy (`max`, `native/ReduceAllOps.cpp`).
    return (OUTPUTS, *_contiguous_copy(arguments[0])) if out.__class__ is not tuple else ()


def _ctc_backward(arguments: Sequence[Any], out: Any) -> Scratch:
    # Backward has a table in addition to forward's (`native/LossCTC.cpp`).
    return (OUTPUTS, *nest(Buffer("log beta", _nbytes(arguments[6]))))


def _first_copy(arguments: Sequence[Any], out: Any) -> Scratch:
    # A non-contiguous gradient or input is copied (`host_softmax_backward`, `native/SoftMax.cpp`, and
    # `native/AveragePool2d.cpp`).
    return (OUTPUTS, *_contiguous_copy(arguments[0]))


def _contiguous_copy(operand: Any) -> Scratch:
    if operand.is_contiguous():
        return ()
    return nest(Buffer("contiguous copy", _nbytes(operand)))


NORM_CHUNK = 65_536
"""Elements of one chunk of a multi-tensor kernel (`kChunkSize`, `native/cuda/MultiTensorApply.cuh`)."""


def _foreach_norm(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    """Return the temporary buffer of a norm of several tensors: one fp32 number per tensor and chunk
    (`native/cuda/ForeachReduceOp.cu`).
    """
    chunks = max(-(-tensor.numel() // NORM_CHUNK) for tensor in arguments[0])
    return nest(Buffer("partial norms", 4 * len(arguments[0]) * chunks), during=(OUTPUTS,))


def _within(name: str, nbytes: int) -> Scratch:
    return nest(Buffer(name, nbytes)) if nbytes else ()


def _pow(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    """Return the temporary buffer of `pow` with a number as its base: that number as a tensor
    (`pow_Scalar_out`, `native/Pow.cpp`).
    """
    # The base becomes a tensor with one fp64 number.
    return () if hasattr(arguments[0], "numel") else (OUTPUTS, *_within("base", 8))


def _scan(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    converted = _operand_copy(arguments, out) or (OUTPUTS,)
    return (*converted[:2], *sorting.scan(arguments[0], out), *converted[2:])


def _sum(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    operand = arguments[0]
    partial = partial_results(operand, reduced_dimensions(arguments[1:]), out, gpu)
    # CUDA's kernel reads half precision and writes fp32 without a conversion.
    if operand.element_size() == 2 and out.element_size() == 4:
        return partial
    converted = _operand_copy(arguments, out)
    return (*converted[:2], *partial, *converted[2:])


def _max(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    if out.__class__ is tuple:  # with indices of the largest along a dimension
        return ()
    copied, operand = _max_of_all(arguments, out), arguments[0]
    # Partial largest elements have the operand's dtype (`native/cuda/ReduceMaxValuesKernel.cu`).
    partial = partial_results(operand, (), out, gpu, accumulated=operand.element_size())
    return (*copied[:2], *partial, *copied[2:])


def _amax(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    operand, over = arguments[0], reduced_dimensions(arguments[1:])
    return partial_results(operand, over, out, gpu, accumulated=operand.element_size())


def _norm(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    return partial_results(arguments[0], reduced_dimensions(arguments[2:]), out, gpu)


def _svd(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    # The matrix is copied by columns (`svd_cusolver`). cuSOLVER's workspace is documented nowhere and left
    # out.
    return (OUTPUTS, *nest(Buffer("info", 4), Buffer("copy by columns", _nbytes(arguments[0]))))


def _softmax_backward(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    # `grad * output` is stored (`softmax_backward_cuda_out`, `native/cuda/SoftMax.cu`).
    gradient = arguments[0]
    return _within("grad * output", _nbytes(gradient))


GROUPED = {(9, "torch.bfloat16"): (60, 512)}
"""Bytes of a grouped product's buffers for each group and each multiprocessor, by the first number of the
compute capability and by dtype.

A group has three pointers, three strides and three sizes (`native/cuda/GroupMM.cu`). CUTLASS stores four
tensor maps of 128 bytes for each multiprocessor. Steps of Qwen3-30B-A3B on an H200 requested 75,264 bytes
more than without them (`results/h200-2026-11-30/experts.json`).
"""


def _grouped_product(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    per_group, per_processor = GROUPED.get((gpu.capability[0], str(arguments[0].dtype)), (0, 0))
    # Without ends of groups, each matrix is a group.
    *_, ends = arguments[0], *arguments[2:3]
    pointers = Buffer("group pointers", per_group * ends.size(0))
    maps = Buffer("tensor maps", per_processor * gpu.multiprocessors)
    # No buffers of zero bytes for GPUs and dtypes without such a kernel.
    return (OUTPUTS, *nest(pointers, maps) * bool(per_group))


def _cudnn_forward(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    return _within("cuDNN workspace", 256)


def _fused_attention_backward(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    query, key = arguments[1], arguments[2]
    batch, heads, length, width = query.shape
    # The buffer is an fp32 accumulator of the query's gradient and one fp32 row. It is exact on three
    # recorded shapes.
    size = 4 * batch * heads * length * width + 4 * batch * heads * length + 256
    if key.size(1) != heads:
        # With grouped queries, the ungrouped gradients of key and value are stored too.
        size += 2 * batch * heads * key.size(2) * width * query.element_size()
    return _within("attention workspace", size)


def _flash_varlen_backward(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    """Return the temporary buffers of flash attention's backward for concatenated sequences (N, H, D).

    `mha_varlen_bwd` (`cuda/flash_attn/flash_api.cpp`) leaves 128 rows between two sequences. The rule comes
    from the source, and was measured on no GPU.
    """
    query, key, ends = arguments[1], arguments[2], arguments[6]
    if ends is None:
        return ()
    tokens, heads, width = query.shape
    rows = tokens + 128 * (ends.size(0) - 1)
    # Heads are padded to multiples of the kernel's block of columns.
    rounded = -(-width // (step := 32 if width <= 128 else 64)) * step
    buffers = [Buffer("row sums", 4 * heads * rows), Buffer("dq", 4 * rows * heads * rounded)]
    if key.size(1) != heads:
        ungrouped = key.size(0) * heads * width * key.element_size()
        buffers += [Buffer("ungrouped dk", ungrouped), Buffer("ungrouped dv", ungrouped)]
    # Only gradient and output (arguments 0 and 4) are copied if they are not contiguous.
    copies = [
        Buffer("contiguous", _nbytes(tensor)) for tensor in arguments[:5:4] if not tensor.is_contiguous()
    ]
    return nest(*copies, during=(OUTPUTS, *nest(*buffers)))


def _efficient_backward(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    """Return the temporary buffers of efficient attention's backward.

    In 32 bits, other kernels first sum the gradient times the output (`delta`). In 16 bits, the kernel itself
    does so (`kKernelComputesDelta`, `mem_eff_attention/kernel_backward.h`). In 16 bits with heads wider than
    128, the kernel also stores the gradients of keys and values in 32 bits. Those are not counted.
    """
    gradient, query, value = arguments[0], arguments[1], arguments[3]
    batch, heads, length, width = query.shape
    row = 4 * batch * heads * length
    half = query.element_size() == 2
    rows, columns = _efficient_tile(max(width, value.size(-1)), half=half, capability=gpu.capability)
    tiles = -(-length // rows) * -(-width // columns)
    workspace = Buffer("attention workspace", batch * heads * tiles * (4 * rows * columns + TILE_HEAD))
    freed = Buffer(workspace.name, -workspace.nbytes)
    # In 16 bits the kernel itself computes delta, the row sums of gradient times output.
    if half and gpu.capability > (7, 0):
        return Buffer("delta", row), workspace, Buffer("delta", -row), freed
    product = _nbytes(gradient)
    return (
        Buffer("grad * out", product),
        Buffer("delta", row),
        Buffer("delta, contiguous", row),
        Buffer("delta", -row),
        Buffer("grad * out", -product),
        workspace,
        Buffer("delta, contiguous", -row),
        freed,
    )


TILE_HEAD = 16
"""Bytes of the lock and the counter before each tile of the query's gradient in efficient attention
(`GradQTempStorage`)."""


def _efficient_tile(widest: int, *, half: bool, capability: tuple[int, int]) -> tuple[int, int]:
    """Return (rows, columns) of a tile in efficient attention's backward kernel, for heads of this width.

    The source is `mem_eff_attention/kernels/generate_kernels.py`. Tiles of 128 rows need more shared memory
    than architectures of 100 KiB have, which use 64. In 32 bits, an H100 used tiles of 128 x 64 for heads of
    128, and of 64 x 64 for heads of 64. The other sizes come from the source.
    """
    # These architectures have at most 100 KiB of shared memory per block.
    small = capability < (8, 0) or capability in ((8, 6), (8, 9)) or capability[0] == 12
    if widest <= 64 or small:
        return 64, 64
    return (128, 128) if half and widest <= 128 else (128, 64)


def _convolution(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    return convolution.forward(arguments, out)


def _convolution_backward(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    gradient, bias = arguments[0], out[2]
    over = [0, *range(2, gradient.dim())]
    summed = () if bias is None else partial_results(gradient, over, bias, gpu)
    return convolution.backward(arguments, out, summed)


MOST_BYTES = 2**31 - 1
"""Largest size in bytes of an operand that one kernel reduces; larger ones are split."""

MOST_THREADS = 512
"""Number of threads in one thread block of a reduction kernel."""

FEW, MANY = 16, 256
"""Smallest and largest number of values that one thread sums if several thread blocks share a reduction's
output.
"""

ACCUMULATED = 4
"""Bytes of one partial result of a reduction, which accumulates in fp32."""


# A reduction over rows (gradients of biases, states of a factored optimizer) is split over thread blocks if
# threads would have many values. The sources are `setReduceConfig` and `gpu_reduce_kernel` in
# `native/cuda/Reduce.cuh`. The buffer can be twice the matrix.


def reduced_dimensions(arguments: Sequence[Any]) -> Sequence[int]:
    """Return the reduced dimensions in a reduction's arguments; empty if all are reduced."""
    over = arguments[0] if arguments else None
    return [over] if isinstance(over, int) else over or ()


def partial_results(
    operand: Any, over: Sequence[int], out: Any, gpu: GpuSize, *, accumulated: int = ACCUMULATED
) -> Scratch:
    """Return the temporary buffers for the reduction of `operand` to `out`.

    `over` are the reduced dimensions, all by default. `accumulated` are the bytes of a partial result.
    """
    results, inputs = out.numel(), operand.numel()
    if results in (0, inputs):
        return ()
    dims = {dim % operand.dim() for dim in over or range(operand.dim())}
    strides = [
        (operand.stride(dim), dim)
        for dim in range(operand.dim())
        if operand.size(dim) > 1 and operand.stride(dim) > 0
    ]
    if not strides:
        return ()
    inner = min(strides)[1] in dims
    buffers: Scratch = ()
    pieces = list(_pieces(operand.shape, operand.stride(), operand.element_size()))
    for shape in pieces:
        outputs = math.prod(size for dim, size in enumerate(shape) if dim not in dims)
        needs = reduction(math.prod(shape) // outputs, outputs, inner, gpu)
        if needs is not None:
            partials = needs.partials // ACCUMULATED * accumulated
            buffers += nest(Buffer("partial sums", partials), Buffer("semaphores", needs.semaphores))
    # Halves of a half-precision result are added in an fp32 buffer.
    if len(pieces) > 1 and out.element_size() == operand.element_size() == 2:
        return nest(Buffer("accumulated", results * ACCUMULATED), during=buffers)
    return buffers


# The two halves (`TensorIterator::with_32bit_indexing`) are reduced one after the other, each with its own
# buffer. For Adafactor's norms of columns over an embedding (256,000 x 2,176 in fp32), an H200 reserved 133
# MiB.
def _pieces(shape: Sequence[int], strides: Sequence[int], item: int) -> Iterator[tuple[int, ...]]:
    """Yield the shape of a reduction's operand, divided into halves until each is small enough for 32-bit
    indices.
    """
    reach = [(size - 1) * stride * item for size, stride in zip(shape, strides, strict=True)]
    if sum(reach) < MOST_BYTES:
        yield tuple(shape)
        return
    farthest = max(range(len(reach)), key=lambda dim: reach[dim])
    half = shape[farthest] // 2
    for size in (half, shape[farthest] - half):
        yield from _pieces((*shape[:farthest], size, *shape[farthest + 1 :]), strides, item)


class ReductionBytes(NamedTuple):
    """Bytes of the two temporary buffers of one CUDA reduction."""

    partials: int
    """Bytes of the partial results of a reduction's thread blocks."""
    semaphores: int


def reduction(inputs: int, outputs: int, inner: bool, gpu: GpuSize) -> ReductionBytes | None:
    """Return the bytes of the temporary buffers for the reduction of `inputs` values to each of `outputs`.

    Return None if one block per output suffices. `inner` is True if the reduced dimension has the smallest
    stride. Source: `setReduceConfig`, `ReduceConfig::global_memory_size`, Reduce.cuh.
    """
    vector = 4
    # If reduced dimensions are in front of others, each thread reads vectors of several outputs.
    if inner:
        vector, dim0, dim1 = 1, inputs, outputs
    else:
        while vector > 1 and outputs % vector:
            vector //= 2
        dim0, dim1 = outputs // vector, inputs
    # A block has a power of two of threads in each axis, and up to 32 threads along the fast one.
    most = MOST_THREADS // vector
    power0, power1 = min(_power(dim0), most), min(_power(dim1), most)
    width = min(power0, 32)
    height = min(power1, most // width)
    width = min(power0, most // height)
    step_in, step_out = (width, 1) if inner else (1, width)
    per_thread = -(-inputs // step_in)
    # Few values per thread are not worth a reduction between the rows of a block.
    tall = per_thread >= height * FEW or per_thread >= MANY
    if tall:
        step_in *= height
    else:
        step_out *= height
    per_thread = -(-inputs // step_in)
    # If the blocks fill the GPU, no split is needed.
    grid = -(-(outputs // vector) // step_out)
    target = gpu.multiprocessors * (gpu.threads // (width * height))
    if not (tall and per_thread >= MANY and grid <= target):
        return None
    blocks = max(min(-(-target // grid), -(-per_thread // FEW)), -(-per_thread // MANY))
    if blocks <= 1:
        return None
    size = ACCUMULATED * outputs * blocks * (1 if inner else width * vector)
    return ReductionBytes(size, 4 * grid)


def _power(number: int) -> int:
    """Return the largest power of two that is not above `number`."""
    return 1 << (max(number, 1).bit_length() - 1)


CUDA_RULES: dict[str, Callable[[Sequence[Any], Any, GpuSize], Scratch]] = {
    "aten::_foreach_norm": _foreach_norm,
    "aten::_grouped_mm": _grouped_product,
    "aten::sum": _sum,
    "aten::mean": _sum,
    "aten::linalg_vector_norm": _norm,
    "aten::max": _max,
    "aten::amax": _amax,
    "aten::_linalg_svd": _svd,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::_scaled_dot_product_cudnn_attention": _cudnn_forward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _fused_attention_backward,
    "aten::_scaled_dot_product_flash_attention_backward": _fused_attention_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::_flash_attention_backward": _flash_varlen_backward,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::pow": _pow,
    "aten::cumsum": _scan,
    "aten::cumprod": _scan,
    "aten::sort": sorting.sort,
    "aten::masked_select": indexing.masked_select,
    "aten::index": indexing.index,
    "aten::index_put": indexing.index_put,
    "aten::index_put_": indexing.index_put,
    "aten::embedding_dense_backward": indexing.embedding_backward,
}

_COMPOSED: dict[str, Callable[[Sequence[Any], Any], Scratch]] = {
    "aten::_safe_softmax": _safe_softmax,
    "aten::sum": _operand_copy,
    "aten::mean": _operand_copy,
    "aten::cumsum": _operand_copy,
    "aten::cumprod": _operand_copy,
    "aten::mse_loss": _elements,
    "aten::smooth_l1_loss": _elements,
    "aten::huber_loss": _huber,
    "aten::avg_pool2d": _first_copy,
    "aten::_fft_r2c": _fft,
    "aten::_fft_c2r": _fft,
    "aten::_fft_c2c": _fft,
    "aten::logsumexp": _logsumexp,
    "aten::binary_cross_entropy_with_logits": _with_logits,
    "aten::binary_cross_entropy": _mean_within,
    "aten::soft_margin_loss": _mean_within,
    "aten::soft_margin_loss_backward": _soft_margin_backward,
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::embedding": indexing.embedding,
    "aten::max": _max_of_all,
    "aten::_ctc_loss_backward": _ctc_backward,
    "aten::_softmax": _first_copy,
    "aten::_log_softmax": _first_copy,
    "aten::_log_softmax_backward_data": _first_copy,
    "aten::_softmax_backward_data": _first_copy,
}
