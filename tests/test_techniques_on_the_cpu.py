"""A run on the CPU names each unused technique, and refuses one that cannot run there."""

from __future__ import annotations

from pathlib import Path

import pytest

from fitted import classified, model_of, trainer_of
from small_runs import events, small_run
from snugfit import fit
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Technique
from snugfit.training.run.train import train

DIFFER = [one for one in roster.techniques() if one.on_cpu]


@pytest.mark.parametrize("technique", DIFFER, ids=lambda one: one.name)
def test_a_technique_has_one_line(technique: type[Technique]) -> None:
    (line,) = Recipe.parse(f"bf16 + {technique.last_resort or technique.name}").lines_on_cpu()
    assert line == f"On the CPU {technique.name} {technique.on_cpu}."


@pytest.mark.whole
def test_a_run_on_the_cpu_has_the_lines(tmp_path: Path) -> None:
    train(small_run(tmp_path / "own", "captured + fused", max_steps=1))
    told = [event["text"] for event in events(tmp_path / "own", "note")]
    assert told == Recipe.parse("captured + fused").lines_on_cpu()
    lines: list[str] = []
    trainer = trainer_of(tmp_path / "fit", model_of("bert"), classified(8), micro=(8, 1))
    fit(trainer, "fused", watch=lambda event: lines.append(event.get("text", "")))
    assert Recipe.parse("fused").lines_on_cpu()[0] in lines
