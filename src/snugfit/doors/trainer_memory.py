"""When memory runs out in a fitted trainer's step: its batch is cut finer, and the same step is taken again.

The loader goes on as it was; each micro-batch that it brings is cut here. So the global batch is kept, no
sample is lost or seen twice, and the step that broke is taken again from its beginning: its partial gradients
are dropped and the random generators put back. An update that breaks has changed weights and is not taken
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from snugfit.doors.next_recipe import cut_smaller
from snugfit.errors import OutOfMemory
from snugfit.training.generators import set_generators
from snugfit.training.state import free_unused

if TYPE_CHECKING:
    from snugfit.doors.trainer_fitted import Fitted


def pieces_of(batch: Mapping[str, Any], rows: int | None) -> Iterator[Mapping[str, Any]]:
    """The batch in pieces of at most so many samples. What has no samples goes along with each."""
    count = max((len(value) for value in batch.values() if getattr(value, "ndim", 0)), default=1)
    if rows is None or count <= rows:
        yield batch
        return
    for start in range(0, count, rows):
        yield {
            name: value[start : start + rows]
            if (getattr(value, "ndim", 0) or isinstance(value, list)) and len(value) == count
            else value
            for name, value in batch.items()
        }


def cut_finer(trainer: Any, fitted: Fitted, cause: str, message: str) -> None:
    """After memory ran out in the forward or the backward pass: the step's beginning again, under the next
    finer cut. Raises `OutOfMemory` when there is none."""
    step, before = trainer.state.global_step + 1, fitted.recipe
    trainer.model.zero_grad(set_to_none=True)
    free_unused(trainer.args.device)
    chosen = cut_smaller(fitted.job, before)
    if chosen is None:
        raise OutOfMemory(
            f"Memory ran out in step {step} ({cause}) under '{before}', and its batch of"
            f" {fitted.job.batch_size} is cut into single samples already. {message.splitlines()[0]}"
        )
    fitted.cut(chosen)
    set_generators(fitted.began, trainer.args.device)
    fitted.tell(
        "replanned",
        step=step,
        cause=cause,
        before=str(before),
        recipe=str(chosen),
        text=f"Memory ran out in step {step} ({cause}): it is taken again under '{chosen}'; the global batch"
        f" stays {fitted.job.batch_size}.",
    )


def broke_in_the_update(trainer: Any, fitted: Fitted, cause: str, error: BaseException) -> OutOfMemory:
    """What to say when memory ran out where a step cannot be taken again."""
    following = cut_smaller(fitted.job, fitted.recipe)
    try_this = f" Resume under a recipe that needs less, such as '{following}'." if following else ""
    return OutOfMemory(
        f"Memory ran out ({cause}) in step {trainer.state.global_step + 1} under '{fitted.recipe}', outside"
        f" of its forward and backward passes, and the step cannot be taken again.{try_this}"
        f" {str(error).splitlines()[0]}"
    )
