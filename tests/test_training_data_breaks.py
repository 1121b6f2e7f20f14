"""An unreadable sample ends a run, and the completed steps are saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from small_runs import Run, losses, small_run
from snugfit.errors import SnugfitError
from snugfit.training.checkpoint.manifest import verify
from snugfit.training.run.train import train
from tiers import crossed

pytestmark = pytest.mark.whole

LAST = 5
"""The number of steps."""


class Breaks(Sequence[Any]):
    """A dataset in which one sample raises this error."""

    def __init__(self, samples: Any, broken: int, fault: Exception | None) -> None:
        self.samples, self.broken, self.fault = samples, broken, fault

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        if index == self.broken and self.fault is not None:
            raise self.fault
        return self.samples[index]

    def checksum(self, index: int) -> bytes:
        return bytes([index])


def run_of(folder: Path, recipe: str, fault: Exception | None, **more: Any) -> Run:
    run = small_run(folder, recipe, save_steps=100, **more)
    broken = run.order(1).step(LAST)[0][0]
    return replace(run, data=replace(run.data, samples=Breaks(run.data.samples, broken, fault)))


@pytest.mark.parametrize(
    ("recipe", "fault"),
    crossed(
        ["plain", "micro_batches(2) + workers"], [SnugfitError("no such picture"), ValueError("no such line")]
    ),
)
def test_what_was_trained_is_kept(recipe: str, fault: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(fault), match="no such"):
        train(run_of(tmp_path / "cut", recipe, fault))
    assert verify(tmp_path / "cut" / f"checkpoint-{LAST}", LAST)
    train(run_of(tmp_path / "cut", recipe, None))
    train(run_of(tmp_path / "whole", recipe, None))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_nothing_is_kept_for_who_keeps_nothing(tmp_path: Path) -> None:
    with pytest.raises(SnugfitError, match="no such picture"):
        train(run_of(tmp_path, "plain", SnugfitError("no such picture"), save_strategy="no"))
    assert not list(tmp_path.glob("checkpoint-*"))
