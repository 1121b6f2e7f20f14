"""The allocator against recorded runs: every address, and the driver's order of segments."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from snugfit.prediction.allocator import (
    CHUNK,
    CODE,
    CUBLAS,
    CUBLAS_WORKSPACE,
    FORWARD_CODE,
    MIB,
    OWN,
    TOP,
    Allocator,
    DeviceAddresses,
    driver_actions,
)
from snugfit.rehearsal.trace.trace import Block, Mark, MarkKind, Trace

FOLDERS = [Path(__file__).parent / "data" / name for name in ("segments-h200", "segments-h100")]
SETTLES = {
    "bert-8x640-fused": 2,
    "bert-large-fused": 2,
    "mixtral-5x1216-fused": 2,
    "qwen2-23x960-checkpointed": 12,
    "modernbert-5x960-plain": 1,
    "vit-6x1024-plain": 14,
    "mistral-7x1408-qlora": 415,
}
"""Number of births and deaths of each recorded run before its context settles."""

AT_EVERY_PLACE = sorted(
    set(SETTLES) - {"mixtral-5x1216-fused", "modernbert-5x960-plain", "mistral-7x1408-qlora"}
)
"""Runs in which any two free blocks that the allocator compares have the predicted order of addresses."""

WORKSPACE = 32 * MIB
"""In a recorded run this block marks a thread's first cuBLAS product. The first thread runs the forward pass,
the second the backward pass."""


def recorded_runs() -> list[Path]:
    return [path for folder in FOLDERS for path in folder.glob("*.json.gz")]


def read(name: str) -> dict[str, Any]:
    with gzip.open(next(path for path in recorded_runs() if path.name.startswith(name)), "rt") as file:
        document: dict[str, Any] = json.load(file)
    return document


class Recorded:
    """The recorded addresses of segments."""

    def __init__(self) -> None:
        self.following: list[int] = []

    def map_segment(self, size: int) -> int:
        return self.following.pop(0)


def test_every_recorded_run_is_known() -> None:
    assert {path.name.split(".")[0] for path in recorded_runs()} == set(SETTLES)


@pytest.mark.parametrize("name", SETTLES)
def test_every_block_gets_its_recorded_address(name: str) -> None:
    """With the driver's recorded addresses, the replay repeats every choice of torch's allocator."""
    document = read(name)
    allocator, held = Allocator(), {}
    allocator.addresses = Recorded()  # type: ignore[assignment]
    for action, address, size in document["events"]:
        if action == "segment_alloc":
            allocator.addresses.following.append(address)  # type: ignore[attr-defined]
        elif action == "alloc":
            held[address] = allocator.allocate(size)
            assert held[address].address == address
        else:
            allocator.release(held.pop(address))
    assert allocator.reserved_peak == document["footprint"]["reserved_bytes"]
    assert allocator.allocated_peak == document["footprint"]["allocated_bytes"]


class Noted(DeviceAddresses):
    """The driver's rule, with a list of the requested segments."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: list[tuple[int, int]] = []

    def map_segment(self, size: int) -> int:
        """Map a segment and append it to the list."""
        address = super().map_segment(size)
        self.segments.append((address, size))
        return address


def place(segments: list[tuple[int, int]], address: int) -> tuple[int, int]:
    """Return the number of the segment that contains an address, and the offset in it."""
    return next((n, address - low) for n, (low, size) in enumerate(segments) if 0 <= address - low < size)


def played(name: str) -> tuple[Allocator, list[tuple[Any, Any]]]:
    """Return the replay under the driver's rule, and each block's recorded and predicted place."""
    allocator, driver = Allocator(), Noted()
    allocator.addresses = driver
    held: dict[int, Any] = {}
    recorded: list[tuple[int, int]] = []
    places: list[tuple[Any, Any]] = []
    workspaces = passed = 0
    for action, address, size in read(name)["events"]:
        if action == "segment_alloc":
            recorded.append((address, size))
            continue
        if passed == SETTLES[name]:
            driver.release_context()
        passed += 1
        if action == "free_requested":
            allocator.release(held.pop(address))
            continue
        if size == WORKSPACE and workspaces < 2:
            driver.begin_backward() if workspaces else driver.begin_forward()
            if not workspaces:
                driver.start_cublas()
            workspaces += 1
        held[address] = allocator.allocate(size)
        places.append((place(recorded, address), place(driver.segments, held[address].address)))
    return allocator, places


