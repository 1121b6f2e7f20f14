"""`fit` in several processes under accelerate's FSDP2: each process has a shard, and results equal one
process's.

The processes are forks of one that has imported everything (`clean_forks.py`), with torchrun's variables.
`exported_processes.py` makes accelerate assume GPUs.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from clean_forks import Forks, forks_of
from fitted import classified, losses_of, model_of, trainer_of
from many_fits import fit_of, fits, result_in
from small_runs import events
from snugfit.errors import RecipeError, UsageError
from snugfit.features.distributed.fields import ParallelWish
from snugfit.features.distributed.trainer.sharded import refuse_other_sharding
from snugfit.features.loops.trainer.parts import trainer_parts
from snugfit.features.loops.trainer.ranks import recipe_in_each
from snugfit.techniques.recipe import Recipe
from tiers import slow_but
from tolerance import ROUNDS, SAME, same_losses, same_parameters

pytestmark = [pytest.mark.whole, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]


@pytest.fixture(scope="module")
def forks() -> Forks:
    return forks_of("many_fits")


GATHERED_ONCE = {"reshard_after_forward": False}


@pytest.mark.parametrize(
    ("model", "recipe", "alone", "micro", "config"),
    slow_but(
        [
            ("gpt2", "fsdp(reshard=none) + micro_batches(2)", "plain", (2, 2), GATHERED_ONCE),
            ("bert", "plain", "plain", (4, 1), {}),
            ("gpt2 masked", "fsdp + micro_batches(4)", "plain", (1, 4), {}),
            ("gpt2", "fsdp + every_layer", "plain", (4, 1), {}),
            ("gpt2", "adamw_fused", "adamw_fused", (4, 1), {"cpu_ram_efficient_loading": True}),
            ("gpt2", "bf16", "bf16", (4, 1), {}),
            ("bert", "sgd + micro_batches(2)", "sgd", (2, 2), {"auto_wrap_policy": "NO_WRAP"}),
        ],
        1,
    ),
)
def test_two_processes_train_as_one_does(
    model: str,
    recipe: str,
    alone: str,
    micro: tuple[int, int],
    config: dict[str, Any],
    forks: Forks,
    tmp_path: Path,
) -> None:
    """The loss is the mean over the global batch for any padding; clipping uses the norm of all gradients."""
    how: dict[str, Any] = {"model": model, "max_grad_norm": 0.7, "max_steps": 4}
    assert fits(forks, tmp_path / "two", recipe=recipe, micro=micro, fsdp=config, **how) == [0, 0]
    one = fit_of(tmp_path / "one", recipe=alone, micro=(8, 1), **how)
    norms = [line["grad_norm"] for line in one.state.log_history if "loss" in line]
    assert max(norms) > 0.7, "clipping has an effect"
    both = [result_in(tmp_path / "two", rank) for rank in range(2)]
    # The gradients of a key's bias are rounding errors, which Adam scales to full updates.
    of_losses, of_weights = (ROUNDS, (5e-2, 1e-2)) if "bf16" in recipe else (SAME, (2e-4, 2e-5))
    for result, weights in both:
        same_losses(losses_of(one), result["losses"], of_losses)
        same_parameters(one.model.state_dict(), weights, of_weights)
    steps = [event for event in both[0][0]["told"] if event["event"] == "step"]
    assert [event["samples"] for event in steps] == [8] * 4
    same_losses(norms, [event["norm"] for event in steps], of_losses)
    assert not both[1][0]["told"], "only the first process reports"


LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "ACCELERATE_MIXED_PRECISION": "no",
}  # fmt: skip
"""Environment variables that `accelerate launch` sets for a configuration file with FSDP2."""


@pytest.mark.slow
def test_a_file_of_accelerate_launch_says_it_too(forks: Forks, tmp_path: Path) -> None:
    how: dict[str, Any] = {"launched": LAUNCHED, "use_cpu": False}
    assert fits(forks, tmp_path / "two", recipe="fsdp(reshard=none)", **how) == [0, 0]
    assert (tmp_path / "two" / "checkpoint-3" / "shards").is_dir()
    one = fit_of(tmp_path / "one", recipe="plain", micro=(8, 1))
    same_losses(losses_of(one), result_in(tmp_path / "two", 1)[0]["losses"])
    codes = fits(forks, tmp_path / "other", recipe="fsdp", **how)
    assert all(codes)
    said = (tmp_path / "other.rank-0").read_text()
    assert said.startswith("RecipeError: The recipe has 'fsdp', but the Trainer's FSDP2 has reshard_after")
    assert "Write 'fsdp(reshard=none)' in its place" in said


EVALUATES: dict[str, Any] = {
    "recipe": "fsdp(reshard=none)", "fsdp": GATHERED_ONCE, "evaluates": True, "eval_strategy": "steps",
    "eval_steps": 2, "save_steps": 2, "max_steps": 6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("step", "rank", "more"),
    slow_but([(5, 1, EVALUATES), (6, 0, {"fsdp": {}, "micro": (2, 2)}), (8, 1, {"fsdp": {}})], 1),
)
def test_a_run_whose_process_died_goes_on_bit_for_bit(
    step: int, rank: int, more: dict[str, Any], forks: Forks, tmp_path: Path
) -> None:
    """The run has dropout, a random order, separate generators, and evaluations before checkpoints.

    Evaluations leave whole weights in place of shards. Only the end of the run saves the whole model.
    """
    how: dict[str, Any] = {"dropout": 0.2, "recipe": "fsdp", "samples": 43, **more}
    assert fits(forks, tmp_path / "whole", **how) == [0, 0]
    codes = fits(forks, tmp_path / "killed", fault={"step": step, "kind": "dies", "rank": rank}, **how)
    assert codes[rank] == 9
    assert codes[1 - rank] != 0
    kept = max((tmp_path / "killed").glob("checkpoint-*"))
    assert {path.name for path in (kept / "shards").glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert not (kept / "model.safetensors").exists()
    assert fits(forks, tmp_path / "killed", resume=True, **how) == [0, 0]
    for one in range(2):
        (result, weights), (expected, others) = (
            result_in(tmp_path / name, one) for name in ("killed", "whole")
        )
        assert [result["losses"], result["evaluated"]] == [expected["losses"], expected["evaluated"]]
        assert all(torch.equal(weights[name], value) for name, value in others.items())
    assert (tmp_path / "killed" / f"checkpoint-{len(expected['losses'])}" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("many", ["fsdp", "ddp"])
def test_adapters_go_on_bit_for_bit_and_in_one_process(many: str, forks: Forks, tmp_path: Path) -> None:
    """Each checkpoint has whole adapters in peft's files, and checksums of frozen weights."""
    how: dict[str, Any] = {"model": "gpt2", "adapters": True, "max_steps": 6}
    several = how | ({"recipe": "fsdp", "fsdp": {}} if many == "fsdp" else {"recipe": "ddp"})
    assert fits(forks, tmp_path / "whole", **several) == [0, 0]
    codes = fits(forks, tmp_path / "killed", fault={"step": 5, "kind": "dies", "rank": 1}, **several)
    assert codes[1] == 9
    kept = tmp_path / "killed" / "checkpoint-3"
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {file.name for file in kept.iterdir()}
    assert any(json.loads((kept / "model_state.json").read_text())["frozen"].values())
    shutil.copytree(tmp_path / "killed", tmp_path / "moved")
    assert fits(forks, tmp_path / "killed", resume=True, **several) == [0, 0]
    for rank in range(2):
        (result, weights), (expected, others) = (
            result_in(tmp_path / name, rank) for name in ("killed", "whole")
        )
        assert result["losses"] == expected["losses"]
        assert all(torch.equal(weights[name], value) for name, value in others.items())
    moved = fit_of(tmp_path / "moved", recipe="plain", micro=(8, 1), resume=True, **how)
    same_losses(losses_of(moved), expected["losses"])
    same_parameters(moved.model.state_dict(), others)


