"""The settings that the feature `engine` adds to `Setup`, the training settings of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.wish import Call, Wish


@dataclass(frozen=True, kw_only=True)
class CaptureWish:
    """Value of the field `capture`: the optimizer step is recorded as CUDA graphs, and replayed."""

    multiple: int = 64
    """Multiple, in tokens, to which the lengths of padded batches are rounded up. Each length has its own
    CUDA graphs.
    """


ALL, ADDED = "all", "added"
"""Values of the field `masters`: `all` trains the model's weights, `added` only adapters added to frozen
weights."""

MASTERS = Wish[str](
    "masters", str, "", adamw=Call(path="snugfit.features.engine.master_optimizers:master_adamw")
)
"""The field `masters` of a `Setup`: not empty if trained weights become bfloat16, whatever their dtype. The
optimizer keeps the lower 16 bits of each weight and updates all 32."""

OWN_NORM, PREVIOUS_NORM = "own_norm", "previous_norm"
"""Values of the field `release`: gradients are clipped by the norm of their own step, or of the step
before."""

RELEASE = Wish[str](
    "release_gradients", str, "", parts=Call(path="snugfit.features.engine.parts:ReleasedParts")
)
"""The field `release` of a `Setup`: not empty if each weight is updated within the backward pass and its
gradient freed."""

CAPTURE = Wish[CaptureWish | None](
    "capture",
    CaptureWish | None,
    None,
    touches=("update", "launches"),
    parts=Call(path="snugfit.features.engine.parts:CapturedParts"),
    records_graphs=True,
    draws_once=True,
)
"""The field `capture` of a `Setup`: options of steps that are recorded as CUDA graphs. None launches each
kernel."""

FILLED = Wish[int]("filled_batches", int, 0, touches=("passes",))
"""The field `filled` of a `Setup`: multiple, in tokens, to which batches are padded, with masks that depend
on shapes. 0 pads no further.

Only a plan's search sets it, to simulate recorded passes (forward and backward) without CUDA graphs.
"""
