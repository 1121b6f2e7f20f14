"""The largest size that fits: the next size does not fit, and the search needs few predictions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snugfit.errors import NothingFits, UsageError
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.planning import largest as room
from snugfit.planning.largest import largest
from snugfit.prediction.predict import predict
from snugfit.techniques.recipe import Recipe
from snugfit.units import GIB, MIB
from tiers import slow_but

pytestmark = pytest.mark.stored_rehearsals

SMALL = Model.from_config(
    {
        "model_type": "bert",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 96,
    },
    name="small",
)
JOB = Job(model=SMALL, task=Task.SEQUENCE_CLASSIFICATION, batch_size=2, sequence_length=64)
BOUND = 900 * MIB


def fits(job: Job, recipe: Recipe, bound: int = BOUND) -> bool:
    return bool(predict(job, recipe, memory_bytes=bound).fits)


@pytest.mark.parametrize("text", slow_but(["micro_batches(3)", "plain", "eager + bf16"], 1))
def test_the_largest_batch_fits_and_the_next_does_not(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe.parse(text)
    unit = recipe.setup().micro_batches
    asked = []

    def counted(*arguments: object, **keywords: object) -> object:
        asked.append(arguments)
        return predict(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(room, "predict", counted)
    size, prediction = largest(replace(JOB, batch_size=unit), recipe, memory_bytes=BOUND)
    assert size % unit == 0
    assert prediction.job.batch_size == size
    assert fits(replace(JOB, batch_size=size), recipe)
    assert not fits(replace(JOB, batch_size=size + unit), recipe)
    assert len(asked) <= 16


def test_the_largest_batch_leaves_the_headroom_of_a_plan() -> None:
    wide = {**SMALL.config, "hidden_size": 2048, "intermediate_size": 8192}  # few samples fill the GPU
    job = replace(JOB, model=Model.from_config(wide, name="wide"), sequence_length=96)
    size, prediction = largest(job, "plain", gpu="p100-pcie")
    further = predict(replace(job, batch_size=size + 1), "plain", gpu="p100-pcie")
    assert prediction.headroom_bytes > 0
    assert prediction.fits
    assert not prediction.tight
    assert further.tight or not further.fits


def test_the_largest_length_ends_where_the_positions_end() -> None:
    size, prediction = largest(JOB, Recipe(), memory_bytes=4 * GIB, of="sequence-length")
    assert size == 96
    assert prediction.job.sequence_length == 96


def test_nothing_fits_says_what_is_missing() -> None:
    with pytest.raises(NothingFits, match="are missing"):
        largest(JOB, Recipe(), memory_bytes=100 * MIB)


def test_a_bound_and_a_known_size_are_needed() -> None:
    with pytest.raises(UsageError, match="limit"):
        largest(JOB, Recipe())
    with pytest.raises(UsageError, match="batch, sequence-length"):
        largest(JOB, Recipe(), memory_bytes=GIB, of="width")


def test_the_length_of_what_has_none_is_refused() -> None:
    from torch import nn, zeros

    custom = Job(model=Model.from_module(nn.Linear(2, 2), {"input": zeros(2, 2)}), task=Task.CUSTOM)
    picture = Job(model=Model.find("google/vit-large-patch16-224"), task="image-classification")
    for job in (custom, picture):
        with pytest.raises(UsageError, match=r"has no sequences\. Try 'batch'"):
            largest(job, Recipe(), memory_bytes=GIB, of="sequence-length")


def test_what_is_asked_for_may_be_text_and_is_checked() -> None:
    with pytest.raises(NothingFits):
        largest(JOB, "bf16", gpu="h200", memory_bytes=500 * MIB)
    for asked in ({"gpu": 24}, {"memory_bytes": "24GiB"}, {"memory_bytes": GIB, "recipe": None}):
        with pytest.raises(UsageError):
            largest(JOB, **asked)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"snugfit\.Job"):
        largest("bert", memory_bytes=GIB)  # type: ignore[arg-type]
