"""`fit` in several processes: the Trainer's own DDP trains as one process does, and loses nothing.

The processes are forks of one that has imported everything (`clean_forks.py`), with torchrun's variables.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import snugfit
from clean_forks import Forks, forks_of
from fitted import losses_of
from many_fits import fit_of, fits, result_in
from small_runs import events
from snugfit.errors import RecipeError, UsageError
from snugfit.features.loops.trainer import ranks
from snugfit.features.loops.trainer.parts import trainer_parts
from snugfit.features.loops.trainer.ranks import recipe_in_each, refuse_in_several_processes
from snugfit.techniques.recipe import Recipe
from tiers import slow_but
from tolerance import same_losses, same_parameters

pytestmark = [pytest.mark.whole, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

BY_DDP = trainer_parts(SimpleNamespace(is_fsdp_enabled=False)).refuse_sharding
"""Function that checks a recipe for a Trainer without FSDP."""


@pytest.fixture(scope="module")
def forks() -> Forks:
    return forks_of("many_fits")


@pytest.mark.parametrize(
    ("model", "recipe", "micro"),
    slow_but(
        [
            ("gpt2", "ddp + micro_batches(2)", (2, 2)),
            ("bert", "plain", (4, 1)),
            ("gpt2 masked", "ddp + micro_batches(4)", (1, 4)),
            ("gpt2", "ddp + every_layer", (4, 1)),
        ],
        1,
    ),
)
def test_two_processes_train_as_one_does(
    model: str, recipe: str, micro: tuple[int, int], forks: Forks, tmp_path: Path
) -> None:
    """The loss is the mean over the global batch for any distribution of padding and masks."""
    how: dict[str, Any] = {"model": model, "max_steps": 4}
    assert fits(forks, tmp_path / "two", recipe=recipe, micro=micro, **how) == [0, 0]
    alone = fit_of(tmp_path / "one", recipe="plain", micro=(8, 1), **how)
    both = [result_in(tmp_path / "two", rank) for rank in range(2)]
    for result, weights in both:
        same_losses(losses_of(alone), result["losses"])
        # The gradients of a key's bias are rounding errors, which Adam scales to full updates.
        same_parameters(alone.model.state_dict(), weights, (2e-4, 2e-5))
    told = both[0][0]["told"]
    assert [event["samples"] for event in told if event["event"] == "step"] == [8] * 4
    assert not both[1][0]["told"], "only the first process reports"


@pytest.mark.slow
@pytest.mark.parametrize(("step", "rank"), [(7, 1), (6, 0)])
def test_a_run_whose_process_died_goes_on_bit_for_bit(
    step: int, rank: int, forks: Forks, tmp_path: Path
) -> None:
    """The run has dropout, a random order, and separate generators in each process."""
    how: dict[str, Any] = {"dropout": 0.2, "recipe": "ddp + micro_batches(2)", "samples": 43}
    assert fits(forks, tmp_path / "whole", **how) == [0, 0]
    fault = {"step": step, "kind": "dies", "rank": rank}
    codes = fits(forks, tmp_path / "killed", fault=fault, **how)
    assert codes[rank] == 9
    assert codes[1 - rank] != 0
    assert fits(forks, tmp_path / "killed", resume=True, **how) == [0, 0]
    for one in range(2):
        (result, weights), (expected, others) = (
            result_in(tmp_path / name, one) for name in ("killed", "whole")
        )
        assert result["losses"] == expected["losses"]
        assert all(torch.equal(weights[name], value) for name, value in others.items())


def test_a_signal_to_one_process_stops_all_with_a_checkpoint(forks: Forks, tmp_path: Path) -> None:
    fault = {"step": 4, "kind": "is_stopped", "rank": 1}
    assert fits(forks, tmp_path / "run", fault=fault) == [75, 75]
    assert (tmp_path / "run" / "checkpoint-4").is_dir()
    assert fits(forks, tmp_path / "run", resume=True) == [0, 0]
    steps = [event["step"] for event in events(tmp_path / "run", "step")]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(UsageError, match="batch_size was 8 and is now 4"):
        fit_of(tmp_path / "run", recipe="plain", resume=True)


def test_a_loss_that_is_no_number_ends_all(forks: Forks, tmp_path: Path) -> None:
    fault = {"step": 4, "kind": "spoils", "rank": 1}
    codes = fits(forks, tmp_path / "run", fault=fault)
    assert all(code == 1 for code in codes)
    texts = [(tmp_path / f"run.rank-{rank}").read_text() for rank in range(2)]
    assert texts[0].startswith("SnugfitError: Step 5:")
    assert texts[1].startswith("ToldElsewhere: Step 5:")
    assert (tmp_path / "run" / "nonfinite-step-5-rank-1.safetensors").is_file()


def test_memory_that_runs_out_in_one_ends_all(forks: Forks, tmp_path: Path) -> None:
    """The step is not repeated, because the other processes have already exchanged its gradients."""
    codes = fits(forks, tmp_path / "run", fault={"step": 4, "kind": "exhausts", "rank": 1})
    assert all(codes)
    text = (tmp_path / "run.rank-1").read_text()
    assert text.startswith("OutOfMemory:")
    assert "It was rank 1. With several GPUs a run does not continue by itself" in text
    assert (tmp_path / "run.rank-0").read_text().startswith("ToldElsewhere: Another process of this run")


def test_the_best_model_and_a_finished_run_are_those_of_all(forks: Forks, tmp_path: Path) -> None:
    """fit keeps transformers' own evaluation result: for a classifier, twice its loss."""
    how: dict[str, Any] = {
        "evaluates": True, "eval_strategy": "steps", "eval_steps": 4, "save_steps": 4,
        "load_best_model_at_end": True,
    }  # fmt: skip
    assert fits(forks, tmp_path / "two", **how) == [0, 0]
    (first, weights), (second, others) = (result_in(tmp_path / "two", rank) for rank in range(2))
    assert first["evaluated"] == second["evaluated"]
    assert len(first["evaluated"]) == 2
    assert all(torch.equal(weights[name], value) for name, value in others.items())
    assert fits(forks, tmp_path / "two", **how) == [0, 0]
    (again, kept), _ = (result_in(tmp_path / "two", rank) for rank in range(2))
    assert "Nothing is left to train" in json.dumps(again["told"])
    assert all(torch.equal(weights[name], value) for name, value in kept.items())