@pytest.mark.slow
def test_evaluations_between_and_the_best_model_of_parts(forks: Forks, tmp_path: Path) -> None:
    """An evaluation leaves whole weights in place of shards.

    A checkpoint then contains these weights, and loading the best model restores them. `save_model` writes
    the model, also in a run that had finished before.
    """
    how: dict[str, Any] = {
        "evaluates": True, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "saves": True,
        "load_best_model_at_end": True, "learning_rate": 0.02, "fsdp": GATHERED_ONCE,
    }  # fmt: skip
    assert fits(forks, tmp_path / "two", recipe="fsdp(reshard=none)", **how) == [0, 0]
    (first, weights), (second, others) = (result_in(tmp_path / "two", rank) for rank in range(2))
    assert first["evaluated"] == second["evaluated"]
    assert all(torch.equal(weights[name], value) for name, value in others.items())
    *during, after = first["evaluated"]
    assert after == min(during) < during[-1], "the best is not the last"
    one = fit_of(tmp_path / "one", recipe="plain", **{**how, "fsdp": None, "micro": (8, 1)})
    same_losses(losses_of(one), first["losses"], (1e-2, 1e-4))
    saved = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "two.model")
    same_parameters(saved.state_dict(), weights, (0, 0))
    shutil.rmtree(tmp_path / "two.model")
    assert fits(forks, tmp_path / "two", recipe="fsdp(reshard=none)", **how) == [0, 0]
    (again, kept), _ = (result_in(tmp_path / "two", rank) for rank in range(2))
    assert "Nothing is left to train" in json.dumps(again["told"])
    assert again["evaluated"][-1] == first["evaluated"][-1]
    assert all(torch.equal(weights[name], value) for name, value in kept.items())
    saved = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "two.model")
    same_parameters(saved.state_dict(), weights, (0, 0))


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_with_a_checkpoint(forks: Forks, tmp_path: Path) -> None:
    """A signal leaves little time, so the checkpoint omits the whole model. The trainer keeps its own SGD."""
    how: dict[str, Any] = {"recipe": "its own", "optim": "sgd", "fsdp": {}}
    fault = {"step": 4, "kind": "is_stopped", "rank": 1}
    assert fits(forks, tmp_path / "run", fault=fault, **how) == [75, 75]
    assert not (tmp_path / "run" / "checkpoint-4" / "model.safetensors").exists()
    assert fits(forks, tmp_path / "run", resume=True, **how) == [0, 0]
    assert [event["step"] for event in events(tmp_path / "run", "step")] == [1, 2, 3, 4, 5, 6, 7, 8]
    told = json.dumps(result_in(tmp_path / "run", 0)[0]["told"])
    assert "keeps its own settings, 'sgd(" in told


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_all(forks: Forks, tmp_path: Path) -> None:
    """After the error, the folder still has the shards of the last checkpoint."""
    fault = {"step": 4, "kind": "spoils", "rank": 1}
    assert fits(forks, tmp_path / "run", recipe="fsdp", fault=fault, fsdp={}) == [1, 1]
    texts = [(tmp_path / f"run.rank-{rank}").read_text() for rank in range(2)]
    assert texts[0].startswith("SnugfitError: Step 5:")
    assert texts[1].startswith("ToldElsewhere: Step 5:")
    assert (tmp_path / "run" / "checkpoint-4" / "shards").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("told", [{"recipe": "ddp"}, {"recipe": "fsdp(reshard=none)", "fsdp": GATHERED_ONCE}])
