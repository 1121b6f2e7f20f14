"""Training steps of a user's own code: their simulation equals a real run on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from example_steps import gan_of
from torch import nn

import snugfit
from aligned import peak
from reported import foreseen, reports
from snugfit.cli.main import run
from snugfit.errors import JobError, UsageError
from snugfit.features.examples.rehearsed import job_of
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.refusal import refusal
from snugfit.rehearsal.rehearse import rehearse
from snugfit.results.footprint import Kind
from snugfit.techniques.recipe import Recipe

LOSS_OUTSIDE = 256
"""Bytes of numbers that Python wraps, which a trace does not hold."""

Run = Callable[[], Any]


gan = gan_of(16, 64, 96)


def vision(batch_size: int, device: torch.device) -> Run:
    """Return the step of a convolutional network whose optimizer exists before the model is moved."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.to(device)

    def step() -> None:
        images = torch.rand(batch_size, 3, 16, 16, device=device)
        labels = torch.randint(10, (batch_size,), device=device)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Scale(torch.autograd.Function):
    """An own operator with a backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return tensor.exp() * tensor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (tensor,) = ctx.saved_tensors
        return grads[0] * tensor.exp() * (1 + tensor)


def own_autograd(batch_size: int, device: torch.device) -> Run:
    """Return a step without modules or optimizers, by an own operator and `torch.autograd.grad`."""
    weight = torch.zeros(32, 64, device=device, requires_grad=True)

    def step() -> None:
        out = Scale.apply(torch.rand(batch_size, 32, device=device) @ weight)
        (gradient,) = torch.autograd.grad(out.square().mean(), weight)
        with torch.no_grad():
            weight.sub_(0.1 * gradient)

    return step


@pytest.mark.whole
@pytest.mark.parametrize("example", [gan, vision, own_autograd])
def test_a_real_step_has_the_predicted_peak(example: Callable[..., Run]) -> None:
    job, setup = job_of(example, 64), Recipe.parse("plain").setup()
    trace = foreseen(rehearse(job, setup, CpuPolicy()))
    assert 0 <= peak(reports(job, setup)) - peak(trace) <= LOSS_OUTSIDE


@pytest.mark.whole
def test_a_gpu_step_has_its_bytes_by_kind_and_its_seconds() -> None:
    predicted = snugfit.rehearse(gan, batch_size=64, gpu="h200")
    weights = sum(sum(4 * size for size in shape) for shape in ((1024 + 64, 6144 + 96), (6144 + 64, 64 + 1)))
    assert predicted.footprint.kinds[Kind.WEIGHTS] >= weights
    moments = sum(4 * size for size in (1024 + 64, 6144 + 96)) * 2 + sum(4 * n for n in (6144 + 64, 64 + 1))
    assert predicted.footprint.kinds[Kind.OPTIMIZER_STATES] >= moments
    assert predicted.timing is not None
    assert predicted.timing.step_seconds > 0
    larger = snugfit.rehearse(gan, batch_size=512, gpu="h200")
    assert larger.footprint.requested_bytes > predicted.footprint.requested_bytes


def scaled(batch_size: int, device: torch.device) -> Run:
    """Return the step of a layer in float16 autocast whose gradients a scaler checks."""
    model = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.float16):
            loss = model(torch.rand(batch_size, 8, device=device)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@pytest.mark.whole
def test_the_host_waits_for_the_result_of_a_scaler() -> None:
    predicted = snugfit.rehearse(scaled, gpu="h200")
    assert predicted.anatomy.syncs == 1


FILE = """
import torch

def example(batch_size):
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.rand(batch_size, 8).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
"""


@pytest.mark.whole
def test_a_file_is_executed_and_that_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    file.write_text(FILE)
    assert run(["predict", "--example", str(file), "--gpu", "h200", "--json"]) == 0
    printed = capsys.readouterr()
    assert f"executing {file}" in printed.err
    assert json.loads(printed.out)["footprint"]["requested_bytes"] > 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1", "defines no function example"),
        ("def example(size): return print", "has the parameter 'size'"),
        ("def example(): return 1", "returned int"),
        ("1 / 0", "line 1"),
    ],
)
def test_a_file_of_another_form_is_one_error(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.py"
    file.write_text(text)
    assert run(["predict", "--example", str(file)]) == 2
    assert told in capsys.readouterr().err


def test_a_command_or_job_without_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "--example"]) == 2
    assert "needs a Python file" in capsys.readouterr().err
    assert run(["train", "--example", "x.py"]) == 2
    assert "Try snugfit predict" in capsys.readouterr().err
    with pytest.raises(JobError, match="--example FILE"):
        Job(model=Model.find("gpt2", online=False), task="causal-lm", phase="example")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not a function"):
        snugfit.rehearse(3)  # type: ignore[arg-type]


def test_a_failing_step_is_measured_by_the_function_for_own_loops() -> None:
    try:
        raise NotImplementedError("aten::nonzero")
    except NotImplementedError as error:
        told = str(refusal(job_of(gan, 4), error))
    assert "with snugfit.watch." in told
    assert "snugfit measure" not in told
