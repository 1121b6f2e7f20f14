"""Text notation of a mesh: the techniques it adds to a recipe, and its number of GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from made_up import prediction
from snugfit.cli.main import run
from snugfit.errors import UsageError
from snugfit.features.distributed.mesh import on_mesh
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import on_gpus


@pytest.mark.parametrize(
    ("recipe", "mesh", "expected", "gpus"),
    [
        ("plain", "fsdp=4", "fsdp", 4),
        ("bf16", "fsdp=4, tensor=2", "bf16 + fsdp + tensor(2)", 8),
        ("fsdp(reshard=none)", "fsdp=4,tensor=2", "fsdp(reshard=none) + tensor(2)", 8),
        ("plain", "replicate=2, fsdp=4", "hsdp(4)", 8),
        ("fsdp(reshard=none)", "replicate=2, fsdp=4", "hsdp(4, reshard=none)", 8),
        ("plain", "replicate=2, hsdp=4, context=2", "hsdp(4) + context(2)", 16),
        ("plain", "tensor=4, expert=4", "tensor(4) + expert(4)", 4),
        ("micro_batches(4)", "ddp=2, pipeline=2", "micro_batches(4) + ddp + pipeline(2)", 4),
        ("plain", "ddp=2, pp=2", "ddp + pipeline(2)", 4),
    ],
)
def test_a_mesh_is_a_recipe_and_a_number_of_gpus(recipe: str, mesh: str, expected: str, gpus: int) -> None:
    shared, count = on_mesh(Recipe.parse(recipe), mesh)
    assert (shared, count) == (Recipe.parse(expected), gpus)
    on_gpus(shared.setup(), count)


@pytest.mark.parametrize(
    ("recipe", "mesh", "said"),
    [
        ("plain", "fsdp", "'fsdp' is not an axis with a number"),
        ("plain", "fsdp=0", "not an axis with a number"),
        ("plain", "fsdp=2, fsdp=4", "twice"),
        ("plain", "adamw=2", "adamw is not an axis"),
        ("plain", "zero3=2", "zero3 is not an axis"),
        ("ddp", "fsdp=2", "contradict each other"),
        ("tensor(2)", "tensor=4", "4 there and 2 in the recipe"),
        ("fsdp", "tensor=2", "has no number of"),
        ("plain", "replicate=2, tensor=2", "copies of weights"),
        ("plain", "replicate=2, ddp=2", "copies of weights"),
    ],
)
def test_a_mesh_that_is_none_is_told_by_name(recipe: str, mesh: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        on_mesh(Recipe.parse(recipe), mesh)


def test_the_command_takes_a_mesh_here_and_in_a_job_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def predict(job: Any, recipe: Any, **how: Any) -> Any:
        return replace(prediction(), job=job, recipe=recipe, gpus=how["gpus"])

    monkeypatch.setattr("snugfit.prediction.predict.predict", predict)
    size = ["--batch-size", "4", "--sequence-length", "32", "--gpu", "h200", "--json"]
    assert run(["predict", "HuggingFaceTB/SmolLM2-135M", *size, "--mesh", "fsdp=2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["recipe"], answer["gpus"]) == ("fsdp", 2)
    job = tmp_path / "job.yaml"
    job.write_text("model: HuggingFaceTB/SmolLM2-135M\nmesh: fsdp=2\n")
    assert run(["predict", "--job", str(job), *size, "--gpus", "4"]) == 2
    assert "makes 2 GPUs, but --gpus is 4" in capsys.readouterr().err
