"""Default technique without a change of dtype: weights, activations, gradients and states have the dtype of
the loaded weights.

That dtype belongs to the job (`Job.dtype`). transformers 5 loads a checkpoint in its own dtype, bfloat16 for
most language models. Random weights of a config are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import PlainTechnique

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class AsLoaded(PlainTechnique):
    """Keeps the weights in the dtype in which they were loaded."""

    source: ClassVar = "from_pretrained(dtype='auto'), transformers' default"
    elsewhere: ClassVar = ("no", "auto")
    counterparts: ClassVar = (Counterpart(arguments={"bf16": False, "fp16": False}),)

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Yield a warning for bfloat16 on a GPU before Ampere, which emulates it."""
        if job.dtype == "bfloat16" and compute_capability and compute_capability < (8, 0):
            yield (
                "the weights are loaded in bfloat16, which this GPU emulates slowly. It supports float16 "
                "(--dtype float16)."
            )
