"""Early start of the fork server, as a copy of the command's process before its first simulation.

The fork server of `prediction/worker_pool.py` is a fresh interpreter. Its imports of torch and transformers
take four CPU seconds (torch 2.13, transformers 5.23). The command's process has imported both by then, so a
copy has nothing to import. The copy waits without a computation. It serves when the first worker is started,
and ends with the command.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing.util
import os
import select
import sys
from collections.abc import Sequence
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    from snugfit.job.job import Job

NVIDIA_DRIVER = "/dev/nvidiactl"
"""Device file of NVIDIA's driver. Libraries may have queried CUDA on a machine with it, and then a copy of
the process cannot use CUDA (`prediction/quiet_workers.py`)."""


def start_as_copy(job: Job, workers: int) -> None:
    """Start the fork server as a copy of this process, if `workers` processes would simulate this job.

    On another system than Linux, or with a GPU, it does nothing, and the fork server starts later as usual.
    """
    from snugfit.planning.cost.parts_pool import can_travel, load_ahead

    if sys.platform != "linux" or os.path.exists(NVIDIA_DRIVER) or workers < 2 or not can_travel(job):
        return
    importlib.import_module("snugfit.planning.cost.parts")
    name = job.model.architecture
    # Some architectures use the file of another one, which the simulation imports.
    with contextlib.suppress(ImportError):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    # The resource tracker is a process too, and must not be a copy of this one.
    resource_tracker.ensure_running()
    with patch.object(multiprocessing.util, "spawnv_passfds", _copy):
        load_ahead(job, [], None, workers)


def _copy(path: object, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Copy this process in place of `multiprocessing.util.spawnv_passfds`, and return the copy's process
    id.
    """
    process = os.fork()
    if not process:
        _serve(arguments[-1], list(descriptors))
    return process


def _serve(code: str, descriptors: Sequence[int]) -> None:
    """Run the fork server's code once a worker is requested, and end this process.

    The parent's other files are closed. Otherwise this copy would keep the pipe open that signals its end.
    Their descriptors refer to the null device, since objects of the copy may close them later. A new pipe
    with the same number would then be closed instead.
    """
    try:
        import torch

        # A forked process has no OpenMP threads, and would wait for them forever.
        torch.set_num_threads(1)
        null = os.open(os.devnull, os.O_RDWR)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > sys.__stderr__.fileno() and number not in (null, *descriptors):  # type: ignore[union-attr]
                with contextlib.suppress(OSError):
                    os.dup2(null, number, inheritable=False)
        # The first descriptor receives requests, and the others close when the parent ends.
        if select.select(descriptors[:2], [], [])[0] == [descriptors[0]]:
            from snugfit.deferred_imports import complete_imports

            complete_imports()
            exec(code, {})
    finally:
        os._exit(0)
