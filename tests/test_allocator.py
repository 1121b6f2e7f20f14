"""The replayed caching allocator: its documented rules, and properties that hold for any sequence."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from snugfit.prediction import allocator as replayed
from snugfit.prediction.allocator import Allocator, replay
from snugfit.prediction.predict import _moment
from snugfit.rehearsal.trace.trace import Block, Mark, MarkKind, Trace
from snugfit.units import MIB

KIB = 1 << 10


def trace(*requests: int) -> Trace:
    """Return a trace of births in bytes, in order; a negative number -n frees the n-th birth, counted
    from 1."""
    blocks = [Block(nbytes, "", "", "forward", 0, "") for nbytes in requests if nbytes > 0]
    events, born = [], 0
    for request in requests:
        born += request > 0
        events.append(born if request > 0 else request)
    return Trace(tuple(blocks), tuple(events), (Mark(0, 0, "forward"),), (), 0, ())


def test_the_peak_of_a_trace_is_its_first_largest_moment() -> None:
    for requests in ((5, 3, -1, 5, -2), (4, -1, 4, -2), (7,), ()):
        live = list(trace(*requests).live())
        found = trace(*requests).peak()
        assert found.nbytes == max(live, default=0)
        assert found.position == (live.index(found.nbytes) if live else -1)


def test_the_moment_of_the_peak_is_that_of_its_tensor() -> None:
    births = trace(5, 3, -1, 9, -2)
    blocks = tuple(
        block._replace(module=f"layer{number}") for number, block in enumerate(births.blocks, start=1)
    )
    named = replace(births, blocks=blocks)
    peak = named.peak().position
    assert (peak, _moment(named, peak).module) == (3, "layer3")
    assert _moment(named, 1).module == "layer2"


# ---- rule 1: rounding and pools ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "handed_out", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # still small
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # a segment of its own
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest of 1 MiB is not split off: the whole block is returned
        (13 * MIB + 1, 14 * MIB, 14 * MIB),
    ],
)
def test_sizes_round_and_segments_follow(nbytes: int, handed_out: int, segment: int) -> None:
    allocator = Allocator()
    allocator.allocate(nbytes)
    assert allocator.requested == nbytes
    assert allocator.allocated == handed_out
    assert allocator.reserved == segment


def test_the_two_pools_share_nothing() -> None:
    allocator = Allocator()
    allocator.allocate(512)
    allocator.allocate(2 * MIB)
    assert allocator.reserved == 22 * MIB
    allocator.allocate(MIB)  # fits the small segment
    assert allocator.reserved == 22 * MIB


# ---- rules 2 and 4: best fit and splits ----------------------------------------------------------------


def test_the_smallest_block_that_fits_is_taken() -> None:
    """Two holes, of 6 and of 4 MiB: a request of 4 MiB takes the smaller one. The larger one stays whole."""
    allocator = Allocator()
    pieces = [allocator.allocate(size * MIB) for size in (6, 3, 4, 3)]  # 16 of 20 MiB
    allocator.release(pieces[0])
    allocator.release(pieces[2])
    found = allocator.allocate(4 * MIB)
    assert found.address == pieces[2].address
    assert allocator.allocate(6 * MIB).address == pieces[0].address
    assert allocator.reserved == 20 * MIB


def test_the_lowest_address_among_equals() -> None:
    allocator = Allocator()
    pieces = [allocator.allocate(2 * MIB) for _ in range(5)]
    for place in (3, 1):
        allocator.release(pieces[place])
    assert allocator.allocate(2 * MIB).address == min(pieces[1].address, pieces[3].address)


def test_a_large_block_splits_when_more_than_one_mib_remains() -> None:
    allocator = Allocator()
    allocator.allocate(9 * MIB)
    allocator.allocate(10 * MIB - 512)  # of the 11 MiB that remain, 1 MiB and 512 B are left: a block
    assert (allocator.allocated, allocator.reserved) == (19 * MIB - 512, 20 * MIB)
    other = Allocator()
    other.allocate(9 * MIB)
    other.allocate(10 * MIB)  # 1 MiB is left: too small for a block, so it stays with this one
    assert (other.allocated, other.reserved) == (20 * MIB, 20 * MIB)


def test_a_small_block_splits_down_to_the_last_512_bytes() -> None:
    allocator = Allocator()
    for _ in range(2 * MIB // 512):
        allocator.allocate(1)
    assert allocator.reserved == 2 * MIB
    assert allocator.allocated == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved == 4 * MIB


# ---- rule 5: merging -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_freed_neighbours_merge_in_any_order(order: tuple[int, ...]) -> None:
    allocator = Allocator()
    pieces = [allocator.allocate(6 * MIB) for _ in range(3)]
    for place in order:
        allocator.release(pieces[place])
    assert allocator.allocated == 0
    assert allocator.allocate(9 * MIB).address == min(piece.address for piece in pieces)
    assert allocator.reserved == 20 * MIB


def test_nothing_goes_back_by_itself_and_segments_never_merge() -> None:
    allocator = Allocator()
    pieces = [allocator.allocate(12 * MIB) for _ in range(2)]
    for piece in pieces:
        allocator.release(piece)
    assert allocator.reserved == 24 * MIB
    allocator.allocate(24 * MIB)
    assert allocator.reserved == 48 * MIB


# ---- rule 6: expandable segments -----------------------------------------------------------------------


def test_an_expandable_pool_grows_by_pages_at_its_end() -> None:
    allocator = Allocator(expandable=True)
    allocator.allocate(12 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(12 * MIB)  # 8 MiB are free: one page more
    assert allocator.reserved == 40 * MIB
    assert allocator.allocated == 24 * MIB
    allocator.allocate(1)
    assert allocator.reserved == 42 * MIB  # the small pool's pages have 2 MiB


def test_an_expandable_block_splits_at_512_bytes() -> None:
    allocator = Allocator(expandable=True)
    allocator.allocate(20 * MIB - 512)
    assert allocator.allocated == 20 * MIB - 512


def test_expandable_fragments_less() -> None:
    """Blocks of growing size, each freed before the next: a default pool takes a segment for each."""
    sizes = [nbytes * MIB for nbytes in (12, 22, 32, 42, 52)]
    requests = [one for number, nbytes in enumerate(sizes, 1) for one in (nbytes, -number)]
    assert replay(trace(*requests)).reserved_peak == sum(sizes)
    assert replay(trace(*requests), expandable=True).reserved_peak == 60 * MIB


def test_a_cache_may_be_emptied_more_often_than_python_recurses() -> None:
    allocator = Allocator(expandable=True)
    for block in [allocator.allocate(20 * MIB) for _ in range(sys.getrecursionlimit() + 1)]:
        allocator.release(block)
        allocator.empty_cache()
    allocator.allocate(50 * MIB)
    assert allocator.reserved == 60 * MIB


def test_an_emptied_cache_unmaps_the_whole_pages_of_free_blocks() -> None:
    """Later blocks fill these addresses first, together with the free rests around them."""
    allocator = Allocator(expandable=True)
    first, middle, last = (allocator.allocate(nbytes * MIB) for nbytes in (5, 100, 15))
    assert allocator.reserved == 120 * MIB
    allocator.release(middle)
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB  # pages from 20 to 100 MiB are free as a whole
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB
    again = allocator.allocate(50 * MIB)
    assert again.address == middle.address
    assert allocator.reserved == 80 * MIB  # 15 MiB are free before the two new pages
    for block in (first, again, last):
        allocator.release(block)
    allocator.empty_cache()
    assert allocator.reserved == 0
    assert allocator.allocate(120 * MIB).address == first.address
    assert allocator.reserved == 120 * MIB


# ---- a trace --------------------------------------------------------------------------------------------


def test_peaks_of_a_trace() -> None:
    found = replay(trace(3 * MIB, 5 * MIB, -1, 4 * MIB, -2, -3))
    assert found.requested_peak == 9 * MIB
    assert found.reserved_peak == 20 * MIB
    assert found.reserved == [20 * MIB] * 6


# ---- properties ----------------------------------------------------------------------------------------

SIZES = (1, 512, 700, 4 * KIB, 300 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 33 * MIB)


def walk(seed: int, *, expandable: bool) -> Iterator[tuple[Allocator, list[object]]]:
    """Yield a random sequence of births and deaths that ends with every block freed."""
    rng = random.Random(seed)
    allocator = Allocator(expandable=expandable)
    living: list[object] = []
    for _ in range(600):
        if living and rng.random() < 0.48:
            allocator.release(living.pop(rng.randrange(len(living))))  # type: ignore[arg-type]
        else:
            living.append(allocator.allocate(rng.choice(SIZES) + rng.randrange(512)))
        yield allocator, living
    while living:
        allocator.release(living.pop(rng.randrange(len(living))))  # type: ignore[arg-type]
        yield allocator, living


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_bytes_are_ordered_and_nothing_is_lost(seed: int, expandable: bool) -> None:
    last = 0
    for allocator, living in walk(seed, expandable=expandable):
        assert allocator.requested <= allocator.allocated <= allocator.reserved
        assert last <= allocator.reserved, "the allocator frees no segment by itself"
        last = allocator.reserved
        assert allocator.allocated == sum(piece.size for piece in living)  # type: ignore[attr-defined]
    assert allocator.requested == allocator.allocated == 0
    assert allocator.reserved == allocator.reserved_peak


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_free_and_living_blocks_never_overlap_and_cover_what_is_reserved(seed: int, expandable: bool) -> None:
    for number, (allocator, living) in enumerate(walk(seed, expandable=expandable)):
        if number % 20:
            continue
        if number % 60 == 0:
            allocator.empty_cache()
        free = [piece for pool in allocator._free.values() for _, _, piece in pool]
        spans = sorted((piece.address, piece.address + piece.size) for piece in [*free, *living])  # type: ignore[attr-defined]
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert sum(end - start for start, end in spans) == allocator.reserved


@pytest.mark.parametrize("seed", range(4))
def test_free_neighbours_are_always_merged(seed: int) -> None:
    for allocator, _ in walk(seed, expandable=False):
        for pool in allocator._free.values():
            for size, address, piece in pool:
                assert (piece.size, piece.address, piece.free) == (size, address, True)
                assert piece.after is None or not piece.after.free
                assert piece.before is None or not piece.before.free


# ---- memory that returns to the device -----------------------------------------------------------------


def built(*requests: int, emptied_at: int | None = None) -> Trace:
    """Return a trace whose blocks belong to the build; its cache is emptied before one of the events."""
    plain = trace(*requests)
    blocks = tuple(block._replace(phase="build", step=-1) for block in plain.blocks)
    marks = (Mark(0, -1, "build"),)
    if emptied_at is not None:
        marks += (Mark(emptied_at, -1, "build", MarkKind.CACHE_EMPTIED),)
    return Trace(blocks, plain.events, marks, (), 0, ())


def test_an_emptied_cache_is_the_device_s_again() -> None:
    requests = (40 * MIB, -1, 60 * MIB)
    assert replay(built(*requests)).reserved_peak == 100 * MIB
    assert replay(built(*requests, emptied_at=2)).reserved_peak == 60 * MIB


def test_a_segment_in_use_is_kept() -> None:
    """Half of the first segment is still in use, so the whole segment stays."""
    requests = (5 * MIB, 5 * MIB, -1, 60 * MIB)
    assert replay(built(*requests, emptied_at=3)).reserved_peak == 80 * MIB


def test_a_build_that_runs_out_of_memory_gives_back_what_it_keeps() -> None:
    requests = (40 * MIB, -1, 60 * MIB)
    squeezed = replay(built(*requests), limit=90 * MIB)
    assert (squeezed.reserved_peak, squeezed.retries) == (60 * MIB, 1)
    roomy = replay(built(*requests), limit=100 * MIB)
    assert (roomy.reserved_peak, roomy.retries) == (100 * MIB, 0)


def test_a_step_that_does_so_does_not_fit() -> None:
    """The retry would happen in each step, so the required memory is the largest reservation."""
    squeezed = replay(trace(40 * MIB, -1, 60 * MIB), limit=90 * MIB)
    assert (squeezed.reserved_peak, squeezed.retries) == (100 * MIB, 0)


def steps(count: int, *, carried: str = "carried") -> Trace:
    """Return so many steps after the first. Each frees the block that the previous step left, and leaves its
    own."""
    order = [(carried, 5), ("a", 12), ("b", 9), ("a", 0), ("b", 0), ("left", 0)]
    blocks = [Block(5 * MIB, "carried", "", "forward", 0, "")]
    events, marks, left = [1], [Mark(0, 0, "forward")], 1
    for step in range(1, count + 1):
        marks.append(Mark(len(events), step, "forward"))
        live = {"left": left}
        for name, size in order:
            if size:
                blocks.append(Block(size * MIB, name, "", "forward", step, ""))
                live[name] = len(blocks)
            events.append(live[name] if size else -live[name])
        left = live[carried]
    return Trace(tuple(blocks), tuple(events), tuple(marks), (), (), ())


def test_the_last_step_is_replayed_until_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The free memory after the third step is split, so that the fourth takes a segment of 20 MiB more."""
    assert [replay(steps(count)).reserved_peak for count in (2, 3, 9)] == [52 * MIB] * 3
    assert len(replay(steps(2)).reserved) == len(steps(2).events)
    monkeypatch.setattr(replayed, "MOST_REPEATED", 0)
    assert [replay(steps(count)).reserved_peak for count in (2, 3, 9)] == [32 * MIB, 52 * MIB, 52 * MIB]


def test_a_step_that_leaves_other_blocks_than_it_found_is_not_replayed() -> None:
    """The second step leaves a block of another operator than the first did, and so does the third."""
    assert [replay(steps(count, carried="other")).reserved_peak for count in (1, 2)] == [32 * MIB, 52 * MIB]
    assert replay(steps(0)).reserved_peak == 20 * MIB
