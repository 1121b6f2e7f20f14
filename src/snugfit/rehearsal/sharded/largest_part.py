"""The process that needs the most, where processes share out an optimizer's states (`zero1`).

torch's `ZeroRedundancyOptimizer` gives each weight, the largest first, to the process that has the fewest
elements so far. In the end some have more than others: with a batch of few sizes of matrices by a per cent
and more, and with it by as much of states and of what the update makes. Processes are alike in all else, so
a rehearsal of the first one with the largest part says what the one takes that needs the most.
"""

from __future__ import annotations

from typing import Any


def takes_the_largest_part() -> tuple[Any, str, Any]:
    """What stands in the place of the method that shares weights out: this process has the largest part, and
    who would have had it has this one's."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    plain = vars(ZeroRedundancyOptimizer)["_partition_parameters"]

    def partition(self: Any, *given: Any) -> list[list[dict[str, Any]]]:
        is_known = bool(self._partition_parameters_cache)
        parts: list[list[dict[str, Any]]] = plain(self, *given)
        if not is_known:
            largest = max(range(len(parts)), key=lambda number: _elements(parts[number]))
            parts[self.rank], parts[largest] = parts[largest], parts[self.rank]
        return parts

    return ZeroRedundancyOptimizer, "_partition_parameters", partition


def _elements(groups: list[dict[str, Any]]) -> int:
    return sum(weight.numel() for group in groups for weight in group["params"])
