"""Host bytes: the training process's part of the machine's own memory.

Most of it is not the job's: Python, torch and CUDA's libraries. The job adds its host tensors (a model that
is built on the host before it moves, batches in the loader's hands).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from snugfit.results.footprint import Kind
from snugfit.units import MIB

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.rehearsal.trace.trace import Trace
    from snugfit.techniques.setup import Setup

PROCESS = 1500 * MIB
"""Resident memory of a process that has imported torch and transformers and holds a CUDA context: between
1,326 and 1,828 MiB in 16 drawn runs on an H200 (2026-11-20, torch 2.11)."""

TRAINER = 800 * MIB
"""What the HF Trainer's imports add: 2,206 MiB measured against 1,331 MiB for the plain loop."""

WORKER = 450 * MIB
"""Resident memory of one loader worker that its parent's pages do not share."""

PREFETCH = 2
"""Batches that a worker holds ready (DataLoader's `prefetch_factor`)."""


def host_bytes(job: Job, setup: Setup, trace: Trace, loop: str) -> int:
    """Largest resident memory in bytes of the process and its workers, to within 400 MiB."""
    weights = sum(block.nbytes for block in trace.blocks if block.kind == Kind.WEIGHTS)
    batch = sum(block.nbytes for block in trace.blocks if block.kind == Kind.INPUTS and block.step == 0)
    workers = setup.loader.workers
    return (
        PROCESS
        + (TRAINER if loop == "trainer" else 0)
        + (weights if job.build_on == "host" or loop == "trainer" else 0)
        + workers * (WORKER + PREFETCH * batch)
        + (2 * batch if setup.loader.pinned else 0)
    )
