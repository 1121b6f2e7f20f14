"""The number of training processes and their parallelism (such as FSDP), from a user's configuration.

No single key contains both. A launcher's flag or file sets the number of processes. A separate switch turns
on FSDP, a device mesh sets replicas of the weights, and DDP is the default. The tables of libraries translate
these keys to raw values (`parallel.by`, `parallel.replicate`, ...). This module converts them to the
arguments of techniques.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GPUS, BY, STAGE, OFFLOAD = "job.gpus", "parallel.by", "sharding.stage", "sharding.offload"
BUCKET = "sharding.bucket"
PER_HOST, HOSTS, COPIES, SHARDS = (
    "parallel.per_host",
    "parallel.hosts",
    "parallel.replicate",
    "parallel.shard",
)
ZERO, ELSEWHERE, OVERLAP = "parallel.zero", "parallel.elsewhere", "parallel.overlap"
RAW = (GPUS, BY, PER_HOST, HOSTS, COPIES, SHARDS, ZERO, ELSEWHERE, OVERLAP)
"""Intermediate arguments that describe the processes of a run, such as the number of hosts. Only this module
reads them.
"""

BATCH, MICRO, PIECES = "job.batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"

NOT_SAID = "the launcher decides the number of processes. Add --gpus N"
COMPUTED = "its value is computed when the processes start. Add --gpus N"
ONE_ASSUMED = "the launcher decides the number of processes, and one is assumed. Add --gpus N"
ONE_PROCESS = "it needs several processes. Leave it out, or add --gpus N"
OF_THEIR_NUMBER = (NOT_SAID, COMPUTED, ONE_PROCESS)
"""Reasons for a refusal that no longer apply when the user gives the number of processes."""

NO_MESH = "without FSDP (version 2) a mesh of processes shards nothing"
IN_THE_CONFIG = "the file of accelerate launch decides the sharding. Give that file instead"
WITHOUT_STAGE = "on several GPUs DeepSpeed is predicted with a zero_stage of 2 or 3"
TWO_BUCKETS = "on one GPU there is nothing to overlap, and its second bucket is not predicted"
FIRST_STAGE = (
    "DeepSpeed's first stage on several GPUs has no counterpart: ddp is without it, and zero2 is the next"
)
ALONE = (
    "on one GPU ZeRO shards nothing; without offload to the CPU its flat copies and buckets are not predicted"
)


@dataclass(kw_only=True)
class Processes:
    """The number of training processes and their parallelism, before the conversion to a technique's
    arguments.
    """

    gpus: int = 1
    """Number of processes, one for each GPU."""

    words: dict[str, Any] = field(default_factory=dict)
    """Arguments from which the parallel technique and its settings follow."""

    asked_by: str = ""
    """Intermediate argument that decided the parallelism; empty if the number of processes did."""

    refused: list[tuple[str, str]] = field(default_factory=list)
    """Arguments of the file that have no counterpart in snugfit, each with the reason."""

    differs: list[tuple[str, str]] = field(default_factory=list)
    """Arguments of the file that snugfit runs with a difference, each with that difference."""

    unread: list[tuple[str, str]] = field(default_factory=list)
    """Arguments of the file whose effect depends on the number of processes, which is assumed."""


def read_processes(arguments: Mapping[str, Any], said: Mapping[str, Any], named: int | None) -> Processes:
    """Return the number of training processes and their parallelism (such as FSDP), from a configuration's
    `arguments`.

    `said` has the arguments that the file itself sets. A number of GPUs `named` by the user overrides the
    file's.
    """
    processes = Processes()
    numbers = {key: arguments[key] for key in RAW if key in arguments and key not in (BY, ZERO, OVERLAP)}
    if wrong := [key for key, value in numbers.items() if type(value) is not int or value < 1]:
        if named is None:
            processes.refused += [(key, COMPUTED) for key in wrong]
        numbers = {key: value for key, value in numbers.items() if key not in wrong}
    gpus = named or _count(numbers, arguments, said)
    mesh = numbers.get(COPIES, 1) * numbers.get(SHARDS, 1)
    processes.gpus = gpus or 1
    if gpus and mesh not in (1, gpus):
        processes.refused.append(
            (SHARDS if SHARDS in numbers else COPIES, f"it makes a mesh of {mesh}, not of {gpus}")
        )
    if OVERLAP in arguments and processes.gpus == 1:
        processes.refused.append((OVERLAP, TWO_BUCKETS))
    if ELSEWHERE in numbers:
        processes.refused.append((ELSEWHERE, IN_THE_CONFIG))
    by = arguments.get(BY)
    if gpus is None and (ZERO in arguments or arguments.get(OFFLOAD) == "none"):
        processes.unread.append((ZERO if ZERO in arguments else STAGE, ONE_ASSUMED))
    if by == "fsdp":
        _read_fsdp(processes, gpus, numbers)
    elif numbers.get(SHARDS, 1) > 1:
        processes.refused.append((SHARDS, NO_MESH))
    elif ZERO in arguments and STAGE not in arguments:
        _read_zero(processes, arguments[ZERO])
    elif by == "deepspeed" and processes.gpus > 1 and STAGE not in arguments:
        processes.refused.append((BY, WITHOUT_STAGE))
    elif by == "ddp" and gpus is None:
        processes.refused.append((BY, NOT_SAID))
    elif processes.gpus > 1 and STAGE not in arguments:
        # DDP's default for gradients is no views of the buckets.
        processes.words, processes.asked_by = {BY: "ddp", "parallel.bucket_views": False}, BY if by else ""
    return processes


def _count(numbers: Mapping[str, int], arguments: Mapping[str, Any], said: Mapping[str, Any]) -> int | None:
    """Return the number of training processes that a configuration file sets; None if it sets none."""
    if GPUS in numbers:
        return numbers[GPUS]
    if PER_HOST in numbers or HOSTS in numbers:
        return numbers.get(PER_HOST, 1) * numbers.get(HOSTS, 1)
    if COPIES in numbers or SHARDS in numbers:
        return numbers.get(COPIES, 1) * numbers.get(SHARDS, 1)
    # Defaults are ignored: all three keys must be in the file.
    values = (arguments.get(key) for key in (BATCH, MICRO, PIECES) if key in said)
    parts = [value for value in values if isinstance(value, int) and value > 0]
    if len(parts) < 3:
        return None
    whole, micro, pieces = parts
    return whole // (micro * pieces) if whole % (micro * pieces) == 0 else None


def _read_fsdp(processes: Processes, gpus: int | None, numbers: Mapping[str, int]) -> None:
    if gpus is None:
        processes.refused.append((BY, NOT_SAID))
    elif gpus == 1:
        processes.refused.append((BY, ONE_PROCESS))
    elif numbers.get(COPIES, 1) > 1 and numbers.get(SHARDS, 1) == 1:
        processes.refused.append((COPIES, "FSDP has no processes to spread a copy over"))
    processes.words[BY], processes.asked_by = "fsdp", BY
    if numbers.get(COPIES, 1) > 1:
        processes.words |= {"parallel.copies": "several", "parallel.group": numbers.get(SHARDS, 1)}


def _read_zero(processes: Processes, stage: int) -> None:
    """Set in `processes` the parallelism of DeepSpeed's ZeRO stage 1, or of stage 2 without offloading."""
    if processes.gpus == 1:
        processes.differs.append((ZERO, ALONE))
    elif stage == 1:
        processes.refused.append((ZERO, FIRST_STAGE))
    else:
        processes.words, processes.asked_by = {STAGE: stage, OFFLOAD: "none"}, ZERO
