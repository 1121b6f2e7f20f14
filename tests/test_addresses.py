"""The allocator against recorded runs: every address, and the order in which the driver gives segments."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from snugfit.prediction.addresses import CHUNK, MIB, DeviceAddresses
from snugfit.prediction.allocator import Allocator

RECORDED = sorted((Path(__file__).parent / "data" / "segments-h200").glob("*.json.gz"))


def read(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        document: dict[str, Any] = json.load(file)
    return document


class Recorded:
    """Addresses as they were recorded."""

    def __init__(self) -> None:
        self.following: list[int] = []

    def take(self, size: int) -> int:
        return self.following.pop(0)

    def give(self, address: int, size: int) -> None:
        raise AssertionError("no recorded run gave a segment back")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.split(".")[0])
def test_every_block_gets_its_recorded_address(path: Path) -> None:
    """Fed with the driver's own addresses, the replay makes every choice that torch's allocator made."""
    document = read(path)
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


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.split(".")[0])
def test_with_the_rule_of_the_driver_as_much_is_reserved(path: Path) -> None:
    document = read(path)
    allocator, held = Allocator(), {}
    for action, address, size in document["events"]:
        if action == "alloc":
            held[address] = allocator.allocate(size)
        elif action == "free_requested":
            allocator.release(held.pop(address))
    assert allocator.reserved_peak == pytest.approx(document["footprint"]["reserved_bytes"], rel=0.01)


def test_segments_fill_the_lowest_hole_and_else_a_chunk_below_all() -> None:
    driver = DeviceAddresses()
    first = driver.take(20 * MIB)  # the first large one, after which the hole above the chunks is there
    above = driver.take(400 * MIB)
    assert above > first
    second = driver.take(30 * MIB)
    assert second == first - CHUNK
    assert driver.take(12 * MIB) == first + 20 * MIB
    assert driver.take(2 * MIB) == second + 30 * MIB


def test_a_segment_that_was_given_back_is_a_hole() -> None:
    driver = DeviceAddresses()
    driver.take(20 * MIB)
    driver.take(414 * MIB)
    gone = driver.take(64 * MIB)
    driver.give(gone, 64 * MIB)
    assert driver.take(40 * MIB) == gone
