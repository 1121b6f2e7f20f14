"""The jobs that `lab/draw_runs.py` draws: equal for a seed, valid, and of every family and technique."""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path

import draw_runs
import pytest
from draw_runs import DrawnJob, proposals
from families import FAMILIES

from snugfit.features.accuracy.files import read
from snugfit.techniques import roster


@cache
def first(seed: int, number: int) -> DrawnJob:
    """Return the job that `lab/draw_runs.py` draws with this seed and number, cached for several tests."""
    return next(proposals(seed, number))


def drawn(seed: int, count: int = 16) -> list[DrawnJob]:
    return [first(seed, number) for number in range(count)]


def test_a_draw_depends_on_its_seed_and_number_alone() -> None:
    """Earlier draws and other random numbers have no influence on a draw."""
    in_order = [str(first(7, number)) for number in range(4)]
    random.seed(1)
    assert [str(next(proposals(7, number))) for number in reversed(range(4))] == in_order[::-1]


def test_sixteen_draws_meet_every_family() -> None:
    for seed in range(3):
        assert {one.family for one in drawn(seed)} == {family.name for family in FAMILIES}


@pytest.mark.slow
def test_draws_are_lawful_and_broad() -> None:
    """Every technique for training but four is drawn; two are for inference. One package cannot be measured
    here, another is slower than a fourth. Frozen parts are a user's choice, and `first_layers` covers
    `every_nth_layer`. Few draws miss a few more techniques. All draws are valid, some with lengths that are
    not powers of two."""
    everything = [one for seed in range(12) for one in drawn(seed)]
    for one in everything:
        one.recipe.check(one.job, (9, 0), installed=False)
    used = {technique.name for one in everything for technique in one.recipe}
    searched = [technique for technique in roster.techniques() if technique.searched]
    for_one = {technique.name for technique in searched if not technique.needs_several_gpus}
    assert {"flash", "flex"} <= for_one - used
    assert len(for_one - used) <= 8
    assert used <= for_one
    lengths = {one.job.sequence_length for one in everything}
    assert any(length & (length - 1) for length in lengths)
    assert any(one.job.padding for one in everything)
    assert any(not one.job.trains for one in everything)
    assert {one.job.build_on for one in everything} == {"device", "host"}


def test_a_draw_is_predicted_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drawn job is simulated and predicted in this process."""
    monkeypatch.setattr(sys, "argv", ["draw_runs.py", str(tmp_path), "--draw", "1", "--seed", "5"])
    draw_runs.main()
    (run,) = read(tmp_path / "accuracy-seed5.json").runs
    assert run.predicted is not None
    assert run.predicted.requested_bytes
    assert run.outcome is None
