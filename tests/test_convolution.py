"""Workspaces of convolutions, beside what cuDNN 9.19 took on one H200 (allocator histories of drawn runs)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from snugfit.rehearsal import convolution
from snugfit.rehearsal.buffers import OUTPUTS
from snugfit.step.install import matmul_precision


@contextmanager
def shapes(
    x: tuple[int, ...], weight: tuple[int, ...], dtype: torch.dtype, precision: str, **how: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Input, weight and output on `meta`, under a precision of fp32 products."""
    operands = [torch.empty(size, dtype=dtype, device="meta") for size in (x, weight)]
    conv = torch.conv2d if len(x) == 4 else torch.conv1d
    with matmul_precision(precision):
        yield operands[0], operands[1], conv(*operands, **how)


VIT_TF32 = ((25, 3, 160, 160), (1344, 3, 32, 32), torch.float32, "tf32")
VIT_FP16 = ((6, 3, 224, 224), (896, 3, 32, 32), torch.float16, "ieee")
WHISPER = ((1, 128, 3000), (256, 128, 3), torch.float32, "tf32")


@pytest.mark.parametrize(
    ("case", "how", "seen"),
    [
        (VIT_TF32, {"stride": 32}, 27_555_088),
        (VIT_FP16, {"stride": 32}, 20_023_824),
        (WHISPER, {"padding": 1}, 5_001_232),
    ],
)
def test_forward_copies_its_operands(
    case: tuple[tuple[int, ...], tuple[int, ...], torch.dtype, str], how: dict[str, int], seen: int
) -> None:
    with shapes(*case, **how) as (x, weight, out):
        assert convolution.forward((x, weight), out) == (
            OUTPUTS, ("cuDNN workspace", seen), ("cuDNN workspace", -seen),
        )  # fmt: skip


def test_fp32_takes_none() -> None:
    with shapes(*VIT_TF32[:3], "ieee", stride=32) as (x, weight, out):
        assert convolution.forward((x, weight), out) == (OUTPUTS,)


def test_backward_copies_a_strided_gradient_and_pads_channels() -> None:
    """A patch embedding's gradient comes transposed; its image wants none."""
    with shapes(*VIT_TF32, stride=32) as (x, weight, out):
        gradient = out.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).view_as(out)
        copy, outputs, born, *rest = convolution.backward((gradient, x, weight), (None, weight, None))
    assert (copy, outputs) == (("gradient", 3_360_000), OUTPUTS)
    assert born[1] == pytest.approx(35_620_240, abs=131)
    assert rest == [(born[0], -born[1]), ("gradient", -3_360_000)]


def test_each_wanted_gradient_takes_a_workspace() -> None:
    with shapes(*WHISPER, padding=1) as (x, weight, out):
        scratch = convolution.backward((out, x, weight), (x, weight, None))
    assert [nbytes > 0 for _, nbytes in scratch] == [False, True, False, True, False]
