"""The trace: every allocation, free and kernel of a rehearsed run, in order, each with its origin.

A trace is plain data. `blocks[i]` says what was born; `events` holds the order: `i + 1` is the birth of block
`i`, `-(i + 1)` its death. Blocks that outlive the run (weights, states) have no death. Everything snugfit
says about bytes is a pure function of these two lists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

COPY_IN = "Memcpy HtoD"
"""A kernel that copies from the host's memory, as CUDA's profiler calls it."""

PREPARED = "Memcpy HtoD, prepared"
"""Such a copy of what so many (`Kernel.tensors`) worker processes made, in page-locked memory."""


WITH_BIAS = frozenset({"aten::addmm", "aten::baddbmm"})
"""Products whose first operand is added."""

MATRIX_PRODUCTS = WITH_BIAS | {"aten::mm", "aten::bmm", "aten::_grouped_mm"}

CASTS, STRIDED, TRANSPOSED, WITH_DROPOUT = "casts", "strided", "transposed", "with dropout"
"""Layouts of kernels."""


class Block(NamedTuple):
    """One allocation."""

    nbytes: int
    """What was asked for."""
    operator: str
    """Which operator asked, by torch's name (`aten::addmm`), or what for (`cuBLAS workspace`)."""
    module: str
    """Dotted name of the module that ran."""
    phase: str
    step: int
    """Optimizer step; -1 before the first."""
    kind: str
    """A `Kind`, decided when the run was over."""


class Mark(NamedTuple):
    """From event `event` on, the run is in this step and phase."""

    event: int
    step: int
    phase: str


class Kernel(NamedTuple):
    """One operator of the steady step that runs on the device."""

    operator: str
    module: str
    phase: str
    flops: int
    nbytes: int
    """Read and written."""
    shapes: tuple[tuple[int, ...], ...]
    """Of its first three tensor inputs."""
    dtype: str
    """Of its first input; `tf32` for a product of fp32 tensors that runs in it."""
    tensors: int
    """How many it is given: lists of them are what foreach optimizers work on."""
    layout: str = ""
    """What decides, beside its operands' sizes, which kernel runs. Of a pointwise operator or a copy
    `strided` when its operands lie in different ways, `transposed` when one of them, larger than any cache,
    is read across its rows, and `casts` when it mixes precisions; of attention `with dropout`."""
    leading: tuple[int, ...] = ()
    """Of a product of matrices: their leading dimensions, as BLAS calls the elements from row to row."""
    recomputed: bool = False
    """Whether it runs forward again in the backward pass."""
    modules: int = 0
    """Modules in which it is the first to run."""
    views: int = 0
    """Operators since the last kernel that run none: views of tensors, and empty ones."""
    checkpoints: int = 0
    """Checkpointed parts that began since then, or began to be computed again."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the first input, if it is a number that products know."""
        return 2 if "16" in self.dtype else 4


@dataclass(frozen=True)
class Trace:
    """What a rehearsal wrote."""

    blocks: tuple[Block, ...]
    events: tuple[int, ...]
    marks: tuple[Mark, ...]
    kernels: tuple[Kernel, ...]
    """Of the last step only: the steady one."""
    waits: tuple[int, ...]
    """Where the last step's host waits for the device: before which of its kernels."""
    attention: tuple[str, ...]
    """Which attention kernels were chosen."""
    doubts: tuple[str, ...] = ()
    """What the rehearsal could not know."""

    @property
    def syncs(self) -> int:
        """How often the last step waits for the device."""
        return len(self.waits)

    def live(self) -> Iterator[int]:
        """Requested bytes alive after each event."""
        current = 0
        for event in self.events:
            current += self.blocks[event - 1].nbytes if event > 0 else -self.blocks[-event - 1].nbytes
            yield current

    def peak(self) -> tuple[int, int]:
        """The largest requested bytes, and the position of the event that first reached them."""
        best, where = 0, -1
        for position, current in enumerate(self.live()):
            if current > best:
                best, where = current, position
        return best, where

    def alive_at(self, position: int) -> list[int]:
        """Indices of the blocks alive after event `position`."""
        alive: dict[int, None] = {}
        for event in self.events[: position + 1]:
            if event > 0:
                alive[event - 1] = None
            else:
                del alive[-event - 1]
        return list(alive)

    def digest(self) -> str:
        """A short fingerprint of sizes and order: equal digests are equal footprints."""
        sizes = ",".join(
            f"+{self.blocks[event - 1].nbytes}" if event > 0 else f"-{self.blocks[-event - 1].nbytes}"
            for event in self.events
        )
        return hashlib.sha256(sizes.encode()).hexdigest()[:16]
