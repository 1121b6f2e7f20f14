"""`snugfit train` with pipeline stages: it trains like one process, and resumes bit for bit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_train_many import equal

from clean_forks import Forks, forks_of
from many_ranks import LAST, fault_told, run_of, trained, weights_in
from small_runs import events, losses
from tiers import slow_but
from tolerance import same_losses, same_parameters

pytestmark = [pytest.mark.whole, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

TWO = "pipeline(2) + micro_batches(2)"
SHARED = "pipeline(2) + tensor(2) + micro_batches(2)"
INTERLEAVED = "pipeline(2, schedule=interleaved) + micro_batches(2)"

HOW: dict[str, Any] = {"job": "llama", "layers": 4}

TIED: dict[str, Any] = {**HOW, "facts": {"tie_word_embeddings": True}, "lr_scheduler_type": "constant"}
"""Arguments of a run with a model whose embedding is its output head."""


@pytest.fixture(scope="module")
def forks() -> Forks:
    return forks_of("many_ranks")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run_of(str(folder), **HOW, eval_strategy="steps", eval_steps=4, lr_scheduler_type="constant")
    return folder


RECIPES = [
    (TWO, 2), ("pipeline(2) + ddp + micro_batches(2)", 4), ("pipeline(2) + fsdp + micro_batches(2)", 4),
    ("pipeline(4, schedule=gpipe) + micro_batches(2)", 4), (SHARED, 4), (INTERLEAVED, 2),
    ("pipeline(2, schedule=zero_bubble) + micro_batches(4)", 2),
    ("pipeline(2, schedule=interleaved) + fsdp + micro_batches(2)", 4),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "size"), slow_but(RECIPES, 0))
def test_as_one_process(tmp_path: Path, forks: Forks, alone: Path, recipe: str, size: int) -> None:
    """Losses, norms, evaluations and weights equal those of one process, with unevenly padded samples."""
    how = {**HOW, "eval_strategy": "steps", "eval_steps": 4, "lr_scheduler_type": "constant"}
    assert trained(forks, tmp_path / "many", size, recipe=recipe, **how) == [0] * size
    ours, theirs = losses(tmp_path / "many"), losses(alone)
    assert list(ours) == list(theirs) == list(range(1, LAST + 1)), "one process writes the journal, once"
    for column in range(3):
        same_losses([row[column] for row in ours.values()], [row[column] for row in theirs.values()])
    for name in ("samples", "tokens"):
        assert [event[name] for event in events(tmp_path / "many", "step")] == [
            event[name] for event in events(alone, "step")
        ], name
    same_losses(*([event["loss"] for event in events(at, "evaluated")] for at in (tmp_path / "many", alone)))
    same_parameters(weights_in(tmp_path / "many", LAST), weights_in(alone, LAST))


@pytest.mark.parametrize(
    ("recipe", "size"),
    slow_but(
        [
            (TWO, 2),
            ("pipeline(2) + fsdp + micro_batches(2)", 4),
            (SHARED, 4),
            (INTERLEAVED, 2),
            ("pipeline(2, schedule=interleaved) + fsdp + micro_batches(2)", 4),
        ],
        0,
    ),
)
def test_resumed_on_as_many_it_is_the_same_run(tmp_path: Path, forks: Forks, recipe: str, size: int) -> None:
    """The resumed run equals the uninterrupted one bit for bit."""
    how = {**HOW, "recipe": recipe, "lr_scheduler_type": "constant"}
    assert trained(forks, tmp_path / "whole", size, **how) == [0] * size
    assert trained(forks, tmp_path / "half", size, max_steps=3, **how) == [0] * size
    assert trained(forks, tmp_path / "half", size, **how) == [0] * size
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    assert equal(weights_in(tmp_path / "half", LAST), weights_in(tmp_path / "whole", LAST))
    assert not events(tmp_path / "half", "warning")


OTHERS = [
    (TWO, "micro_batches(2)", 1), ("micro_batches(2)", TWO, 2), (TWO, "fsdp + micro_batches(2)", 2),
    (TWO, "pipeline(4, schedule=gpipe) + micro_batches(2)", 4), (INTERLEAVED, "micro_batches(2)", 1),
    (INTERLEAVED, TWO, 2), (TWO, INTERLEAVED, 2),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "size"), slow_but(OTHERS, OTHERS[4:5].__contains__))
def test_resumed_on_others_it_has_the_same_numbers(
    tmp_path: Path, forks: Forks, alone: Path, before: str, after: str, size: int
) -> None:
    """Another number of processes loads weights and optimizer states."""
    how = {**HOW, "lr_scheduler_type": "constant"}
    for recipe, count, steps in ((before, 1 if before == "micro_batches(2)" else 2, 3), (after, size, LAST)):
        if count == 1:
            assert run_of(str(tmp_path / "run"), recipe=recipe, max_steps=steps, **how).exit_code == 0
        else:
            asked = {"recipe": recipe, "max_steps": steps, **how}
            assert trained(forks, tmp_path / "run", count, **asked) == [0] * count
    same_losses(*([row[0] for row in losses(at).values()] for at in (tmp_path / "run", alone)))
    same_parameters(weights_in(tmp_path / "run", LAST), weights_in(alone, LAST))


@pytest.fixture(scope="module")
def tied_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of one process with a model whose head is its embedding."""
    folder = tmp_path_factory.mktemp("tied_alone") / "run"
    run_of(str(folder), **TIED)
    return folder


