"""Checkpoints of an optimizer whose states are spread over processes, tested without starting any.

The ranks run one after the other, in a group that sends nothing. `test_train_many.py` trains with real
processes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from small_models import small_job
from snugfit.errors import UsageError
from snugfit.features.distributed.apply.sharded_optimizer import (
    local_optimizer,
    spreads_states,
)
from snugfit.features.distributed.simulate.ranks import process_group
from snugfit.step.build import build_model, build_optimizer
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import on_gpus
from snugfit.training.checkpoint.optimizer_state import (
    optimizer_state,
    parameters_of,
    restore_optimizer,
)
from snugfit.training.checkpoint.parts import updated_elsewhere
from snugfit.training.checkpoint.state import TrainState, tensor_bytes

CPU = torch.device("cpu")


@contextmanager
def of_rank(rank: int, recipe: str = "zero1", ranks: int = 2) -> Iterator[TrainState]:
    job, setup = small_job("bert", 1), on_gpus(Recipe.parse(recipe).setup(), ranks)
    torch.manual_seed(0)
    with process_group(rank, ranks):
        model = build_model(job, setup, CPU)
        optimizer = build_optimizer(job, setup, model)
        yield TrainState(model=model, optimizer=optimizer, scheduler=None, scaler=None, device=CPU)


def after_a_step(state: TrainState) -> dict[str, Any]:
    """Return the saved optimizer state after a step. Gradients depend on the weight's number alone."""
    for number, weight in enumerate(state.model.parameters()):
        weight.grad = torch.full_like(weight, 1.0 + number)
    state.optimizer.step()
    return copy.deepcopy(optimizer_state(state.optimizer))


@pytest.mark.whole
def test_states_are_this_process_s_by_their_place_among_all() -> None:
    """The states of all processes together equal those of one optimizer of all weights, and so do the
    groups."""
    with of_rank(0, "ddp") as state:
        assert not spreads_states(state.optimizer)
        assert local_optimizer(state.optimizer) is state.optimizer
        assert not updated_elsewhere(state.optimizer)
        whole = after_a_step(state)
    kept = []
    for rank in range(2):
        with of_rank(rank) as state:
            kept.append(after_a_step(state))
            own = len(parameters_of(local_optimizer(state.optimizer)))
            assert len(kept[rank]["states"]) == own < len(whole["states"])
            assert len(updated_elsewhere(state.optimizer)) == len(whole["states"]) - own
    assert not kept[0]["states"].keys() & kept[1]["states"].keys()
    torch.testing.assert_close(kept[0]["states"] | kept[1]["states"], whole["states"], rtol=0, atol=0)
    for one in kept:
        assert one["groups"] == whole["groups"]
        assert not one["attributes"], "a rank's number is no state of its optimizer"


@pytest.mark.whole
@pytest.mark.parametrize("rank", [0, 1])
def test_of_all_states_a_process_keeps_its_own(rank: int) -> None:
    with of_rank(0, "ddp") as state:
        whole = after_a_step(state)
    whole["groups"][0]["lr"] = 0.25
    with of_rank(rank) as state:
        restore_optimizer(state.optimizer, whole)
        local = local_optimizer(state.optimizer)
        assert local.state.keys() == set(parameters_of(local))
        assert not state.optimizer.state
        assert vars(state.optimizer)["rank"] == rank
        assert state.optimizer.param_groups[0]["lr"] == 0.25
        again = after_a_step(state)
    assert {float(values["step"]) for values in again["states"].values()} == {2.0}


def test_copies_have_room_for_what_a_process_writes() -> None:
    """A process saves its updated weights with two moments each. All processes together save each weight
    once."""
    rooms = []
    for rank in range(2):
        with of_rank(rank) as state:
            rooms.append(sum(tensor_bytes(state)))
    weights = sum(weight.nbytes for weight in state.model.parameters())
    buffers = sum(buffer.nbytes for buffer in state.model.buffers())
    assert sum(rooms) == 3 * weights + 2 * buffers
    assert max(rooms) < 2 * weights


def test_a_loop_that_keeps_one_process_s_states_refuses_it() -> None:
    """`fit` and accelerate refuse sharded optimizer states, since only their first process writes
    checkpoints.
    """
    users_optimizer = pytest.importorskip("snugfit.features.loops.users_optimizer")
    with of_rank(0) as state, pytest.raises(UsageError, match="ZeroRedundancyOptimizer"):
        users_optimizer.refuse_optimizer(state.optimizer, keeps=True)
