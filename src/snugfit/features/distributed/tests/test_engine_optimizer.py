"""Test DeepSpeed's engine as an optimizer over the model's own weights, in one process.

The tests cover the values that enter its partitions and leave them. `test_train_zero.py` trains with
several processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from deepspeed_here import with_deepspeed
from small_models import small_job
from snugfit.errors import UsageError
from snugfit.features.distributed.engine.config import is_of_engine
from snugfit.features.distributed.engine.loop import ACCELERATOR, in_process_group
from snugfit.features.distributed.engine.owners import owners, part_bytes
from snugfit.step.build import build_model, build_optimizer
from snugfit.techniques.recipe import Recipe

pytestmark = [pytest.mark.whole, with_deepspeed]

CPU = torch.device("cpu")
STAGES = ["zero2(offload=none)", "zero3(offload=none)"]


@contextmanager
def engine_of(
    family: str, recipe: str, frozen: str = "none of them"
) -> Iterator[tuple[Any, dict[str, torch.Tensor], Any]]:
    """Yield a model in DeepSpeed's engine, a copy of its initial weights, and its `EngineOptimizer`."""
    job, setup = small_job(family, 1), Recipe.parse(recipe).setup()
    torch.manual_seed(0)
    with in_process_group(CPU):
        from snugfit.features.distributed.engine.optimizer import start_engine

        model = build_model(job, setup, CPU, stays=True)
        for name, weight in model.named_parameters():
            weight.requires_grad_(frozen not in name)
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        engine, optimizer = start_engine(job, setup, model, build_optimizer(job, setup, model))
        try:
            yield model, before, optimizer
        finally:
            engine.destroy()


@pytest.mark.parametrize("family", ["llama", "t5", "mixtral"])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_in_fp32_are_those_that_the_model_had(stage: str, family: str) -> None:
    from snugfit.features.distributed.engine.optimizer import whole_weight

    with engine_of(family, f"bf16 + {stage}") as (model, before, optimizer):
        assert is_of_engine(optimizer)
        assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
        assert any(not torch.equal(value, value.bfloat16().float()) for value in before.values())
        for name, weight in model.named_parameters():
            assert torch.equal(whole_weight(weight), before[name]), name


@pytest.mark.parametrize("stage", STAGES)
def test_states_come_back_as_they_were_put(stage: str) -> None:
    """Put states into the partitions by weight and read them again.

    This happens before the first update, as in a resumed run.
    """
    from snugfit.features.distributed.engine.optimizer import whole_states

    with engine_of("bert", f"bf16 + {stage}") as (model, before, optimizer):
        assert optimizer.state_names() == []
        assert optimizer.step_count() is None
        states = {
            weight: {
                "step": torch.tensor(7.0),
                "exp_avg": torch.randn(before[name].shape),
                "exp_avg_sq": torch.rand(before[name].shape),
            }
            for name, weight in model.named_parameters()
        }
        optimizer.state.update(states)
        optimizer.take_states()
        assert not optimizer.state
        assert float(optimizer.step_count()) == 7.0
        for name, weight in model.named_parameters():
            gathered = dict(whole_states(optimizer, weight))
            assert gathered.keys() == {"exp_avg", "exp_avg_sq"}
            for key, value in gathered.items():
                assert torch.equal(value, states[weight][key]), (name, key)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_do_not_train_are_kept_too(stage: str) -> None:
    from snugfit.features.distributed.engine.optimizer import whole_states, whole_weight

    with engine_of("bert", stage, frozen="embeddings") as (model, before, optimizer):
        for name, weight in model.named_parameters():
            assert torch.equal(whole_weight(weight), before[name]), name
            if "embeddings" in name:
                assert not list(whole_states(optimizer, weight))


def test_processes_have_weights_of_about_as_many_bytes() -> None:
    """Each weight has one owner. Only trained weights have two states."""
    model = torch.nn.ModuleList([torch.nn.Linear(size, 8) for size in (64, 32, 16, 16, 3)])
    chosen = owners(model, 3)
    assert chosen.keys() == dict(model.named_parameters()).keys()
    assert chosen == owners(model, 3)
    written = [sum(part_bytes(model, rank, 3)) for rank in range(3)]
    assert sum(written) == 12 * sum(weight.numel() for weight in model.parameters())
    assert max(written) < 2 * min(written)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return DeepSpeed's module that selects a device, in a state where it has selected none and would find a
    GPU.
    """
    from deepspeed.accelerator import real_accelerator

    monkeypatch.setattr(real_accelerator, "ds_accelerator", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(ACCELERATOR, "of another run")
    monkeypatch.delenv(ACCELERATOR)
    return real_accelerator


def test_the_engine_computes_on_our_device_where_a_gpu_is_too(a_gpu: Any) -> None:
    with in_process_group(CPU):
        assert a_gpu.get_accelerator().device_name() == "cpu"
        assert os.environ[ACCELERATOR] == "cpu", "inherited by processes that this one starts"


def test_an_engine_that_computes_elsewhere_already_is_refused(a_gpu: Any) -> None:
    assert a_gpu.get_accelerator().device_name() == "cuda", "selected by an earlier import"
    with (
        pytest.raises(UsageError, match=r"computes on cuda in this process, but this run is on cpu.*Start"),
        in_process_group(CPU),
    ):
        pytest.fail("it was not refused")
