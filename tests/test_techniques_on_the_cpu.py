"""A run on the CPU names each technique that it goes without, and refuses one that cannot run there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fitted import classified, model_of, trainer_of
from small_runs import events, small_run
from snugfit import fit
from snugfit.errors import RecipeError
from snugfit.step.applier import set_process
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.training.run.train import train

WITHOUT = {
    "captured": "records nothing",
    "fused": "plain torch code",
    "host(all)": "moves nothing",
    "paged_adamw": "pages nothing",
    "paged_lion": "pages nothing",
}


@pytest.mark.parametrize("name", WITHOUT)
def test_a_technique_has_one_line(name: str) -> None:
    (line,) = Recipe.parse(f"bf16 + {name}").lines_on_cpu()
    assert line.startswith(f"On the CPU {name.removesuffix('(all)')} ")
    assert WITHOUT[name] in line


def test_no_more_than_these_have_one() -> None:
    assert {one.name for one in roster.techniques() if one.on_cpu} == {
        name.removesuffix("(all)") for name in WITHOUT
    }


@pytest.mark.whole
def test_a_run_on_the_cpu_has_the_lines(tmp_path: Path) -> None:
    train(small_run(tmp_path / "own", "captured + fused", max_steps=1))
    told = [event["text"] for event in events(tmp_path / "own", "note")]
    assert told == Recipe.parse("captured + fused").lines_on_cpu()
    lines: list[str] = []
    trainer = trainer_of(tmp_path / "fit", model_of("bert"), classified(8), micro=(8, 1))
    fit(trainer, "fused", watch=lambda event: lines.append(event.get("text", "")))
    assert Recipe.parse("fused").lines_on_cpu()[0] in lines


def test_liger_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Recipe.parse("liger").setup()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RecipeError, match=r"liger: .*on GPUs alone. Take 'torch_kernels'"):
        set_process(setup, torch.device("cpu"))
    set_process(setup, torch.device("meta"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    set_process(setup, torch.device("cpu"))
