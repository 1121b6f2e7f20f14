"""The whole optimizer step as CUDA graphs: what the host launched one by one, it launches as one.

A step of eager code is thousands of launches, each of which takes the host some microseconds. Where the
kernels are shorter than that, the GPU waits for the host: a small model, a short batch, or a fast GPU. A CUDA
graph is a recording of what a step asked of the device, which the host plays back with one call. The kernels
are the same, in the same order, on the same numbers: nothing is computed otherwise, and nothing compiled.

snugfit records four graphs for each layout of a batch: the forward pass with the loss, the backward pass, the
norm of the gradients, and the update. Between them the host does what it does between the passes of any step:
it reads the loss before anything is updated. Batches are copied to where the graphs read them; learning
rates and step counts are on the device. The first step with a layout runs as it is written, the second is
recorded and played, and so on from there.

Padded batches are filled up to a multiple of so many tokens, so that a few lengths serve all of them. All
graphs have one memory, which is as large as what the longest needs.

What a graph cannot do is ask: code that reads a number from the device, as many routers of experts do, cannot
be recorded. Such a step stays as it is, and says so. Nor can a layer be recomputed that draws random
numbers, for the state of a GPU's generator cannot be set back there: with checkpointing, models without
dropout are recorded, and with dropout those whose kernels have a seed for each dropout while `selective`
keeps attention. With optimizers that compute on the host (bitsandbytes', Adafactor, Muon) the passes are
played, and the update is launched as ever.

Plans for one GPU look at it: its passes are those that are written, so nothing of them is rehearsed anew
(`rehearsal/captured_parts.py`), but where batches are padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.techniques.seeded_dropout import seeds_dropout, try_seeds
from snugfit.techniques.setting import between
from snugfit.techniques.setup import CaptureWish, Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Captured(Technique):
    """Records the optimizer step as CUDA graphs, and plays it back."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = "torch.cuda.CUDAGraph; NVIDIA, CUDA C++ Programming Guide, CUDA Graphs"
    lowered: ClassVar = True
    on_cpu: ClassVar = "records nothing: steps run as they are written"
    elsewhere: ClassVar = ("cuda_graphs", "cudagraphs", "cuda_graph")

    multiple: int = between(1, 4_096, default=64)
    """Of padded batches: lengths are filled up to a multiple of so many tokens."""

    def install(self, setup: Setup) -> Setup:
        """Has the loop record its steps."""
        return setup.with_fields(capture=CaptureWish(multiple=self.multiple))

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """What reads the device, keeps time with another stream, or draws random numbers anew."""
        if not job.trains:
            yield "only training steps are recorded. Leave it out."
        if recipe[Slot.PRECISION].alone.scale_gradients:
            yield (
                f"{recipe[Slot.PRECISION]} asks after each step whether a gradient overflowed, which cannot "
                "be recorded. Try 'bf16'."
            )
        offload, again = recipe[Slot.ACTIVATION_OFFLOAD], recipe[Slot.CHECKPOINTING]
        if not offload.plain:
            yield f"{offload} was not tried in a step that is recorded. Leave one of them out."
        wish = again.alone.checkpoint
        by_seeds = wish is not None and wish.keep and seeds_dropout(recipe[Slot.KERNELS].alone)
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
