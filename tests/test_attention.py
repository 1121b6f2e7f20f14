"""The choice of the attention kernel, compared with torch's own choice for the same operands, switches and
order."""

from __future__ import annotations

import json
import os
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_choices import case_of, choice, operands_of, switched
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from snugfit.errors import RehearsalError
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.device.attention_choice import Operands, order_in_force
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy, Policy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques.recipe import Recipe
from test_law_rehearsed_equals_real import hold_to_reports

NUMBERS = {"math": 0, "flash_for_cpu": 1, "flash": 1, "efficient": 2, "cudnn": 3}


def decided(case: dict[str, Any], policy: Policy) -> int | str:
    """Return snugfit's choice as torch's enum value."""
    (query, key, value), mask = operands_of(case, "meta")
    grouped = case["grouped"] and {query.size(-3)} != {key.size(-3), value.size(-3)}
    operands = Operands(
        query, key, value, mask, case["dropout"], case["causal"], None, grouped, needs_grad=case["needs_grad"]
    )
    with ExitStack() as undo:
        undo.enter_context(order_in_force(policy.attention_order))
        switched(case, undo)
        try:
            return NUMBERS[policy.choose_attention(operands)]
        except RuntimeError as error:
            return str(error)


def test_the_cpu_is_chosen_for_as_torch_chooses() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(600):
            case = case_of(seed)
            truth = choice(case, "cpu")
            mine = decided(case, CpuPolicy())
            if isinstance(truth, str):
                assert isinstance(mine, str), case
            else:
                assert mine == truth, case


H200 = Path(__file__).parents[1] / "results" / "h200-2026-11-22" / "attention-choices.json"


def test_an_h200_is_chosen_for_as_torch_chose_there() -> None:
    truth = json.loads(H200.read_text(encoding="utf-8"))["choices"]
    assert len(truth) == 3000
    for seed in range(0, 3000, 1 if os.environ.get("SNUGFIT_ALL_TRUTH") == "1" else 3):
        case = case_of(seed)
        mine = decided(case, CudaPolicy())
        assert mine == truth[seed] or (isinstance(mine, str) and isinstance(truth[seed], str)), case


class MultiQuery(nn.Module):
    """Several query heads over one key head, by broadcasting or by `enable_gqa`, within up to two kernel
    contexts."""

    def __init__(self, *, grouped: bool = False, kernels: Any = None, outer: Any = None) -> None:
        super().__init__()
        self.grouped, self.kernels, self.outer = grouped, kernels, outer
        self.query, self.shared = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, 4, 16).transpose(1, 2)
        key, value = self.shared(x).view(batch, length, 2, 1, 16).permute(2, 0, 3, 1, 4)
        if self.kernels is not None and not self.grouped:
            key, value = key.expand_as(query), value.expand_as(query)
        with ExitStack() as undo:
            for kernels in (self.outer, self.kernels):
                if kernels is not None:
                    undo.enter_context(sdpa_kernel(*kernels))
            attention = torch.nn.functional.scaled_dot_product_attention
            out = attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        return out.pow(2).mean()


def trace_of(module: nn.Module, length: int = 16, recipe: str = "bf16") -> Trace:
    model = Model.from_module(module, {"x": torch.ones(2, length, 64)})
    job = Job(model=model, task=Task.CUSTOM, batch_size=2)
    return rehearse(job, Recipe.parse(recipe).setup(), CudaPolicy())


def test_heads_that_broadcast_run_in_math() -> None:
    """Fused kernels do not broadcast: `check_batch_size_and_num_heads_dense`."""
    trace = trace_of(MultiQuery(), length=256)
    assert trace.attention == ("math",)
    assert trace.peak()[0] > 2 * 4 * 256 * 256 * 2
    assert trace_of(MultiQuery(grouped=True)).attention == ("cudnn",)


ALL = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]


@pytest.mark.parametrize(
    ("kernels", "outer", "runs"),
    [
        ((SDPBackend.MATH,), None, "math"),
        ((SDPBackend.FLASH_ATTENTION,), (SDPBackend.MATH,), "flash"),
        ((ALL,), None, "flash"),
        ((ALL, True), None, "math"),
        ((ALL[1:], True), None, "efficient"),
        (([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], True), (ALL, True), "cudnn"),
    ],
)
def test_a_context_in_the_forward_pass_counts(kernels: Any, outer: Any, runs: str) -> None:
    before = torch._C._get_sdp_priority_order()
    assert trace_of(MultiQuery(kernels=kernels, outer=outer)).attention == (runs,)
    assert torch._C._get_sdp_priority_order() == before


def test_the_switches_of_the_process_count() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert trace_of(MultiQuery(kernels=(ALL,))).attention == ("flash",)
        torch.backends.cuda.enable_flash_sdp(False)
        assert trace_of(MultiQuery(grouped=True)).attention == ("math",)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.backends.cuda.enable_flash_sdp(True)


def test_no_kernel_that_is_left_is_torchs_own_error() -> None:
    with pytest.raises(RehearsalError, match="No available kernel"):
        trace_of(MultiQuery(grouped=True, kernels=(SDPBackend.FLASH_ATTENTION,)), recipe="plain")


@pytest.mark.whole
@pytest.mark.parametrize("kernels", [None, (SDPBackend.MATH,)])
def test_a_real_step_on_the_cpu_allocates_the_same(kernels: Any) -> None:
    model = Model.from_module(MultiQuery(kernels=kernels), {"x": torch.ones(2, 16, 64)})
    hold_to_reports(Job(model=model, task=Task.CUSTOM, batch_size=2), Recipe())
