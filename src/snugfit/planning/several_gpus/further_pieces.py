"""Extension of a simulated step by one micro-batch, a copy of the one between its first and its last.

That one begins and ends as the next does. A step of four is thus one of three with the second one twice. This
also holds if exchanges in other streams reach from one micro-batch into the next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from snugfit.planning.cost.periodic import later_starts

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.trace import Kernel, Trace


def with_a_further_piece(trace: Trace) -> Trace | None:
    """Return this trace with the kernels and waits of its steady step extended by one micro-batch.

    Blocks and events stay unchanged. Return None if the step has no micro-batch between a first and a
    last.
    """
    starts = later_starts(trace)
    if len(starts) != 2:
        return None
    second, third = starts
    length = third - second
    again = [_later(kernel, length, 0) for kernel in trace.kernels[second:third]]
    rest = [_later(kernel, length, second) for kernel in trace.kernels[third:]]
    waits = [wait for wait in trace.waits if wait < third]
    waits += [wait + length for wait in trace.waits if wait >= second]
    return replace(trace, kernels=(*trace.kernels[:third], *again, *rest), waits=tuple(waits))


def _later(kernel: Kernel, numbers: int, since: int) -> Kernel:
    """Return a copy of a kernel with the indices that it waits for moved by `numbers`.

    The kernels that it waits for move likewise, except for those before the kernel `since`.
    """
    if not kernel.after:
        return kernel
    after = tuple(other + numbers if other >= since else other for other in kernel.after)
    return kernel._replace(after=after)
