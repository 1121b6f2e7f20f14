"""Runs of several processes: functions that the core calls, each of which imports its own module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def launch(processes: int, command_line: Sequence[str]) -> int:
    """Run this command in several processes on this host, by torch's launcher; return their exit code."""
    from snugfit.features.distributed.launch import launch as run

    return run(processes, command_line)


def restarts() -> Any:
    """Return the module that restarts all processes with a recipe of less memory after one ran out of it."""
    from snugfit.features.distributed import start_again

    return start_again


def watch(ranks: Any, journal: Any, every: int) -> Any:
    """Return the monitor that warns of a slow process for which all others wait (`stragglers.py`)."""
    from snugfit.features.distributed.stragglers import Stragglers

    return Stragglers(ranks, journal, every=every)


def join_measured(request: Mapping[str, Any], device: Any) -> Any:
    """Join the process group of a measured run, and return it (`RankGroup`)."""
    from snugfit.features.distributed.measured_ranks import RankGroup

    return RankGroup(request, device)


def plans() -> Any:
    """Return the module with the commands that plan for several GPUs."""
    from snugfit.features.distributed.plan import command

    return command