def test_processes_that_train_twice_train_anew_together(
    told: dict[str, Any], forks: Forks, tmp_path: Path
) -> None:
    """All processes detect that the earlier run in this folder has finished."""
    how = {"model": "gpt2", "max_steps": 3, **told}
    assert fits(forks, tmp_path / "run", more_runs=1, **how) == [0, 0]
    one = fit_of(tmp_path / "one", more_runs=1, **{**how, "recipe": "plain", "fsdp": None, "micro": (8, 1)})
    for rank in range(2):
        same_losses(losses_of(one), result_in(tmp_path / "run", rank)[0]["losses"])
    assert (tmp_path / "run" / "checkpoint-3.before-restart").is_dir()


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"recipe": "plain", "micro": (4, 2)}),
    "ddp": (2, {"recipe": "ddp"}),
    "fsdp": (2, {"recipe": "fsdp", "fsdp": {}}),
    "fsdp of 4": (4, {"recipe": "fsdp", "micro": (2, 1), "fsdp": {}}),
}
"""Trainings on a global batch of eight samples: the number of processes, and their arguments."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("gpt2", "fsdp", "one"), ("bert", "one", "fsdp"), ("bert", "fsdp", "ddp"), ("gpt2", "ddp", "fsdp"),
        ("gpt2", "fsdp", "fsdp of 4"), ("bert", "fsdp of 4", "fsdp"), ("gpt2", "ddp", "one"),
    ],
)  # fmt: skip
def test_a_run_goes_on_on_other_processes(
    model: str, before: str, after: str, forks: Forks, tmp_path: Path
) -> None:
    """Whole weights and states become shards, shards become whole or are split anew; the data continues in
    order.

    Losses and weights equal those of an uninterrupted run, up to the rounding of sums.
    """
    how: dict[str, Any] = {"model": model, "samples": 56}
    (size, told), (other_size, told_then) = RUNS[before], RUNS[after]
    assert fits(forks, tmp_path / "whole", size, **how, **told) == [0] * size
    fault = {"step": 5, "kind": "is_stopped", "rank": 0}
    assert fits(forks, tmp_path / "run", size, fault=fault, **how, **told) == [75] * size
    assert fits(forks, tmp_path / "run", other_size, resume=True, **how, **told_then) == [0] * other_size
    expected, others = result_in(tmp_path / "whole", 0)
    for rank in range(other_size):
        result, weights = result_in(tmp_path / "run", rank)
        same_losses(expected["losses"], result["losses"])
        same_parameters(others, weights, (2e-4, 2e-5))
    warned = json.dumps(result_in(tmp_path / "run", 0)[0]["told"])
    assert "the run continues correctly, but no longer bit for bit" in warned


# ---- refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("ddp", "has 'ddp', but the Trainer's FSDP2 has reshard_after_forward=True"),
        ("fsdp(reshard=none)", r"which is 'fsdp'\. Write 'fsdp' in its place"),
        ("fsdp(offload=cpu)", "change the Trainer's fsdp and fsdp_config"),
        ("hsdp(2)", "Write 'fsdp' in its place, leave it out"),
        ("zero3", "has 'zero3"),
        ("fsdp + liger", "not tested there"),
    ],
)
def test_a_recipe_that_says_otherwise_than_the_trainer_is_refused(recipe: str, why: str) -> None:
    told = partial(refuse_other_sharding, configured=ParallelWish(weights="sharded", reshard="layers"))
    with pytest.raises(RecipeError, match=why):
        recipe_in_each(Recipe.parse(recipe), 2, told)


def test_a_recipe_that_says_fsdp_is_the_same_without() -> None:
    told = partial(refuse_other_sharding, configured=ParallelWish(weights="sharded", reshard="none"))
    for text in ("bf16 + fsdp(reshard=none)", "bf16"):
        assert recipe_in_each(Recipe.parse(text), 2, told) == Recipe.parse("bf16")
    by_ddp = partial(refuse_other_sharding, configured=ParallelWish())
    with pytest.raises(RecipeError, match=r"For fsdp configure the Trainer too: Training"):
        recipe_in_each(Recipe.parse("fsdp"), 2, by_ddp)


def told_of_fsdp(folder: Path, monkeypatch: pytest.MonkeyPatch, **plugin: Any) -> Any:
    """Return a trainer with the state of one of two processes under FSDP."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    trainer = trainer_of(folder, model_of("bert"), classified())
    state = trainer.accelerator.state.__dict__
    monkeypatch.setitem(state, "fsdp_plugin", FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **plugin}))
    monkeypatch.setitem(state, "distributed_type", DistributedType.FSDP)
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    return trainer


