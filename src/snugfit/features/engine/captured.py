"""The whole optimizer step as CUDA graphs: the host launches a few graphs instead of thousands of kernels.

A step of eager code is thousands of launches, each of which takes the host some microseconds. With shorter
kernels the GPU waits for the host: a small model, a short batch, or a fast GPU. A CUDA graph is a recording
of a step's kernels, which the host replays with one call. The kernels are the same, in the same order, on the
same numbers: no computation changes, and no code is compiled.

snugfit records four graphs for each layout of a batch. They are the forward pass with the loss, the backward
pass, the gradients' norm and the update. Between them the host does its usual work: it reads the loss before
any weight is updated. Batches are copied to the graphs' input memory; learning rates and step counts are on
the device. The first step with a layout runs without graphs. The second is recorded and replayed, and all
later ones are replayed.

Padded batches are filled up to a multiple of a number of tokens, so that a few lengths cover all of them. All
graphs share one memory, as large as the longest needs.

A graph cannot read the device. So code that reads a number from it, as many routers of experts do, cannot be
recorded. Such a step runs without graphs, with a message. Nor can a layer that draws random numbers be
recomputed, since a graph cannot reset the state of a GPU's generator. With checkpointing, models without
dropout are recorded. Models with dropout are recorded if `selective` keeps attention and the kernels seed
each other dropout. For optimizers that compute on the host (bitsandbytes', Adafactor, Muon) only the forward
and backward passes are replayed.

In text generation, each decode step is a graph (`replay/decode.py`). Its cache is static, in place of a
dynamic one. The host still chooses the token by transformers' own code. A CPU records nothing, and such a
generation is refused there.

Plans for one GPU search it for training. Its passes are the eager ones, so they need no second simulation
(`parts.py`), except for padded batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.features.engine.fields import CaptureWish
from snugfit.techniques.seeded_dropout import seeds_dropout, try_seeds
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Captured(Technique):
    """Records the optimizer step, or the decode step of text generation, as CUDA graphs, and replays them."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = "torch.cuda.CUDAGraph; NVIDIA, CUDA C++ Programming Guide, CUDA Graphs"
    lowered: ClassVar = True
    on_cpu: ClassVar = "records nothing: steps run without CUDA graphs"
    elsewhere: ClassVar = ("cuda_graphs", "cudagraphs", "cuda_graph")

    multiple: int = between(1, 4_096, default=64)
    """Multiple, in tokens, to which the lengths of padded batches are filled up."""

    def install(self, setup: Setup) -> Setup:
        """Set the field of the Setup that records training steps as CUDA graphs."""
        return setup.with_fields(capture=CaptureWish(multiple=self.multiple))

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield reasons to refuse techniques that wait for the device, use another stream, or recompute
        random numbers.
        """
        if not job.trains:
            yield from _objections_without_training(job, recipe)
            return
        # The host reads the gradient scaler's overflow flag after each step, which a CUDA graph cannot
        # contain.
        if recipe[Slot.PRECISION].alone.scale_gradients:
            yield (
                f"{recipe[Slot.PRECISION]} checks after each step whether a gradient overflowed, which "
                "cannot be recorded. Try 'bf16'."
            )
        offload, again = recipe[Slot.ACTIVATION_OFFLOAD], recipe[Slot.CHECKPOINTING]
        if not offload.plain:
            yield f"{offload} was not tested in a step that is recorded. Leave one of them out."
        wish = again.value
        by_seeds = wish is not None and wish.keep and seeds_dropout(recipe[Slot.KERNELS].alone)
        # A CUDA graph cannot reset a GPU's random generator, so recomputed dropout would draw other numbers.
        if wish is not None and not by_seeds and (dropout := job.stated_dropout()):
            yield (
                f"{again} computes layers with dropout again ({dropout}), and a step that is recorded cannot "
                "draw the same numbers twice. Leave one of them out"
                + try_seeds(
                    ", or try '{} + selective(attention)', which keeps attention and has a seed for other "
                    "dropout"
                )
                + "."
            )


def _objections_without_training(job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
    """Yield objections to an evaluation, and to decode steps that cannot be recorded."""
    if job.added_phase is None:
        yield (
            "only training steps and decode steps are recorded. Leave it out, or try 'compiled(what=model, "
            "mode=reduce-overhead)', by which torch records the forward pass."
        )
        return
    from snugfit.features.engine.replay.decode import objections_to_decoding

    if recipe[Slot.CACHE].plain:
        yield from objections_to_decoding(job, job.phase_settings.get("cache", "dynamic"))
    else:
        yield f"it has a static cache already. Leave {recipe[Slot.CACHE]} out."
    if recipe[Slot.PRECISION].alone.autocast:
        yield (
            f"{recipe[Slot.PRECISION]} keeps cast weights outside of the graph. Try 'fp32' or 'bf16_pure'."
        )
    for slot in (Slot.ADAPTERS, Slot.ATTENTION):
        if not recipe[slot].plain:
            yield f"{recipe[slot]} was not tried in a recorded decode step. Leave one of them out."
