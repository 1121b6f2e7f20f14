"""Workspaces of convolutions, compared with those of cuDNN 9.19 on one H200. The sources are allocator
histories of drawn runs, and the patch embeddings of two files. These are
`results/h200-2026-11-22/convolutions.json` and `results/h200-2026-11-27/patch-embeddings.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.device import convolution
from snugfit.rehearsal.device.buffers import ONE_OUTPUT, OUTPUTS, GpuSize, Scratch, output
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.device.scratch import cuda_scratch
from snugfit.rehearsal.device.shapes import SHAPE_FUNCTIONS
from snugfit.rehearsal.record.shape_cache import SHAPE_CACHE
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step.wishes.precision import matmul_precision
from snugfit.techniques.recipe import Recipe

H200 = GpuSize(132, 2048)
"""Number of multiprocessors, and of threads on each."""

RESULTS = Path(__file__).parents[1] / "results"
FILES = ("h200-2026-11-22/convolutions.json", "h200-2026-11-27/patch-embeddings.json")
SEEN: list[dict[str, Any]] = [
    seen for file in FILES for seen in json.loads((RESULTS / file).read_text())["convolutions"]
]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

TAIL = 2_200
"""Bytes by which a workspace of the backward pass may exceed its copies."""

UNKNOWN_FORWARD = ((96, 384), (128, 384), (256, 384))
"""Samples and image size of large inputs in half precision whose forward pass made no copy."""


@contextmanager
def shapes(
    x: tuple[int, ...], weight: tuple[int, ...], dtype: torch.dtype, precision: str, **how: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield input, weight and output on `meta`, under a precision of fp32 products."""
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


def test_fp32_of_whole_channels_takes_none() -> None:
    with shapes(*WHISPER[:3], "ieee", padding=1) as (x, weight, out):
        assert convolution.forward((x, weight), out) == ()
        assert convolution.backward((out, x, weight), (x, weight, None)) == (output(0), output(1), output(2))


def test_each_wanted_gradient_takes_a_workspace() -> None:
    with shapes(*WHISPER, padding=1) as (x, weight, out):
        scratch = convolution.backward((out, x, weight), (x, weight, None))
    first, (_, taken), _, second, (_, again), _, last = scratch
    assert (first, second, last) == (output(0), output(1), output(2))
    assert taken == again > 0


@pytest.mark.parametrize("seen", SEEN, ids=lambda each: f"{each['B']}x{each['image']} {each['precision']}")
def test_a_patch_embedding_takes_what_cudnn_took(seen: dict[str, Any]) -> None:
    """The forward pass matches to the byte, the backward pass up to tails: every birth and death in order,
    with outputs."""
    image, patch, hidden = seen["image"], seen["patch"], seen["hidden"]
    x, weight = (seen["B"], 3, image, image), (hidden, 3, patch, patch)
    dtype = DTYPES.get(seen["precision"], torch.float32)
    precision = "tf32" if seen["precision"] == "tf32" else "ieee"
    with shapes(x, weight, dtype, precision, stride=patch) as (inputs, kernel, out):
        forward = cuda_scratch("aten::convolution", (inputs, kernel), out, H200)
        if (seen["B"], image) not in UNKNOWN_FORWARD:
            assert moves(forward, (out,)) == seen["forward"]
        bias = torch.empty(hidden, dtype=dtype, device="meta")
        gradient = out.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).view_as(out)
        gradients = (None, torch.empty_like(kernel), bias)
        arguments = (gradient, inputs, kernel)
        backward = cuda_scratch("aten::convolution_backward", arguments, gradients, H200)
    found = moves(backward, gradients)
    assert found == pytest.approx(seen["backward"], abs=TAIL)


def moves(scratch: Scratch, outputs: tuple[torch.Tensor | None, ...]) -> list[int]:
    """Return births and deaths, including those of the outputs."""
    found = [] if any(move == OUTPUTS or move in ONE_OUTPUT for move in scratch) else [*map(size, outputs)]
    for move in scratch:
        if move == OUTPUTS:
            found += map(size, outputs)
        else:
            found.append(size(outputs[ONE_OUTPUT[move]]) if move in ONE_OUTPUT else move[1])
    return [nbytes for nbytes in found if nbytes]


def size(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


class Convolved(torch.nn.Module):
    """A convolution whose workspace depends on the precision of fp32 products."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(16, 32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).square().mean()


def test_a_prediction_does_not_depend_on_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process caches the scratch of kernels. An earlier version shared the cache between precisions."""
    job = Job(model=Model.from_module(Convolved(), {"x": torch.zeros(4, 16, 24, 24)}), task=Task.CUSTOM)

    def workspaces(recipe: str) -> int:
        trace = rehearse(job, Recipe.parse(recipe).setup(), CudaPolicy())
        return sum(block.nbytes for block in trace.blocks if "cuDNN workspace" in block.operator)

    monkeypatch.setattr(SHAPE_CACHE, "_operators", {})
    one_way = {recipe: workspaces(recipe) for recipe in ("ieee", "tf32", "ieee")}
    monkeypatch.setattr(SHAPE_CACHE, "_operators", {})
    other_way = {recipe: workspaces(recipe) for recipe in ("tf32", "ieee", "tf32")}
    assert one_way == other_way
    assert one_way["tf32"] > one_way["ieee"]


@pytest.mark.parametrize("last", [(), ("x",), ("weight",), ("gradient",)], ids="+".join)
def test_gradients_lie_as_input_and_weight_do(last: tuple[str, ...]) -> None:
    """Their layout is not that of the output's gradient, which is transposed for the patches of a ViT. A
    weight's gradient in another layout would be copied."""
    sizes = {"gradient": (2, 8, 4, 4), "x": (2, 3, 16, 16), "weight": (8, 3, 4, 4)}
    given = {
        name: torch.empty(
            size,
            device="meta",
            memory_format=torch.channels_last if name in last else torch.contiguous_format,
        )
        for name, size in sizes.items()
    }
    out = SHAPE_FUNCTIONS[torch.ops.aten.convolution_backward.default](
        given["gradient"], given["x"], given["weight"], [8],
        [4, 4], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True],
    )  # fmt: skip
    layout = torch.channels_last if {"x", "weight"} & set(last) else torch.contiguous_format
    assert [gradient.shape for gradient in out] == [sizes["x"], sizes["weight"], (8,)]
    assert all(gradient.is_contiguous(memory_format=layout) for gradient in out[:2])
