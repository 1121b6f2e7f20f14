"""Optimizer states of bitsandbytes in 8 bits, in several processes: law 1, training and resumed runs."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_ranks import case, rehearsed

from clean_forks import Forks, forks_of
from gloo_ranks import Ran, assert_same_account, by_case, run_ranks
from many_ranks import LAST, run_of, trained, weights_in
from rank_events import without_own
from small_models import small_job
from small_runs import losses
from snugfit.errors import RecipeError, SnugfitError, UsageError
from snugfit.features.exchange.export import export
from snugfit.prediction.predict import predict
from snugfit.techniques.recipe import Recipe
from tiers import few_of, slow_but
from tolerance import same_losses

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
pytestmark = [pytest.mark.whole, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

CODE_BOOK = 1024
"""Bytes of bitsandbytes' code book, which has 256 fp32 values."""

CASES = [
    ("llama", "fsdp + adamw_8bit + bf16_pure"),
    ("llama", "fsdp + lion_8bit"),
    ("llama", "fsdp + adamw_8bit(embeddings=8) + lora(r=4) + bf16"),
    ("bert", "fsdp + adamw_8bit(embeddings=8)"),
    ("bert", "zero1 + adamw_8bit"),
]
CASES = few_of(CASES, [one for one in CASES if one not in (CASES[0], CASES[4])])


@functools.cache
def real() -> dict[tuple[str, str, int], Ran]:
    """Start two ranks once, and return the results of each case and rank."""
    return by_case(CASES, run_ranks(2, [case(*one) for one in CASES], trains=False))


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_one_of_two_real_ranks_allocates_what_its_trace_has(family: str, recipe: str) -> None:
    """The CPU's update kernels have temporaries of their own. Code books are created on the CPU, so only a
    GPU needs copies of them. In `make test` one rank of each case is compared, the first and the last one in
    turn.
    """
    for rank in few_of([0, 1], [CASES.index((family, recipe)) % 2]):
        trace = [
            one
            for one in without_own(rehearsed(2, family, recipe, rank))
            if not (
                one.nbytes == CODE_BOOK and one.operators[0] == "aten::_to_copy" and one.phase == "update"
            )
        ]
        real_events = without_own(real()[family, recipe, rank].account)
        # An optimizer creates both code books at the end of the build.
        books = [one.block for one in real_events if one.nbytes == CODE_BOOK and one.phase == "build"][-2:]
        account = [
            one
            for one in real_events
            if one.block not in books
            and not any(name.startswith("bitsandbytes::optimizer_update") for name in one.operators)
        ]
        assert_same_account(account, trace, f"{family}, {recipe}, rank {rank}")


# ---- training --------------------------------------------------------------------------------------------


FACTS = {"hidden_size": 256, "intermediate_size": 384}
"""Sizes of a Llama in which only the last matrix of an MLP has rows of part blocks."""

HOW: dict[str, Any] = {"job": "llama", "layers": 1, "lr_scheduler_type": "constant", "facts": FACTS}

TRAINED = [
    ("fsdp + adamw_8bit(embeddings=8)", 2, "fsdp", 4),
    ("fsdp + adamw_8bit(embeddings=8)", 2, "", 1),
    ("zero1 + adamw_8bit", 2, "zero1", 4),
    ("fsdp + adamw_8bit + lora(r=16)", 2, "", 1),
]
"""Recipes, their processes, and the technique and the processes of another resumed run."""


@pytest.fixture(scope="module")
def forks() -> Forks:
    return forks_of("many_ranks")


@pytest.mark.parametrize(("recipe", "size", "other", "others"), slow_but(TRAINED, TRAINED[1:2].__contains__))
def test_states_in_eight_bits_train_on_and_elsewhere(
    tmp_path: Path, forks: Forks, recipe: str, size: int, other: str, others: int
) -> None:
    """A resumed run equals the uninterrupted one bit for bit, and its losses are also those of another number
    of processes.
    """
    assert trained(forks, tmp_path / "whole", size, recipe=recipe, **HOW) == [0] * size
    assert trained(forks, tmp_path / "half", size, recipe=recipe, max_steps=3, **HOW) == [0] * size
    shutil.copytree(tmp_path / "half", tmp_path / "moved")
    assert trained(forks, tmp_path / "half", size, recipe=recipe, **HOW) == [0] * size
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    ours, theirs = (weights_in(tmp_path / name, LAST) for name in ("half", "whole"))
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)
    elsewhere = " + ".join([other, *recipe.split(" + ")[1:]]).removeprefix(" + ")
    if others == 1:
        assert run_of(str(tmp_path / "moved"), recipe=elsewhere, **HOW).exit_code == 0
    else:
        assert trained(forks, tmp_path / "moved", others, recipe=elsewhere, **HOW) == [0] * others
    same_losses(*([row[0] for row in losses(tmp_path / one).values()] for one in ("whole", "moved")))


@pytest.mark.slow
def test_a_run_of_one_process_resumes_on_shards(tmp_path: Path, forks: Forks) -> None:
    """Weights whose rows are no whole blocks go on in 32 bits."""
    recipe = "adamw_8bit(embeddings=8)"
    run_of(str(tmp_path / "alone"), recipe=recipe, **HOW)
    run_of(str(tmp_path / "run"), recipe=recipe, max_steps=3, **HOW)
    assert trained(forks, tmp_path / "run", 2, recipe=f"fsdp + {recipe}", **HOW) == [0, 0]
    same_losses(*([row[0] for row in losses(tmp_path / one).values()] for one in ("run", "alone")))


# ---- sizes -----------------------------------------------------------------------------------------------


def test_the_whole_weight_decides_the_number_of_bits() -> None:
    """A matrix of 64 x 256 elements has shards of 2,048 elements on eight GPUs, below bitsandbytes' limit."""
    job = small_job("llama", 1, {"hidden_size": 256, "intermediate_size": 512}, batch_size=8)
    states = {}
    for gpus in few_of([2, 8], [2]):
        for optimizer in ("adamw", "adamw_8bit(embeddings=8)"):
            kinds = predict(job, f"fsdp + {optimizer}", gpu="h200", gpus=gpus).footprint.kinds
            states[gpus, optimizer] = next(v for k, v in kinds.items() if k.name == "OPTIMIZER_STATES")
    for gpus in {gpus for gpus, _ in states}:
        assert states[gpus, "adamw_8bit(embeddings=8)"] < 0.35 * states[gpus, "adamw"]


@pytest.mark.parametrize("recipe", ["fsdp(offload=cpu) + adamw_8bit", "fsdp + paged_adamw", "fsdp + lion"])
def test_other_optimizers_of_bitsandbytes_are_refused_on_shards(recipe: str) -> None:
    job = small_job("llama", 2, batch_size=2, sequence_length=8)
    with pytest.raises(RecipeError, match="not simulated on shards"):
        predict(job, recipe, gpu="h200", gpus=2)


def test_other_loops_and_scripts_refuse_states_in_eight_bits_on_shards() -> None:
    job = small_job("llama", 1, batch_size=2, sequence_length=8)
    with pytest.raises(UsageError, match="take no shards of FSDP2"):
        predict(job, "fsdp + adamw_8bit", gpu="h200", gpus=2, loop="accelerate")
    with pytest.raises(SnugfitError, match="take no shards of FSDP2"):
        export(job, Recipe.parse("fsdp + adamw_8bit"), "torch", gpus=2)
