"""A user's batch is cut by its samples, and a user's schedule is recognized by its settings."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from snugfit.errors import JobError
from snugfit.features.loops.pieces import pieces_of
from snugfit.features.loops.users_optimizer import schedule_facts, settings_of
from snugfit.training.checkpoint.facts import compare_facts
from snugfit.training.run.items import samples_in


def pictures() -> dict[str, Any]:
    """Return input of a vision-language model: the patches of both pictures in one row."""
    return {
        "input_ids": torch.arange(12).reshape(2, 6),
        "pixel_values": torch.arange(float(2 * 16 * 3)).reshape(-1, 3),
        "grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "labels": torch.arange(2),
    }


def test_loops_of_the_user_s_cut_only_what_holds_samples() -> None:
    assert samples_in(pictures()) == 2
    assert [piece is batch for batch in (pictures(),) for piece in pieces_of(batch, 2)] == [True]
    with pytest.raises(JobError, match=r"pieces of 1.*pixel_values 32.*whole batch at once"):
        list(pieces_of(pictures(), 1))
    batch = {"ids": torch.arange(5), "names": list("abcde"), "scale": torch.tensor(2.0)}
    pieces = list(pieces_of(batch, 2))
    assert [piece["names"] for piece in pieces] == [["a", "b"], ["c", "d"], ["e"]]
    assert all(piece["scale"] == 2 for piece in pieces)


def test_schedules_are_compared_by_their_settings_and_parts() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedules = torch.optim.lr_scheduler

    def chain(gamma: float) -> Any:
        parts = [schedules.ConstantLR(optimizer), schedules.ExponentialLR(optimizer, gamma)]
        return schedules.SequentialLR(optimizer, parts, milestones=[5])

    before, now = ({"facts": schedule_facts(chain(gamma)), "versions": {}} for gamma in (0.9, 0.8))
    differing = compare_facts(before, now)
    assert differing == ["schedule.1.gamma was 0.9 and is now 0.8"]


def test_an_object_has_settings_and_a_function_has_none() -> None:
    def collate() -> None: ...

    collator = SimpleNamespace(mlm_probability=0.3, _state=1)
    assert settings_of("collator", collator) == {
        "collator.class": "SimpleNamespace", "collator.mlm_probability": 0.3,
    }  # fmt: skip
    for owner in (None, collate, partial(collate)):
        assert settings_of("collator", owner) == {}
