"""Cost of an operator on a device: the layout of its operands, the alignment of their rows, and omitted
work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from snugfit.job.gpu import find_gpu
from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.rates import rates_for
from snugfit.prediction.seconds import launch_seconds
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.device.shapes import SHAPE_FUNCTIONS, grouped_mm
from snugfit.rehearsal.record.kernels import CONTRACTIONS, cost_of, group_of, name_of_call, split_groups
from snugfit.rehearsal.trace.trace import Kernel

aten = torch.ops.aten
H200 = rates_for(find_gpu("h200"))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def kernel(func: Any, *args: Any, **kwargs: Any) -> Kernel:
    found = cost_of(func, args, kwargs, func(*args, **kwargs))
    assert found is not None
    return Kernel(func._schema.name, "", "forward", *found)


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("func", "args", "layout"),
    [
        (aten.add.Tensor, (meta(8, 8), meta(8, 8)), ""),
        (
            aten.add.Tensor,
            (meta(8, 8).t(), meta(8, 8).t()),
            "",
        ),  # two transposed operands have the same layout
        (aten.add.Tensor, (meta(8, 8).t(), meta(8, 8)), "strided"),
        (aten.mul.Tensor, (meta(8, 8), meta(8)), "strided"),  # broadcast
        (aten.add.Tensor, (meta(8, 8, dtype=HALF), meta(8, 8)), "casts"),
        (aten.add.Tensor, (meta(2, 4096, 4096), meta(4096, 4096).t()), "transposed"),  # 64 MiB
        (aten.add.Tensor, (meta(2, 2048, 2048), meta(2048, 2048).t()), "strided"),  # 16 MiB stay in a cache
        (aten.gelu.default, (meta(8, 8)[:, ::2],), "strided"),
        (aten.clone.default, (meta(8, 8),), ""),
        (aten.sum.default, (meta(8, 8).t(),), ""),  # not a pointwise operator
    ],
)
def test_how_operands_lie(func: Any, args: tuple[Any, ...], layout: str) -> None:
    assert kernel(func, *args).layout == layout


def test_a_cast_to_fewer_bits_has_a_kernel_of_its_own() -> None:
    assert kernel(aten._to_copy.default, meta(8, 8), dtype=HALF).layout == ""
    assert kernel(aten._to_copy.default, meta(8, 8, dtype=HALF), dtype=torch.float32).layout == "casts"


def test_leading_dimensions_are_those_in_memory() -> None:
    """A classifier over 50,257 words has long rows of weights and writes unaligned rows."""
    hidden, weights = meta(64, 768, dtype=HALF), meta(50_257, 768, dtype=HALF)
    assert kernel(aten.mm.default, hidden, weights.t()).leading == (768, 768, 50_257)
    bias = meta(50_257, dtype=HALF)
    assert kernel(aten.addmm.default, bias, hidden, weights.t()).leading == (768, 768, 50_257)


@pytest.mark.parametrize(("columns", "alignment"), [(50_257, 2), (50_258, 4), (50_260, 8), (50_264, 16)])
def test_rows_that_are_less_aligned_are_slower(columns: int, alignment: int) -> None:
    rate = H200.products["bf16"]
    clock = KernelClock(H200)
    of_words = kernel(aten.mm.default, meta(8192, 768, dtype=HALF), meta(columns, 768, dtype=HALF).t())
    slowed = clock.seconds(of_words) / clock.seconds(of_words._replace(leading=(768, 768, 768)))
    assert slowed == pytest.approx(1 / rate.share(alignment), rel=0.3)  # starts and waves are unchanged


def added(operator: str, rows: int = 4096, dtype: torch.dtype = HALF) -> Kernel:
    """Return the cost of a small product that is added to a large matrix."""
    one = kernel(
        aten.addmm.default,
        meta(rows, 2048, dtype=dtype),
        meta(rows, 8, dtype=dtype),
        meta(8, 2048, dtype=dtype),
    )
    return one._replace(operator=operator)


def test_what_a_product_is_added_to_is_copied_first_or_read_and_written() -> None:
    clock = KernelClock(H200)
    bias = kernel(
        aten.addmm.default, meta(2048, dtype=HALF), meta(4096, 8, dtype=HALF), meta(8, 2048, dtype=HALF)
    )
    assert clock.seconds(added("aten::addmm")) > clock.seconds(bias) + 2 * 2 * 4096 * 2048 / H200.bandwidth
    rows = 1 << 20
    moved = 2 * 2 * rows * 2048  # bytes of the matrix, read and written
    speed = moved / clock.seconds(added("aten::addmm_", rows))
    assert speed == pytest.approx(H200.patterns["aten::addmm_"][0], rel=0.01)


def test_a_large_product_that_is_added_to_a_matrix_also_reads_it() -> None:
    """On an H200 the product of 8192 x 4096 and 4096 x 28672 took 2.74 ms, and 2.88 where it was added."""
    clock = KernelClock(H200)
    alone = kernel(aten.mm.default, meta(8192, 4096, dtype=HALF), meta(4096, 28672, dtype=HALF))
    shapes = ((8192, 28672), *alone.shapes)
    result = 2 * 8192 * 28672
    there = alone._replace(operator="aten::addmm_", shapes=shapes, nbytes=alone.nbytes + result)
    longer = clock.seconds(there) - clock.seconds(alone)
    assert longer == pytest.approx(result / H200.bandwidth)
    assert 1 + longer / clock.seconds(alone) == pytest.approx(2.88 / 2.74, rel=0.02)


def test_a_product_into_the_matrix_it_adds_to_is_the_one_in_place() -> None:
    weight, first, second = meta(8, 4), meta(8, 2), meta(2, 4)
    assert name_of_call("aten::addmm", (weight, first, second), {"out": weight}) == "aten::addmm_"
    assert name_of_call("aten::addmm", (weight, first, second), {"out": meta(8, 4)}) == "aten::addmm"
    assert name_of_call("aten::add", (weight, weight), {"out": weight}) == "aten::add"


def test_only_a_bias_is_added_by_cublaslt() -> None:
    """Measured: Muon's products and those of Liger's loss use no workspace of cuBLASLt."""
    policy, factors = CudaPolicy(), (meta(8, 2), meta(2, 4))
    for added, count in ((meta(4), 2), (meta(1, 4), 2), (meta(8, 4), 1), (meta(8, 1), 1)):
        assert len(policy.workspaces("aten::addmm", (added, *factors))) == count
    assert len(policy.workspaces("aten::addmm")) == 2
    assert len(policy.workspaces("aten::addmm_", (meta(8, 4), *factors))) == 1


def test_sums_of_16_bits_in_fp32_have_shapes_on_every_torch() -> None:
    half = meta(8, 2, dtype=HALF), meta(2, 4, dtype=HALF)
    weight = meta(8, 4)
    assert SHAPE_FUNCTIONS[aten.addmm.dtype_out](weight, *half, torch.float32, out=weight) is weight
    fresh = SHAPE_FUNCTIONS[aten.addmm.dtype](weight, *half, torch.float32)
    assert (fresh.shape, fresh.dtype) == (weight.shape, torch.float32)


def test_a_causal_mask_spares_half() -> None:
    query = meta(2, 4, 128, 64, dtype=HALF)
    attend = aten._scaled_dot_product_flash_attention.default
    whole, half = (kernel(attend, query, query, query, 0.0, causal) for causal in (False, True))
    assert 2 * half.flops == whole.flops
    dropping = kernel(attend, query, query, query, 0.1, True)
    assert (half.layout, dropping.layout) == ("", "with dropout")


def test_dropout_slows_attention_down_where_it_was_measured() -> None:
    query = meta(32, 16, 512, 64, dtype=HALF)
    attend = aten._scaled_dot_product_cudnn_attention.default
    with_it, without = (
        KernelClock(H200).seconds(kernel(attend, query, query, query, None, True, dropout))
        for dropout in (0.1, 0.0)
    )
    assert with_it > 1.5 * without


def test_a_loss_reads_what_it_is_asked_for() -> None:
    """The loss reads one of 50,257 log-probabilities per row."""
    told, targets = meta(1024, 50_257), meta(1024, dtype=torch.int64)
    loss = kernel(aten.nll_loss_forward.default, told, targets, None, 1, -100)
    assert loss.nbytes < told.numel()


def test_a_view_costs_the_host_and_not_the_device() -> None:
    alone = kernel(aten.add.Tensor, meta(8, 8), meta(8, 8))
    viewed = alone._replace(views=3)
    assert KernelClock(H200).seconds(viewed) == KernelClock(H200).seconds(alone)
    host = replace(H200.host, view=1.0)
    assert launch_seconds(viewed, host) - launch_seconds(alone, host) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("first", "second", "grouped", "like"),
    [
        ((48, 32), (4, 32, 16), True, (48, 32, 16)),
        ((32, 48), (48, 16), True, (32, 48, 16)),
        ((4, 12, 32), (32, 64), True, (12, 32, 64)),
        ((4, 12, 32), (4, 32, 16), False, (48, 32, 16)),
    ],
)
def test_products_of_experts_have_the_flops_of_their_groups(
    first: tuple[int, ...], second: tuple[int, ...], grouped: bool, like: tuple[int, int, int]
) -> None:
    """For any split of rows into groups, the FLOPs equal torch's formula for the product of all rows."""
    operands = (meta(*first, dtype=HALF), meta(*second, dtype=HALF))
    offs = meta(4, dtype=torch.int32) if grouped else None
    func = aten._grouped_mm.default
    cost = cost_of(func, (*operands, offs), {}, grouped_mm(*operands, offs))
    rows, inner, columns = like
    truth = kernel(aten.mm.default, meta(rows, inner), meta(inner, columns)).flops
    assert cost is not None
    assert cost.flops == truth
    assert sum(product.flops for product in split_groups((*operands, offs), {}, cost)) == truth
    assert group_of(func._schema.name) == CONTRACTIONS


def test_kernels_without_a_measured_rate_are_rough() -> None:
    clock = KernelClock(H200)
    one = kernel(aten.mm.default, meta(8, 8, dtype=HALF), meta(8, 8, dtype=HALF))
    rated = ("aten::mm", "aten::add", "generated::sum", "triton::rms_norm_backward", "nccl::all_reduce")
    rough = ("aten::convolution_backward", "aten::_scaled_mm", "triton::unknown", "bitsandbytes::dequantize")
    for names, expected in ((rated, False), (rough, True)):
        assert {name: clock.is_rough(one._replace(operator=name)) for name in names} == dict.fromkeys(
            names, expected
        )
