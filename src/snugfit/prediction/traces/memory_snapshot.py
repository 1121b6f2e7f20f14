"""Convert a trace to a snapshot of CUDA memory, in the format of `torch.cuda.memory._dump_snapshot`.

PyTorch's memory viewer (pytorch.org/memory_viz) and `torch.cuda._memory_viz` read it. Addresses are those
that the replayed allocator hands out. Stack frames contain the operator and its module, and the phase and
step. Times (`time_us`) count events, since a trace records their order only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from snugfit.prediction.allocator import Allocator, driver_actions, is_small

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.trace import Block, Trace


def memory_snapshot(trace: Trace, *, expandable: bool = False) -> dict[str, Any]:
    """Return the snapshot of a trace: each allocation and free in order, and the allocator's segments at the
    end."""
    allocator = Allocator(expandable=expandable)
    actions = driver_actions(trace, allocator.addresses)
    live: dict[int, Any] = {}
    entries: list[dict[str, Any]] = []
    segments: list[dict[str, Any]] = []

    def note(action: str, address: int, size: int, block: Block) -> None:
        # The viewer needs ascending times; a trace has an order only.
        entries.append({
            "action": action, "addr": address, "size": size, "stream": 0, "time_us": len(entries),
            "frames": _frames(block), "category": str(block.kind),
        })  # fmt: skip

    for event in trace.events:
        block = trace.blocks[abs(event) - 1]
        if event < 0:
            freed = live.pop(-event)
            # torch records two actions for each free.
            for action in ("free_requested", "free_completed"):
                note(action, freed.address, block.nbytes, block)
            allocator.release(freed)
            continue
        for act in actions.get(event, ()):
            act()
        before = allocator.reserved
        stream = trace.streams.get(event - 1, 0)
        live[event] = handed_out = allocator.allocate(block.nbytes, trace.memory_of(event - 1), stream)
        if mapped := allocator.reserved - before:
            # a new segment begins with the block; an expandable one ends with it, or with its rest
            rest = handed_out.after
            end = rest.address + rest.size if rest else handed_out.address + handed_out.size
            start = end - mapped if expandable else handed_out.address
            note("segment_map" if expandable else "segment_alloc", start, mapped, block)
            segments.append({"address": start, "total_size": mapped, "small": is_small(handed_out.pool)})
        note("alloc", handed_out.address, block.nbytes, block)
    frames = {live_block.address: _frames(trace.blocks[event - 1]) for event, live_block in live.items()}
    blocks = [*live.values(), *allocator.free_blocks()]
    joined = _join_pages(segments) if expandable else segments
    return {
        "segments": [_segment(segment, blocks, frames, expandable=expandable) for segment in joined],
        "device_traces": [entries],
        "allocator_settings": {"expandable_segments": expandable},
        "external_annotations": [],
    }


def _frames(block: Block) -> list[dict[str, Any]]:
    """Return the stack frames of a memory block, with the operator first, as snapshots begin with the
    innermost frame.
    """
    where = block.module or "the loop"
    return [
        {"name": block.operator, "filename": where, "line": 0},
        {
            "name": block.phase,
            "filename": f"step {block.step + 1}" if block.step >= 0 else "before",
            "line": 0,
        },
    ]


def _join_pages(segments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the consecutive pages of each pool into one segment. Return the segments."""
    pools: dict[bool, dict[str, Any]] = {}
    for segment in segments:
        pool = pools.setdefault(segment["small"], {**segment, "total_size": 0})
        pool["total_size"] += segment["total_size"]
    return list(pools.values())


def _segment(
    segment: dict[str, Any], blocks: Sequence[Any], frames: dict[int, Any], *, expandable: bool
) -> dict[str, Any]:
    start, size = segment["address"], segment["total_size"]
    # A segment lists its blocks by address.
    inside = sorted(
        (one for one in blocks if start <= one.address < start + size), key=lambda one: one.address
    )
    active = sum(one.size for one in inside if not one.free)
    return {
        "device": 0, "address": start, "total_size": size, "stream": 0,
        "segment_type": "small" if segment["small"] else "large", "is_expandable": expandable,
        "segment_pool_id": (0, 0), "allocated_size": active, "active_size": active,
        "requested_size": sum(one.requested for one in inside if not one.free),
        "frames": [],
        "blocks": [
            {
                "address": one.address, "size": one.size,
                "requested_size": 0 if one.free else one.requested,
                "state": "inactive" if one.free else "active_allocated",
                "frames": [] if one.free else frames[one.address],
            }
            for one in inside
        ],
    }  # fmt: skip