TIED_RECIPES = [
    (TWO, 2), ("pipeline(4, schedule=gpipe) + micro_batches(2)", 4),
    ("pipeline(2) + fsdp + micro_batches(2)", 4), ("pipeline(2) + ddp + micro_batches(2)", 4), (SHARED, 4),
    (INTERLEAVED, 2), ("pipeline(2, schedule=interleaved) + fsdp + micro_batches(2)", 4),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "size"), slow_but(TIED_RECIPES, 1))
def test_a_head_that_is_the_embedding_trains_as_in_one_process(
    tmp_path: Path, forks: Forks, tied_alone: Path, recipe: str, size: int
) -> None:
    """Losses, norms and weights are equal, and a resumed run is the same bit for bit.

    The last checkpoint has the matrix once, like that of one process.
    """
    how = {**TIED, "recipe": recipe}
    assert trained(forks, tmp_path / "half", size, max_steps=3, **how) == [0] * size
    for name in ("half", "whole"):
        assert trained(forks, tmp_path / name, size, **how) == [0] * size
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    assert not events(tmp_path / "half", "warning")
    ours, theirs = (weights_in(at, LAST) for at in (tmp_path / "whole", tied_alone))
    assert equal(weights_in(tmp_path / "half", LAST), ours)
    assert set(ours) == set(theirs)
    assert "lm_head.weight" not in ours
    for column in range(3):
        rows = (losses(at).values() for at in (tmp_path / "whole", tied_alone))
        same_losses(*([row[column] for row in one] for one in rows))
    same_parameters(ours, theirs)


TIED_OTHERS = [(TWO, 2, "micro_batches(2)", 1), ("micro_batches(2)", 1, TWO, 2)]


@pytest.mark.parametrize(("before", "size_before", "after", "size"), slow_but(TIED_OTHERS, 0))
def test_a_head_that_is_the_embedding_is_resumed_on_others(
    tmp_path: Path, forks: Forks, tied_alone: Path, before: str, size_before: int, after: str, size: int
) -> None:
    for recipe, count, steps in ((before, size_before, 3), (after, size, LAST)):
        asked = {**TIED, "recipe": recipe, "max_steps": steps}
        if count == 1:
            assert run_of(str(tmp_path / "run"), **asked).exit_code == 0
        else:
            assert trained(forks, tmp_path / "run", count, **asked) == [0] * count
    same_losses(*([row[0] for row in losses(at).values()] for at in (tmp_path / "run", tied_alone)))
    same_parameters(weights_in(tmp_path / "run", LAST), weights_in(tied_alone, LAST))


def test_optimizers_whose_states_are_not_kept_are_refused(tmp_path: Path, forks: Forks) -> None:
    recipe = f"{TWO} + adafactor"
    assert set(trained(forks, tmp_path / "run", 2, recipe=recipe, **HOW)) == {2}
    assert "checkpoints of layers in stages cannot have its states" in fault_told(tmp_path / "run", 0)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
