"""A user's module that names CUDA is rehearsed as it would run on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from snugfit.errors import RehearsalError
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.device.policy import CpuPolicy, CudaPolicy, Policy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques.recipe import Recipe
from tiers import crossed


class Says(nn.Module):
    """A linear layer whose input the given code transforms first."""

    def __init__(self, code: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.linear, self.code = nn.Linear(8, 8), code

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.code(x)).pow(2).mean()
        return out


def trace_of(code: Callable[[torch.Tensor], Any], policy: Policy | None = None, loop: str = "plain") -> Trace:
    model = Model.from_module(Says(code), {"x": torch.ones(2, 8)})
    job = Job(model=model, task=Task.CUSTOM, batch_size=2)
    return rehearse(job, Recipe().setup(), policy or CudaPolicy(), loop=loop)


def double_on_cuda(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.is_cuda and not x.is_meta and x.device.type == "cuda" else x


def with_a_device(x: torch.Tensor) -> torch.Tensor:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return x + torch.zeros(8, device=device) + torch.arange(8, device=x.device)


SAME: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any]]] = {
    "cuda()": (lambda x: x + torch.ones(8).cuda(), lambda x: x + torch.ones(8).to(x.device)),
    "to('cuda')": (lambda x: x + torch.ones(8).to("cuda:0"), lambda x: x + torch.ones(8).to(x.device)),
    "is_cuda": (double_on_cuda, lambda x: x * 2),
    "a device": (with_a_device, lambda x: x + torch.zeros_like(x[0]) + torch.arange(8, device=x.device)),
    "a context": (lambda x: x + in_context(), lambda x: x + torch.ones_like(x[0])),
    "get_device": (lambda x: x * 2 if x.get_device() == 0 else x, lambda x: x * 2),
    "capability": (lambda x: x * torch.cuda.get_device_capability()[0], lambda x: x * 9),
}


def in_context() -> torch.Tensor:
    with torch.device("cuda"):
        return torch.ones(8)


@pytest.mark.parametrize(("name", "loop"), crossed(SAME, ["plain", "accelerate"]))
def test_cuda_by_name_is_the_device_of_the_rehearsal(name: str, loop: str) -> None:
    said, meant = (trace_of(code, loop=loop) for code in SAME[name])
    assert [block.nbytes for block in said.blocks] == [block.nbytes for block in meant.blocks]
    assert said.events == meant.events
    assert said.doubts == ()


def test_waiting_for_the_device_is_a_wait() -> None:
    def wait(x: torch.Tensor) -> torch.Tensor:
        begin = torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda.synchronize()
        assert begin.query()
        assert begin.elapsed_time(begin) >= 0
        return x

    assert len(trace_of(wait).waits) == len(trace_of(lambda x: x).waits) + 1


def test_what_no_rehearsal_knows_is_a_doubt() -> None:
    (doubt,) = trace_of(lambda x: x + torch.cuda.memory_allocated()).doubts
    assert "GPU memory in use" in doubt


def test_libraries_and_a_cpu_are_told_the_truth() -> None:
    available = torch.cuda.is_available
    trace_of(double_on_cuda)
    assert torch.cuda.is_available is available
    plain = trace_of(lambda x: x, CpuPolicy())
    assert trace_of(double_on_cuda, CpuPolicy()).events == plain.events


@pytest.mark.parametrize(
    "code", [lambda x: torch.cuda.Stream() and x, lambda x: torch.Generator(x.device) and x]
)
def test_what_is_not_there_is_not_the_users_fault(code: Callable[[torch.Tensor], Any]) -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA is here")
    with pytest.raises(RehearsalError, match="has no such device"):
        trace_of(code)
