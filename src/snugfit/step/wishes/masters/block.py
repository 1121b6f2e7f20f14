"""How the kernels cut their work; apart from them, because a rehearsal has no Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class LaunchSettings(NamedTuple):
    """How the update is launched. Results are the same with all of them, but for `exact`."""

    block: int = 1024
    """Elements that a program updates at once, a power of two."""

    warps: int = 8
    """Warps of 32 threads of one program."""

    programs: int = 0
    """Programs that share all blocks, one block after the other; 0 has one for each block."""

    narrow: int = 8
    """Bytes that a thread reads at once of what has 16 bits. With 8 it reads four elements there, as it does
    of what has 32 bits, so that no element has to change its thread."""

    evict: str = ""
    """Which cache lines go first, as Triton names it: "evict_first" for what is not read again."""

    exact: bool = True
    """Whether divisions and roots are rounded to the nearest, as torch's are; else they take fewer
    instructions and are off by one or two units in the last place."""


SETTINGS = LaunchSettings()
"""What is launched where moments have 32 bits (`tests/masters_in_triton.py cuda time` compares some)."""

COMPACT_SETTINGS = LaunchSettings(block=512, warps=4, exact=False)
"""Where they have 8: the fastest of eleven on an H100, where it takes 1.95 ms for BERT-large, and with blocks
of 1,024 and 8 warps 2.17 (docs/log.md)."""

NORM_PROGRAMS = 2048
"""Programs that share the gradients when their norm is taken, each of which writes one sum (chosen): a fixed
number, so that sums are added up in one order on all devices."""

NORM_WARPS = 4
"""Warps of 32 threads of each of them."""

NUMBERS = 8
"""Numbers in a row of those that the host writes in each step; the last one is the step's own number."""


class LaunchTable(NamedTuple):
    """What a launch is told of the weights that it updates (`table.py`)."""

    places: torch.Tensor
    """Records on the device (N, length of a record), int64."""

    owners: torch.Tensor
    """The number of its weight for each block (blocks,), int32."""

    which: torch.Tensor
    """The row of numbers for each weight (N,), int32."""

    blocks: int
    """How many there are."""

    lower_bits: int
    """Of weights in two halves the bits of the second: 16 or 8; 0 where weights and gradients are fp32."""

    is_aligned: bool
    """Whether all addresses are multiples of 16."""

    settings: LaunchSettings
    """How it is launched; blocks have this size."""

    group: int
    """Elements of which moments share a scale, in 8 bits (`compact.py`); 0 where moments have 32 bits."""
