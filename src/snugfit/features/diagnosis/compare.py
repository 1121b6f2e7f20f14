"""Comparison of a run that ended out of memory with the predicted training step of its job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from snugfit.features.diagnosis.match import match_trace
from snugfit.features.diagnosis.result import Diagnosis, Ledger
from snugfit.techniques.registry import hooks
from snugfit.units import show_bytes

if TYPE_CHECKING:
    from snugfit.cli.request import Request
    from snugfit.results.prediction import Prediction

SIMILAR = 0.25
"""Largest relative excess of a run's bytes over the predicted ones at which both count as the same job."""


def compare(
    diagnosis: Diagnosis, sizes: tuple[int, int] | None, request: Request
) -> tuple[Diagnosis, Prediction]:
    """Return the diagnosis with the tensors of the predicted step that match the failed allocation, and the
    prediction.

    Both have suggested changes that fit into the memory that other processes left. `sizes` bounds the bytes
    of the failed allocation's tensor.
    """
    from snugfit.deferred_imports import defer_imports
    from snugfit.prediction.predict import predict, rehearse_again

    defer_imports()
    ledger = diagnosis.ledger or Ledger()
    memory = request.memory_bytes or _usable_bytes(ledger)
    options: dict[str, Any] = {"gpu": request.gpu, "gpus": request.gpus, "loop": request.loop}
    prediction = predict(
        request.job, request.recipe, memory_bytes=memory, software=request.software, **options
    )
    candidates = match_trace(rehearse_again(prediction), sizes, ledger.allocated_bytes) if sizes else []
    missed = sizes is not None and not candidates
    more = _further_bytes(diagnosis, prediction)
    notes = (*diagnosis.notes, *_about_differences(prediction, more, missed=missed), *request.doubts)
    if prediction.fits and prediction.memory_bytes and _is_similar(more, prediction):
        # The run used `more` bytes beyond the predicted step, so they must stay free as well.
        prediction = replace(prediction, memory_bytes=prediction.memory_bytes - more)
    for changes in hooks("changes_that_fit"):
        [prediction] = changes().with_ways_out(request, [prediction])
    ways = prediction.ways_out
    return replace(diagnosis, candidates=tuple(candidates), ways_out=ways, notes=notes), prediction


def _usable_bytes(ledger: Ledger) -> int | None:
    """Return the bytes of GPU memory that other processes left; None where they are unknown."""
    if ledger.total_bytes is None:
        return None
    return ledger.allowed_bytes or ledger.total_bytes - (ledger.others_bytes or 0)


def _further_bytes(diagnosis: Diagnosis, prediction: Prediction) -> int:
    """Return the bytes that the run needed beyond the predicted step; 0 where they are unknown."""
    ledger, requested = diagnosis.ledger or Ledger(), diagnosis.requested_bytes
    usable = _usable_bytes(ledger)
    if usable is None or requested is None or ledger.free_bytes is None:
        return 0
    needed = usable - ledger.free_bytes - (ledger.unallocated_bytes or 0) + requested
    return max(0, needed - prediction.needed_bytes)


def _is_similar(more: int, prediction: Prediction) -> bool:
    """Return True if the failed run may be the given job, although it needed `more` bytes than predicted."""
    return 0 < more <= SIMILAR * prediction.needed_bytes


def _about_differences(prediction: Prediction, more: int, *, missed: bool) -> Iterator[str]:
    """Yield sentences on possible differences between the failed run and the predicted step, which explain
    `more` bytes.
    """
    if missed:
        yield (
            "No tensor of the predicted step has this size. The run had another batch, length or "
            "recipe, or code outside of the step requested it. Give the run's own sizes and recipe, or "
            "look for such code."
        )
    if not prediction.fits:
        return
    spare = show_bytes(prediction.spare_bytes or 0)
    if _is_similar(more, prediction):
        yield (
            f"The predicted step leaves {spare}, but the run needed {show_bytes(more)} more than it. "
            "Code around the step may keep tensors. The changes leave as much free. Look for such code."
        )
    else:
        yield (
            f"The predicted step fits this memory, with {spare} to spare. The run had another batch, "
            "length or recipe, or code around the step kept tensors. Give the run's own sizes and "
            "recipe, or look for such code."
        )
