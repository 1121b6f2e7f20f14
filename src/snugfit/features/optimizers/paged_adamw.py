"""AdamW of bitsandbytes with its moments in managed memory, which the driver moves between host and GPU.

The state is that of AdamW, in 32 bits or in 8 (`adamw_8bit`). For parameters of 100,000 elements or more it
is outside torch's allocator. It stays on the GPU while there is room. It moves to the host, page by page,
when activations need the room (Dettmers et al., arXiv 2305.14314, section 3). So a step fits whose states do
not fit beside its activations. The update brings each moved page back over the link to the host.

The number of moved pages depends on all other memory in use on the GPU, and is not predicted. A step of
Llama-3.2-1B (2 x 512 tokens, 9.2 GiB of states) was measured on an H200. It took 66 to 73 ms with room for
all. With 2 GiB left for the states it took 73 to 87 ms (`results/h200-2026-11-23/optimizers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.features.optimizers.small_states import PagedStates
from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import OptimizerWish
from snugfit.techniques.technique import Fidelity


@dataclass(frozen=True, kw_only=True)
class PagedAdamW(PagedStates):
    """AdamW with its moments in CUDA managed memory, which moves to the host when the GPU is full."""

    fidelity: ClassVar = Fidelity.ROUNDS
    source: ClassVar = "Dettmers et al., arXiv 2305.14314; bitsandbytes.optim.PagedAdamW"
    elsewhere: ClassVar = ("paged_adamw_32bit",)
    advice: ClassVar = {"paged_adamw_8bit": "write 'paged_adamw(bits=8)'."}
    counterparts: ClassVar = tuple(
        Counterpart(arguments={"optim": f"paged_adamw_{bits}bit"}, settings={"bits": bits})
        for bits in (32, 8)
    )

    @property
    def value(self) -> OptimizerWish:
        """Return bitsandbytes' paged AdamW as the optimizer of the Setup."""
        return self.paged_wish("AdamW", {})
