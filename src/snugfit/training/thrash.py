"""Memory that is not enough and does not run out: a step that fits only because the allocator starts over.

Where the driver has nothing left for a request, torch's allocator gives back all that it keeps unused and
asks again, and the step goes on. That waits for the device and lays the memory out anew, and a run that does
it in each step crawls. It is told by the count of such retries (`num_alloc_retries`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    import torch

CAUSE = "allocation retries"
"""What a journal calls it."""

IN_A_ROW = 3
"""Steps with retries, one after the other, after which it is taken to go on. The first steps of a run may
retry while they grow (the first makes the gradients and the optimizer's states, the second is the first with
both), and one retry may lay memory out for good, such as after an evaluation or the longest batch so far; the
third in a row shows that what a retry has laid out does not serve even the next step. Composer, whose rule
this is, takes two."""


def retries_of(device: torch.device) -> int:
    """How often this process's allocator has started over; 0 where there is none that counts."""
    import torch

    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))


@final
class Thrash:
    """Looks at one step after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before, self._in_a_row = device, retries_of(device), 0

    def seen(self) -> bool:
        """After a step: whether it was the last of `IN_A_ROW` that had retries. The next ones are counted
        anew."""
        now = retries_of(self._device)
        self._in_a_row = self._in_a_row + 1 if now > self._before else 0
        self._before = now
        if self._in_a_row < IN_A_ROW:
            return False
        self._in_a_row = 0
        return True
