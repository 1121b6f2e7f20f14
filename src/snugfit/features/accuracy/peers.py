"""Comparison runs for `snugfit plan --verify`: measurements of the plain Trainer on the plan's job.

A peer is transformers' own Trainer with its documented settings for one GPU. These are 16-bit autocast, fused
AdamW and the model's own attention (SDPA). A second peer adds `torch_compile=True`, which compiles the whole
model. When these settings do not fit, gradient checkpointing is turned on, then the batch is split. The first
such recipe that is predicted to fit is taken.

A peer has the slots that the plan leaves to the user, and the plan's adapters. The Trainer clips gradients by
default; a peer clips as the job specifies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.features.accuracy.compared_runs import ComparedRun
from snugfit.features.accuracy.score import measure_run
from snugfit.prediction.predict import predict
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.results.prediction import Prediction

BF16_SINCE = (8, 0)
"""The lowest CUDA compute capability with bfloat16 arithmetic."""

LOOP = "trainer"


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """A measurement of the plain Trainer, with its prediction if there is one."""

    name: str
    """Display name, such as `Trainer, bf16 + adamw_fused`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """`TrainingArguments` in addition to those that the recipe sets."""
    run: ComparedRun
    """The prediction and measurement of the run in the Trainer's loop. It has no predicted bytes when the
    whole model is compiled."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Measurements of the plain Trainer, or the reason why there are none."""

    runs: tuple[PeerRun, ...] = ()
    why_none: str = ""
    """Reason why no run was measured; empty if `runs` is not."""

    @property
    def best(self) -> PeerRun | None:
        """The fastest finished run of the plain Trainer; None if none finished."""
        ran = [peer for peer in self.runs if peer.run.outcome == "ok" and peer.run.step_seconds]
        return min(ran, key=lambda peer: peer.run.step_seconds or 0.0, default=None)


NO_PEERS = Peers()
"""The result when no comparison with the plain Trainer was requested."""


def measure_peers(
    job: Job,
    gpu: Gpu,
    chosen: Recipe,
    *,
    kept_slots: Collection[Slot] = (),
    memory_bytes: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Peers:
    """Measure the Trainer on this job, as it is and with the whole model compiled.

    A peer has the `kept_slots` and the adapters of the plan's recipe `chosen`.
    """
    # With None, the Trainer would clip by its own default.
    job = replace(job, clip=job.clip or 0.0)
    try:
        predicted = _first_that_fits(job, gpu, chosen, kept_slots, memory_bytes)
    except SnugfitError as refusal:
        return Peers(why_none=" ".join(str(refusal).split()))
    fused = "Trainer, " + str(predicted.recipe)
    runs = []
    for number, (name, arguments) in enumerate(
        ((fused, {}), (f"{fused}, torch_compile", {"torch_compile": True}))
    ):
        tell(f"measuring a peer: {name}")
        run = _run_before_measuring(predicted, number, compiled=bool(arguments))
        measured, _ = measure_run(run, loop=LOOP, trainer_arguments=arguments)
        runs.append(PeerRun(name=name, arguments=arguments, run=measured))
    return Peers(runs=tuple(runs))


def _run_before_measuring(predicted: Prediction, number: int, *, compiled: bool) -> ComparedRun:
    run = ComparedRun(
        number=number + 1,
        family=predicted.job.model.architecture,
        job=predicted.job,
        recipe=predicted.recipe,
    )
    if compiled:
        return run
    seconds = predicted.timing.step_seconds if predicted.timing else None
    return replace(run, predicted=predicted.footprint, fits=predicted.fits, predicted_step_seconds=seconds)


def _first_that_fits(
    job: Job, gpu: Gpu, chosen: Recipe, kept_slots: Collection[Slot], memory_bytes: int | None
) -> Prediction:
    """Predict the recipes in order up to the first that fits into GPU memory. Return its prediction, or the
    last one.
    """
    for recipe in _recipes(job, gpu, chosen, kept_slots):
        predicted = predict(job, recipe, gpu=gpu, memory_bytes=memory_bytes, loop=LOOP)
        if predicted.fits is not False:
            break
    return predicted


def _recipes(job: Job, gpu: Gpu, chosen: Recipe, kept_slots: Collection[Slot]) -> Iterator[Recipe]:
    """Yield recipes of the plain Trainer, each with less memory: the whole batch, then checkpointing, then
    more micro-batches.
    """
    as_kept = {
        technique.slot: technique for technique in chosen if technique.slot in {*kept_slots, Slot.ADAPTERS}
    }

    def with_kept(text: str) -> Recipe:
        recipe = Recipe.parse(text)
        for technique in as_kept.values():
            recipe = recipe.with_(technique)
        return recipe

    newer = gpu.compute_capability is None or gpu.compute_capability >= BF16_SINCE
    plain = f"{'bf16' if newer else 'fp16'} + adamw_fused"
    yield with_kept(plain)
    yield with_kept(f"{plain} + every_layer")
    pieces = (count for count in range(2, job.batch_size + 1) if job.batch_size % count == 0)
    yield from (with_kept(f"{plain} + every_layer + micro_batches({count})") for count in pieces)
