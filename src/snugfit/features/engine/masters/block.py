"""Block sizes and other launch settings of the kernels, in a file that does not import Triton, which may be
missing in a simulation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class LaunchSettings(NamedTuple):
    """Launch settings of the kernel that updates weights by AdamW. Only `exact` changes its results; the
    others change its speed.
    """

    block: int = 1024
    """Elements that a program updates at once, a power of two."""

    warps: int = 8
    """Warps of 32 threads of one program."""

    narrow: int = 8
    """Bytes that a thread reads at once of 16-bit data. With 8 it reads four elements there, the same as of
    32-bit data, so that no element changes its thread.
    """

    exact: bool = True
    """True if divisions and roots are rounded to the nearest, as torch's are. Otherwise they take fewer
    instructions and are off by one or two units in the last place.
    """


SETTINGS = LaunchSettings()
"""Settings for 32-bit moments (`../tests/masters_in_triton.py cuda time` compares some)."""

COMPACT_SETTINGS = LaunchSettings(block=512, warps=4, exact=False)
"""Settings for 8-bit moments: the fastest of eleven on an H100. It takes 1.95 ms for BERT-large, and with
blocks of 1,024 and 8 warps 2.17 (dev/log.md).
"""

NORM_PROGRAMS = 2048
"""Number of programs that share the gradients in the norm's kernel, each of which writes one sum (chosen). A
fixed number, so that sums are added up in one order on all devices."""

NORM_WARPS = 4
"""Number of warps, of 32 threads, in each program of the norm's kernel."""

NUMBERS = 8
"""Number of scalars in a row that the host writes in each step; the last one is the step's own number."""


class LaunchTable(NamedTuple):
    """The arguments of a kernel launch that updates all weights in a table of memory addresses
    (`table.py`).
    """

    places: torch.Tensor
    """Records of addresses on the device (N, length of a record), int64."""

    owners: torch.Tensor
    """The number of its weight for each block (blocks,), int32."""

    which: torch.Tensor
    """The row of numbers for each weight (N,), int32."""

    blocks: int
    """Number of blocks of all weights."""

    lower_bits: int
    """Bits of the second half of weights in two halves: 16 or 8; 0 where weights and gradients are fp32."""

    is_aligned: bool
    """True if all addresses are multiples of 16."""

    settings: LaunchSettings
    """Settings of the launch, with the size of these blocks."""

    group: int
    """Elements of which moments share a scale, in 8 bits (`compact.py`); 0 where moments have 32 bits."""