# ---- refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("fsdp", "Write 'ddp' in its place"),
        ("zero1", "snugfit train takes several"),
        ("ddp(bucket_views=true)", "each process has all of the model"),
        ("zero3", "the Trainer's own DDP"),
        ("ddp + lora(4)", "not tested there"),
        ("ddp + compiled", "train in one process"),
    ],
)
def test_other_recipes_are_refused_by_name(recipe: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        recipe_in_each(Recipe.parse(recipe), 2, BY_DDP)


def test_a_recipe_that_says_ddp_is_the_same_without() -> None:
    assert recipe_in_each(Recipe.parse("ddp + bf16"), 2, BY_DDP) == Recipe.parse("bf16")
    assert recipe_in_each(Recipe.parse("bf16"), 4, BY_DDP) == Recipe.parse("bf16")
    assert recipe_in_each(Recipe.parse("bf16"), 1, BY_DDP) == Recipe.parse("bf16")
    with pytest.raises(RecipeError, match="this is the only one"):
        recipe_in_each(Recipe.parse("ddp + bf16"), 1, BY_DDP)


def test_what_a_trainer_cannot_keep_there_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers
    from accelerate.utils import DistributedType

    from fitted import classified, model_of, trainer_of

    class Own(transformers.Trainer):
        def compute_loss(self, *arguments: Any, **more: Any) -> Any:
            return super().compute_loss(*arguments, **more)

    trainer = trainer_of(tmp_path, model_of("bert"), classified(), kind=Own)
    refuse_in_several_processes(trainer)  # the run has a single process
    launched = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="2 processes were started, but each one's Trainer trains alone"):
        refuse_in_several_processes(trainer)
    with pytest.raises(UsageError, match=r"snugfit\.accelerate trains a hand-written loop in one"):
        snugfit.accelerate(trainer.model, None, [], "plain")  # type: ignore[arg-type]
    for name in launched:
        monkeypatch.delenv(name)
    monkeypatch.setattr(ranks, "processes_of", lambda trainer: 2)
    trainer.accelerator.state.__dict__["distributed_type"] = DistributedType.MULTI_CPU
    trainer.accelerator.dataloader_config.even_batches = False
    with pytest.raises(UsageError) as refused:
        refuse_in_several_processes(trainer)
    for words in ("one of 2 processes", "a loss of its own", "even_batches=False", "RANK, WORLD_SIZE"):
        assert words in str(refused.value)