@pytest.mark.parametrize("name", SETTLES)
def test_with_the_rule_of_the_driver_as_much_is_reserved(name: str) -> None:
    allocator, places = played(name)
    seen = read(name)["footprint"]
    assert (allocator.reserved_peak, allocator.allocated_peak) == (
        seen["reserved_bytes"],
        seen["allocated_bytes"],
    )
    if name in AT_EVERY_PLACE:
        assert all(recorded == foreseen for recorded, foreseen in places)


def test_segments_fill_the_lowest_hole_and_else_a_chunk_below_all() -> None:
    driver = DeviceAddresses()
    first = driver.map_segment(30 * MIB)
    second = driver.map_segment(32 * MIB)
    assert second == first - CHUNK
    assert driver.map_segment(2 * MIB) == first + 30 * MIB
    assert driver.map_segment(2 * MIB) > first  # above the context's own memory
    assert driver.map_segment(12 * MIB) > first + OWN  # and higher still
    assert driver.map_segment(20 * MIB) == second - CHUNK


def test_what_the_context_lets_go_is_a_hole_below_the_first_small_segment() -> None:
    driver = DeviceAddresses()
    small = driver.map_segment(2 * MIB)
    driver.release_context()
    assert driver.map_segment(20 * MIB) == small - OWN
    assert driver.map_segment(12 * MIB) == small - OWN + 20 * MIB


def test_a_chunk_that_nobody_uses_is_gone_and_new_ones_take_its_place_from_above() -> None:
    driver = DeviceAddresses()
    large = driver.map_segment(90 * MIB)
    driver.release_context()  # its code takes two of the remaining six
    assert driver.map_segment(4 * MIB) == large + 92 * MIB
    first, second = driver.map_segment(30 * MIB), driver.map_segment(60 * MIB)
    assert first == TOP + 416 * MIB - CHUNK
    assert second == first - 2 * CHUNK
    for left in (4, 2, 20):  # the hole is filled before cuBLAS starts, which takes two chunks there
        driver.map_segment(left * MIB)
    driver.start_cublas()  # takes two chunks, and its libraries six of the remaining ones
    assert driver.map_segment(30 * MIB) == TOP + CHUNK
    assert driver.map_segment(30 * MIB) == large - CHUNK  # the lowest chunk stays empty


def test_cublas_fills_holes_that_are_smaller_than_what_it_takes() -> None:
    driver = DeviceAddresses()
    driver.map_segment(24 * MIB)
    large = driver.map_segment(44 * MIB)  # and 20 of its chunk are a hole
    driver.start_cublas()
    assert driver.map_segment(2 * MIB) < large


def test_the_driver_moves_before_the_births_that_the_trace_says() -> None:
    """A small segment holds the context's chunk. Large segments are below it until the context settles, and
    then in the context's hole. Code and cuBLAS take memory from that hole before cuBLAS's workspace."""
    blocks = (
        Block(512, "aten::randn", "", "build", -1, ""),
        Block(30 * MIB, "aten::empty", "", "build", -1, ""),
        Block(30 * MIB, "aten::empty", "", "build", -1, ""),
        Block(WORKSPACE, CUBLAS_WORKSPACE, "", "forward", 0, ""),
        Block(512, "aten::add", "", "forward", 0, ""),
    )
    marks = (Mark(2, -1, "build", MarkKind.CONTEXT_RELEASED),)
    allocator = Allocator()
    actions = driver_actions(Trace(blocks, (1, 2, 3, 4, 5), marks, (), (), ()), allocator.addresses)
    addresses = []
    for number, block in enumerate(blocks, start=1):
        for act in actions.get(number, ()):
            act()
        addresses.append(allocator.allocate(block.nbytes).address)
    small, before, settled, workspace, _ = addresses
    assert before < small - OWN
    assert settled == small - OWN
    assert workspace == settled + 30 * MIB + FORWARD_CODE * CODE + CUBLAS
