"""Block sizes and other launch settings of the kernels, in a file that does not import Triton, which may be
missing in a simulation.
"""

from __future__ import annotations

from typing import NamedTuple


class LaunchSettings(NamedTuple):
    """Launch settings of the kernel that updates weights by AdamW. Only `exact` changes its results; the
    others change its speed.
    """

    block: int = 1024
    """Number of elements that one Triton program updates, a power of two."""

    warps: int = 8
    """Number of warps (32 threads each) of one Triton program."""

    narrow: int = 8
    """Bytes of 16-bit data that a thread reads at once. With 8 it reads four elements, as many as of 32-bit
    data, so each element has one thread.
    """

    exact: bool = True
    """True if divisions and roots are rounded to the nearest, like torch's. Otherwise they take fewer
    instructions and may be off by two units in the last place.
    """


SETTINGS = LaunchSettings()
"""Launch settings for 32-bit moments (`../tests/masters_in_triton.py cuda time` compares some)."""

COMPACT_SETTINGS = LaunchSettings(block=512, warps=4, exact=False)
"""Launch settings for 8-bit moments: the fastest of eleven on an H100. It takes 1.95 ms for BERT-large, and
with blocks of 1,024 and 8 warps 2.17 (dev/log.md).
"""

NORM_PROGRAMS = 2048
"""Number of Triton programs of the gradient norm's kernel, each of which writes one partial sum (chosen). It
is fixed, so that sums are added in one order on all devices."""

NORM_WARPS = 4
"""Number of warps (32 threads each) of one program of the gradient norm's kernel."""

NUMBERS = 8
"""Number of scalars, such as the learning rate, that the host writes for each group of weights in a step. The
last one is the step's number."""
