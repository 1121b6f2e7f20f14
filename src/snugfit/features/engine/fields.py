"""The settings that the feature `engine` adds to `Setup`, the training settings of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.wish import Call, Wish


@dataclass(frozen=True, kw_only=True)
class CaptureWish:
    """Value of the field `capture`: the optimizer step is recorded as CUDA graphs, and replayed."""

    multiple: int = 64
    """Multiple, in tokens, to which the lengths of padded batches are filled up; each length has its own
    graphs.
    """


ALL, ADDED = "all", "added"
"""Values of the field `masters`: the model's weights train, or adapters that are added to frozen weights."""

MASTERS = Wish[str](
    "masters", str, "", adamw=Call(path="snugfit.features.engine.master_optimizers:master_adamw")
)
"""The field `masters`: not empty if trained weights of any loaded dtype become bfloat16. The optimizer keeps
their remainder in 16 bits, so that it updates them in 32."""

RELEASE = Wish[bool](
    "release_gradients", bool, False, parts=Call(path="snugfit.features.engine.parts:ReleasedParts")
)
"""The field `release`: True if each weight is updated within the backward pass, and its gradient dropped."""

CAPTURE = Wish[CaptureWish | None](
    "capture",
    CaptureWish | None,
    None,
    touches=("update", "launches"),
    parts=Call(path="snugfit.features.engine.parts:CapturedParts"),
    records_graphs=True,
    draws_once=True,
)
"""The field `capture`: options of steps recorded as CUDA graphs; None launches kernel by kernel."""

FILLED = Wish[int]("filled_batches", int, 0, touches=("passes",))
"""The field `filled`: multiple, in tokens, to which passes fill up batches, with masks that depend on shapes.
0 leaves batches.

Only a search sets it, to simulate the passes of recorded steps without graphs.
"""
