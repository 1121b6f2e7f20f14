"""Several GPUs where no technique for them is installed: one clear error each."""

from __future__ import annotations

import pytest

from small_models import small_job
from snugfit.cli import request
from snugfit.errors import UsageError
from snugfit.planning import several_gpus
from snugfit.techniques import roster
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import job_of_rank, on_gpus, ranks_of


def test_a_number_of_gpus_needs_a_technique_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "slots_of_several_gpus", lambda: ())
    with pytest.raises(UsageError, match=r"^2 GPUs were named, but no technique here trains on several"):
        on_gpus(Setup(), 2)
    assert on_gpus(Setup(), 1) == Setup()


def test_a_mesh_needs_a_technique_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "hooks", lambda method: ())
    with pytest.raises(UsageError, match="--mesh needs techniques for several GPUs, and none is installed"):
        request._on_mesh({"mesh": "ddp=2"})


def test_a_plan_for_several_gpus_needs_a_technique_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_gpus, "hooks", lambda method: ())
    with pytest.raises(UsageError, match=r"none is installed\. Plan for one GPU\."):
        several_gpus.group_plans()


def test_a_recipe_for_one_gpu_has_one_process_with_the_whole_batch() -> None:
    job = small_job("bert", 1, batch_size=3)
    assert ranks_of(Setup()) == 1
    assert job_of_rank(job, Setup()) == job
