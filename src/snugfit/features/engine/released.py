"""Technique `released`: a weight is updated within the backward pass, as soon as its gradient exists, which
is then freed.

At any time only the gradient in use and those that autograd works on exist. A weight of `bf16_master` then
takes 12 bytes per element instead of 14, and 6.1 with `adamw_compact`. The technique lowers a memory peak at
the end of the backward pass or in the update. Such peaks occur with recomputed layers or small batches. If
activations need most of the memory, the peak comes before the first gradient, and does not fall. Results,
optimizer states, checkpoints and learning rates are the same as without the technique. Only the time of the
update differs. Stochastic rounding (`adamw_stochastic`) draws its random numbers in another order.

A weight of `bf16_pure` takes 2 bytes per element with states in managed or host memory (`paged_adamw`,
`host_adamw`), and 4 with `adamw_8bit`. So the predicted step over all weights of Llama-3.1-8B has 17.5 GiB on
an RTX 4090 (2 x 2048 tokens).

Clipping by the norm of all gradients needs the norm before the first update. If the job clips, forward and
backward pass therefore run twice. In the first run each gradient is freed after its squares were added to the
norm in 32 bits. In the second run each gradient is clipped and updates its weight. Random generators are
reset between the runs, so that dropout draws the same masks. The norm of bfloat16 gradients has 32
bits, where torch's has 16. Such a step takes nearly twice as long, so it is for models that do not fit
otherwise. `released_late` clips by the norm of the step before, without a second pass. Statistics in buffers,
such as those of batch normalisation, would count the batch twice. A model whose buffers change in the first
run is refused.

A NaN loss still changes no weight. Without clipping, the host reads the loss after the forward pass, and the
device waits meanwhile. With clipping, the norm reveals a non-finite gradient before the update. Without
clipping such a gradient makes weights non-finite, as with all gradients, and a run returns to its last
checkpoint. It also returns there if memory runs out after the first update of a weight.

With `captured`, both passes are replayed as CUDA graphs that contain the updates. The optimizer's scalars
must then be on the device, as in `bf16_master` and `adamw_compact`.

Plans usually simulate passes and update separately, but here they are one. Plans therefore try this technique
last, if no other recipe is as fast and fits (`search.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.features.engine.fields import CAPTURE, OWN_NORM
from snugfit.features.engine.master_optimizers import COMPACT_ADAMW, MASTER_ADAMW, keeps_masters
from snugfit.techniques import roster
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot, setup_of

if TYPE_CHECKING:
    from snugfit.job.job import Job

UPDATES_ONE = (
    "torch.optim:AdamW",
    "torch.optim:SGD",
    MASTER_ADAMW.factory.path,
    COMPACT_ADAMW.factory.path,
)
"""Import paths of torch's and snugfit's own optimizers that can update each weight separately.

Optimizers of other features declare it in their technique (`single_weight_updates`).
"""


@dataclass(frozen=True, kw_only=True)
class Released(Technique):
    """Updates each weight within the backward pass and drops its gradient; with clipping, in a second
    backward pass.
    """

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = (
        "Lv et al., arXiv 2306.09782 (LOMO), whose norm takes a second backward pass too; torch's tutorial "
        "on the optimizer step in the backward pass, torch.Tensor.register_post_accumulate_grad_hook"
    )
    elsewhere: ClassVar[tuple[str, ...]] = ("optimizer_in_bwd", "optimizer_in_backward", "gradient_release")

    def install(self, setup: Setup) -> Setup:
        """Set the field of the Setup that updates each weight as soon as its gradient exists."""
        return setup.with_fields(release_gradients=OWN_NORM)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield reasons to refuse a recipe: gradients are incomplete within the backward pass, or other
        weights' updates need them.
        """
        # The techniques of all slots are combined, since each may change the dtype, the optimizer or the
        # recording.
        setup = setup_of(*(recipe[slot] for slot in Slot))
        if not job.trains:
            yield "an evaluation has no gradients. Leave it out."
        if recipe[Slot.BATCHING].value > 1:
            yield (
                f"with {recipe[Slot.BATCHING]} gradients are sums over backward passes, which must be kept. "
                "Try 'whole_batch'."
            )
        if setup.scale_gradients:
            yield (
                f"{recipe[Slot.PRECISION]} looks at all gradients for an overflow before it updates. "
                "Try 'bf16'."
            )
        if any(recipe[slot] != roster.plain(slot) for slot in roster.slots_of_several_gpus()):
            yield "gradients that several processes average are kept until then. Try 'all_gradients'."
        optimizer = recipe[Slot.OPTIMIZER]
        if not optimizer.single_weight_updates and setup.optimizer_path not in UPDATES_ONE:
            yield (
                f"{optimizer} does not update one weight at a time. Try 'adamw_fused', 'adamw', 'sgd', "
                "'adamw_compact', 'adamw_8bit', 'paged_adamw' or 'adamw_stochastic'."
            )
        if CAPTURE.of(setup) is not None and not keeps_masters(setup):
            yield (
                f"{recipe[Slot.OPTIMIZER]} reads its learning rate on the host for each weight, which cannot "
                "be recorded with it. Try 'bf16_master', 'adamw_compact', or leave 'captured' out."
            )

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan chooses this technique: its step cannot be simulated from few
        layers.
        """
        return "plans look at it where little else fits, for each of its steps is simulated in full"

    def is_searched(self) -> bool:
        """Return False: the usual search of a plan skips it, because it simulates backward pass and update
        separately.
        """
        return False
