"""`auto` offloads layers if that is faster than recomputation, or the only recipe that fits."""

from __future__ import annotations

import functools

import pytest

from small_models import small_job
from snugfit.errors import NothingFits, RecipeError
from snugfit.features.offload.fields import OFFLOAD, OffloadWish
from snugfit.job.job import Job
from snugfit.planning.search.auto import resolve
from snugfit.prediction.predict import predict as predict_recipe
from snugfit.techniques.recipe import without_auto
from snugfit.techniques.technique import Slot

pytestmark = [pytest.mark.stored_rehearsals, pytest.mark.whole]

REST = "lora(r=4) + bf16"
HOST = Slot.ACTIVATION_OFFLOAD


@functools.cache
def needed(this: Job, recipe: str) -> int:
    """Return the predicted peak bytes of a recipe."""
    footprint = predict_recipe(this, recipe, gpu="h200").footprint
    return (footprint.reserved_bytes or 0) + footprint.context_bytes


def test_layers_wait_on_the_host_where_that_costs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that offloads some layers is chosen if its step is predicted to be shorter; never over a link
    that is too slow.
    """
    this = small_job("llama", 5, batch_size=4, sequence_length=32_768)
    most, least = needed(this, REST), needed(this, f"{REST} + every_layer")
    memory = (most + least) // 2
    mixed, why = resolve(this, REST, gpu="h200", memory_bytes=memory)
    assert OFFLOAD.of(mixed.setup()) == OffloadWish(what="all", first=mixed[HOST].layers)  # type: ignore[attr-defined]
    assert "copying in the background takes less time" in why
    monkeypatch.setattr("snugfit.planning.search.auto.link_of", lambda gpu: 1.0)
    recomputed = resolve(this, REST, gpu="h200", memory_bytes=memory).recipe
    assert recomputed[HOST].plain
    seconds = []
    for recipe in (mixed, recomputed):
        prediction = predict_recipe(this, recipe, gpu="h200", memory_bytes=memory)
        assert prediction.fits
        assert prediction.timing is not None
        seconds.append(prediction.timing.step_seconds)
    assert seconds[0] < seconds[1]


@pytest.mark.slow
def test_inputs_wait_on_the_host_where_recomputing_is_not_enough() -> None:
    # The first and the last layers leave some tensors on the device, so fewer layers save nothing.
    this = small_job("llama", 8, batch_size=16, sequence_length=8192)
    least = needed(this, f"{REST} + every_layer")
    sent = needed(this, f"{REST} + every_layer + host(all)")
    assert sent < least
    recipe, why = resolve(this, REST, gpu="h200", memory_bytes=least - 1)
    assert recipe[Slot.CHECKPOINTING].name == "every_layer"
    assert recipe[HOST].name == "host"
    assert "recomputing every layer is not enough" in why
    assert needed(this, str(recipe)) < least
    with pytest.raises(NothingFits, match=r"even .* more than there is.*snugfit plan"):
        resolve(this, REST, gpu="h200", memory_bytes=sent // 2)


def test_it_cannot_stand_beside_auto() -> None:
    with pytest.raises(RecipeError, match=r"chooses the activation_offload. Leave 'host\(all\)' out"):
        without_auto("host(all) + auto")
