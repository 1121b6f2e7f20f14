"""The whole optimizer step as CUDA graphs: the host launches a few graphs instead of thousands of kernels.

An eager step launches thousands of kernels, and each launch takes the host some microseconds. If the kernels
are shorter, the GPU waits for the host. This happens with small models, short batches or fast GPUs. A CUDA
graph is a recording of kernels, which the host replays with one call. A replay runs the same kernels in the
same order on the same data: no computation changes, and no code is compiled.

snugfit records four graphs for each batch layout (set of tensor shapes): forward pass with loss, backward
pass, gradient norm, and update. The host works between them as usual: it reads the loss before any weight is
updated. Batches are copied to the graphs' input memory; learning rates and step counts are on the device. The
first step with a layout runs without graphs. The second is recorded and replayed, and all later ones are
replayed.

Padded batches are lengthened to a multiple of a number of tokens, so that few different lengths occur. All
graphs share one memory pool, which is as large as the longest batch needs.

A step that reads a number from the device cannot be recorded. Many routers of experts do this. Such a step
runs without graphs, with a message. A layer that draws random numbers cannot be recomputed, because a graph
cannot reset the state of a GPU's generator. With checkpointing, models without dropout are recorded. Models
with dropout are recorded only if `selective` keeps attention, and all other dropout has its own seeds. For
optimizers that compute on the host (bitsandbytes', Adafactor, Muon), only forward and backward passes are
replayed.

In text generation, each decode step is a graph (`replay/decode.py`). The key-value cache is static instead of
dynamic. The host still chooses the next token by transformers' own code. On a CPU nothing can be recorded, so
generation with this technique is refused.

Plans for training on one GPU try this technique. Forward and backward passes have the same kernels as in an
eager step. They need no second simulation (`parts.py`), except for padded batches.
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
