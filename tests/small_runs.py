"""Small runs of training: a BERT of one or two layers with dropout, on rows of numbers, on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from in_roster import needs_techniques
from small_models import small_job
from snugfit.frontends.own import options_of
from snugfit.job.job import Job
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from snugfit.training.journal import Event, read_journal
from snugfit.training.run.dataset import data_of
from snugfit.training.run.run import Run
from snugfit.training.run.train import Trained, train

CPU = torch.device("cpu")


def rows(count: int, *, vocabulary: int = 96, seed: int = 0) -> list[dict[str, Any]]:
    """Return samples of 4 to 15 tokens in two classes; the tokens of a class come from one half of the
    vocabulary."""
    draw = random.Random(seed)
    half = vocabulary // 2
    return [
        {
            "input_ids": [
                draw.randrange(5, half) + (half - 5) * (index % 2) for _ in range(draw.randrange(4, 16))
            ],
            "label": index % 2,
        }
        for index in range(count)
    ]


STACKED = (Slot.ENGINE, Slot.CHECKPOINTING, Slot.ACTIVATION_OFFLOAD, Slot.PIPELINE_PARALLEL)
"""Slots whose techniques may need a stack of equal layers."""


def layers_of(recipe: str) -> int:
    """Return the fewest layers of a model under this recipe: two if a technique needs a stack of them."""
    return 1 if all(one.plain for one in Recipe.parse(recipe) if one.slot in STACKED) else 2


def bert_job(batch_size: int = 4, *, layers: int = 1, **more: Any) -> Job:
    return replace(small_job("bert", layers), batch_size=batch_size, sequence_length=16, **more)


def small_run(
    folder: Path, recipe: str = "plain", *, job: Job | None = None, samples: Any = None, **options: Any
) -> Run:
    """Return a run of 12 steps, unless `options` set another number."""
    job = job or bert_job(clip=1.0, layers=layers_of(recipe))
    wanted = options_of({"max_steps": 12, **options})
    data = data_of(samples or rows(42), job, None, columns=None, pack=False, collate=None, options=wanted)
    return Run(
        job=job,
        recipe=Recipe.parse(recipe),
        options=wanted,
        data=data,
        evaluation=data,
        folder=folder,
        weights=None,
        device=CPU,
    )


def skip_without_packages(recipe: str) -> None:
    """Skip the test and give the reason if a technique of the recipe or its package is missing."""
    needs_techniques(recipe)
    missing = [why for technique in Recipe.parse(recipe) if (why := technique.missing_package())]
    if missing:
        pytest.skip(missing[0])


class Killed(BaseException):
    """Simulated end of the process."""


def killed_after(step: int) -> Callable[[Event], None]:
    """Return an observer that ends the run at the event of this step."""

    def watch(event: Event) -> None:
        if event["event"] == "step" and event["step"] == step:
            raise Killed

    return watch


def killed_in(run: Run, step: int) -> None:
    """Train until the event of this step, and kill the run there."""
    with pytest.raises(Killed):
        train(run, watch=killed_after(step))


def resumed_as_whole(run: Run, killed_at: int) -> Trained:
    """Train a run, and again with a kill at the event of this step. The losses and weights of both must be
    equal. Return the resumed run, which is in the folder `killed` of the run's folder.
    """
    whole, cut = (replace(run, folder=run.folder / name) for name in ("whole", "killed"))
    expected = train(whole)
    killed_in(cut, killed_at)
    resumed = train(cut)
    saved = run.options.save_steps
    assert events(cut.folder, "started")[1]["resumed_from"] == (killed_at - 1) // saved * saved
    assert losses(cut.folder) == losses(whole.folder)
    assert_same_weights(resumed.model, expected.model)
    return resumed


def losses(folder: Path) -> dict[int, tuple[float, float, float]]:
    """Return loss, norm and learning rate of each step; a repeated step has its last values."""
    return {
        event["step"]: (event["loss"], event["norm"], event["learning_rate"])
        for event in read_journal(folder)
        if event["event"] == "step"
    }


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def events(folder: Path, kind: str) -> list[Event]:
    return [event for event in read_journal(folder) if event["event"] == kind]
