"""Allocator events of real ranks on the CPU, compared with those of a rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from aligned import Event
from cpu_scratch import WRAPPER, compared

LEAST = 1024

OWN: dict[str, Callable[[Event], bool]] = {
    "gloo gathers into a buffer of its own": lambda event: (
        {"c10d::_allgather_base_", "c10d::allgather_into_tensor_coalesced_"} & {*event.operators[:-1]}
        or any(one.startswith("gloo:") for one in event.operators)
    ),
    "gloo scatters sums from a copy": lambda event: (
        "c10d::_reduce_scatter_base_" in event.operators and "aten::clone" in event.operators
    ),
    "the CPU chunks by way of copies and zeros": lambda event: "aten::_chunk_cat" in event.operators,
}
"""Allocations that only the CPU's ranks make, by the reason."""

EXCHANGED = (
    "FSDP::all_gather", "FSDP::post_backward_reduce", "DistributedDataParallel.forward", "aten::cat",
    "_c10d_functional::",
)  # fmt: skip
"""Operators that create tensors which gloo holds."""


def without_own(events: Sequence[Event]) -> list[Event]:
    kept = [event for event in compared(events) if not any(is_own(event) for is_own in OWN.values())]
    return [event for event in without_buffers(kept) if abs(event.nbytes) >= LEAST]


def without_buffers(events: Sequence[Event]) -> list[Event]:
    """Drop the scratch of the CPU's attention: blocks freed directly after their allocation.

    `cpu_scratch.py` keeps it for calls with a wrapper around tensors, as in ring attention.
    """
    kept: list[Event] = []
    for event in events:
        if kept and kept[-1].block == event.block and event.nbytes < 0 and _in_attention(event):
            kept.pop()
        else:
            kept.append(event)
    return kept


def _in_attention(event: Event) -> bool:
    called = event.operators
    own = called[len(called) - called[::-1].index(WRAPPER) :] if WRAPPER in called else ()
    if "aten::log_sigmoid_forward" in own:
        return "aten::contiguous" in own
    return any(name.startswith("aten::_scaled_dot_product_flash_attention_for_cpu") for name in own)


def births(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.nbytes > 0]


def to_last_birth(events: Sequence[Event]) -> list[Event]:
    """Drop the frees at the end of the run."""
    last = max(place for place, event in enumerate(events) if event.nbytes > 0)
    return [*events[: last + 1]]


def unheard(account: Sequence[Event], trace: Sequence[Event], sizes: Collection[int] = ()) -> list[Event]:
    """Add the missed frees of exchanged tensors to the account, at their places in the trace.

    Exchanged tensors come from torch's own classes or have one of these sizes. The account stays unchanged
    if its allocations differ from the trace's.
    """
    if [birth.nbytes for birth in births(account)] != [birth.nbytes for birth in births(trace)]:
        return [*account]
    dead = {event.block for event in account if event.nbytes < 0}
    partner = {two.block: one for one, two in zip(births(account), births(trace), strict=True)}
    missing: dict[int, list[Event]] = {}
    born = 0
    for event in trace:
        born += event.nbytes > 0
        one = partner.get(event.block)  # None for earlier allocations
        is_free = event.nbytes < 0 and one is not None and one.block not in dead
        if is_free and one is not None and (_is_exchanged(one) or one.nbytes in sizes):
            missing.setdefault(born, []).append(replace(one, nbytes=-one.nbytes))
    completed, born = [], 0
    for event in account:
        if event.nbytes > 0:
            completed += missing.pop(born, [])
            born += 1
        completed.append(event)
    return completed


def _is_exchanged(event: Event) -> bool:
    return any(one.startswith(EXCHANGED) for one in event.operators)
