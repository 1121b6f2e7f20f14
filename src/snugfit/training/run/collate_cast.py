"""Batches in the dtype of the weights, where nothing else casts them: pictures and sound are made in fp32,
and a model whose weights are all bfloat16 takes them only so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from snugfit.step.batches import cast_inputs, input_dtype

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

Collating = Callable[[list[Any]], dict[str, Any]]


@final
@dataclass(frozen=True, kw_only=True)
class Cast:
    """A picklable function from samples to a batch in this dtype."""

    collate: Collating
    """Makes the batch."""

    dtype: str
    """As torch calls it."""

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        return cast_inputs(self.collate(list(samples)), self.dtype)


def collate_for(job: Job, setup: Setup, collate: Collating) -> Collating:
    """`collate`, and a cast of what it makes where the model of this Setup needs one."""
    dtype = input_dtype(job, setup)
    return collate if dtype is None else Cast(collate=collate, dtype=dtype)
