"""AdamW with both moments in 4 bits, in blocks of 128 that share one scale.

State of a parameter of 4,096 elements or more: a byte an element and 8 bytes a block. That is 1.06 bytes an
element, against AdamW's 8 and `adamw_8bit`'s 2.03. It is plain torch, widens some millions of numbers at a
time, and takes a few times as long as `adamw_fused`. `updates/four_bit.py` describes the storage of the
moments. With sixteen values, a moment is accurate to a tenth of its block's largest: the model learns, but
not as with AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.setup import Call, OptimizerWish
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class AdamW4bit(Technique):
    """AdamW with both moments in 4 bits, block by block: an eighth of the state."""

    single_weight_updates: ClassVar = True
    fidelity: ClassVar = Fidelity.LEARNS
    caveat: ClassVar = (
        "the seconds of its update were measured on no GPU: they follow from the bytes it moves. "
        "snugfit measure shows yours."
    )
    # transformers' Trainer has no name for this optimizer.
    value: ClassVar = OptimizerWish(
        factory=Call(path="snugfit.features.optimizers.updates.four_bit:FourBitAdamW")
    )
    source: ClassVar = (
        "Li et al., arXiv 2309.01507; torch.optim.AdamW(fused=True) on copies in 32 bits. torchao's "
        "AdamW4bit keeps the same states and compiles its step"
    )
    elsewhere: ClassVar = ("adam_4bit", "adam4bit", "adamw4bit")
    advice: ClassVar = dict.fromkeys(
        ("adamw_torch_8bit", "adamw_torch_4bit"),
        "torchao compiles its optimizer's step, of whose temporaries nothing is known without a GPU, so it "
        "is not predicted. Small states here: 'adamw_4bit' (the same as torchao's), 'adamw_8bit', "
        "'lion_8bit'.",
    )
