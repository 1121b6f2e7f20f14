"""State of a user's dataset: saved, restored, and removed where it did not exist before."""

from __future__ import annotations

import dataclasses
import functools
import random

from snugfit.features.loops.own_state import OwnState


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A dataset whose class allows no attribute to be set."""

    size: int = 3

    @functools.cached_property
    def pad_token(self) -> int:
        return 7


class Lazy:
    """A dataset that creates its generator with its first sample, and counts its draws."""

    def __init__(self) -> None:
        self.rng: random.Random | None = None

    def draw(self) -> float:
        self.count = getattr(self, "count", 0) + 1
        self.rng = self.rng or random.Random(5)
        return self.rng.random()


def test_what_a_frozen_dataset_has_worked_out_is_worked_out_again() -> None:
    dataset = Frozen()
    own = OwnState(dataset)
    before = own.state()
    assert dataset.pad_token == 7
    own.set(before)
    assert "pad_token" not in vars(dataset)
    assert (dataset.pad_token, dataset.size) == (7, 3)


def test_what_was_made_meanwhile_is_taken_away() -> None:
    dataset = Lazy()
    own = OwnState(dataset)
    before = own.state()
    first = dataset.draw()
    own.set(before)
    assert vars(dataset) == {"rng": None}
    assert dataset.draw() == first


def test_another_process_draws_on() -> None:
    dataset, resumed = Lazy(), Lazy()
    own = OwnState(dataset)
    dataset.draw()
    own.find_generators()
    state = own.state()
    OwnState(resumed).set(state)
    assert resumed.draw() == dataset.draw()
    assert resumed.count == dataset.count == 2