def test_what_is_not_kept_under_fsdp_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"fsdp_version": 1}, r"uses FSDP1; fit takes FSDP2\. Write .*'version': 2.* fsdp_version: 2 in"),
        ({"cpu_offload": True}, r"weights on the host .* snugfit train does it"),
        ({"activation_checkpointing": True}, "activation_checkpointing of fsdp_config: write every_layer"),
        ({"ignored_modules": []}, "ignored_modules, whose gradients nobody exchanges"),
    ]
    for number, (plugin, why) in enumerate(refused):
        with monkeypatch.context() as changes:
            trainer = told_of_fsdp(tmp_path / str(number), changes, **plugin)
            with pytest.raises(UsageError, match=why):
                trainer_parts(trainer).refuse_settings()
    trainer = told_of_fsdp(tmp_path, monkeypatch)
    trainer_parts(trainer).refuse_settings()
    for text, optimizer, why in (
        ("fp16", None, "fp16 cannot be combined with FSDP2"),
        ("lion", None, "and Lion is not known to update parts of weights"),
        ("plain", "adafactor", "optim='adafactor' is not known"),
    ):
        with pytest.raises(UsageError, match=why):
            trainer_parts(trainer).refuse_recipe(Recipe.parse(text).setup(), optimizer=optimizer)
    monkeypatch.setattr(type(trainer.args), "world_size", 1)
    with pytest.raises(UsageError, match=r"this is the only process\. Start the script with torchrun"):
        trainer_parts(trainer).refuse_settings()
