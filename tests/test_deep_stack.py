"""A deep model is rehearsed on a stack that is large enough for the deletion of its graph."""

from __future__ import annotations

import threading

import pytest
import torch

from clean_forks import Forks, forks_of
from small_models import small_job
from snugfit.errors import UsageError
from snugfit.rehearsal import deep_stack
from snugfit.rehearsal.deep_stack import is_deep, run_on_deep_stack
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe

NODES = 60_000


def forks() -> Forks:
    return forks_of("test_deep_stack")


def end_of_a_graph() -> None:
    """Build and delete a chain of nodes that Python has seen, as in a rehearsal."""
    value = torch.ones(1, requires_grad=True)
    for _ in range(NODES):
        value = value * 2
        value.grad_fn.metadata["seen"] = True
    del value


def with_its_stack() -> int:
    run_on_deep_stack(end_of_a_graph)
    return 0


@pytest.mark.whole
def test_the_end_of_a_deep_graph_has_room() -> None:
    """On a stack of the usual size the process ends with SIGSEGV."""
    assert forks().ended(forks().start(with_its_stack)) == 0


def test_what_is_raised_and_returned_is_the_same() -> None:
    assert run_on_deep_stack(lambda: threading.current_thread().daemon)
    with pytest.raises(UsageError, match="as it is"):
        run_on_deep_stack(refuse)
    assert threading.stack_size() == 0


def refuse() -> None:
    raise UsageError("as it is")


def test_a_rehearsal_is_the_same_there(monkeypatch: pytest.MonkeyPatch) -> None:
    job, setup = small_job("llama", 2), Recipe.parse("bf16 + released").setup()
    policy = CpuPolicy()
    assert not is_deep(job, deep_stack.DEEP_LAYERS)
    usual = rehearse(job, setup, policy)
    seen: list[int] = []
    real = run_on_deep_stack
    monkeypatch.setattr("snugfit.rehearsal.rehearse.DEEP_LAYERS", 2)
    monkeypatch.setattr(
        "snugfit.rehearsal.rehearse.run_on_deep_stack", lambda work: (seen.append(1), real(work))[1]
    )
    there = rehearse(job, setup, policy)
    assert seen
    assert (there.blocks, there.kernels) == (usual.blocks, usual.kernels)
