"""The measurements of a watched block of code, with their output for a terminal and a notebook.

The advice depends on three measurements:

- the share of the GPU's memory in use at the peak;
- the share of the time in which any kernel ran, NVML's utilization;
- where that share is low, the share of the time in which the watched thread computed.

These measurements cannot identify the slow line of the training loop.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from snugfit.errors import UsageError
from snugfit.features.watch.gpu import WatchedGpu
from snugfit.units import GIB, show_bytes, show_seconds

SCHEMA = 1


class WatchResult:
    """The measurements of a watched block of code, which are set when the block ends. `samples` may be set
    inside or after the block.
    """

    def __init__(self, samples: int | None = None) -> None:
        self.samples = samples
        self.seconds: float | None = None
        """Wall time of the watched block in seconds; None while it runs."""
        self.host_bytes: int | None = None
        """Peak host memory of this process since its start, in bytes. It includes the time before the block,
        because the kernel's counter starts with the process.
        """
        self.thread_share: float | None = None
        """Share of time in which the block's thread computed, rather than waited."""
        self.uncompiled_calls = 0
        """Calls in the block that `torch.compile` ran uncompiled, at its recompile limit."""
        self.gpus: tuple[WatchedGpu, ...] = ()
        self.without_gpu: str | None = None
        """Reason why no GPU was watched."""

    @property
    def samples(self) -> int | None:
        """Number of samples that the block processed; None if it was not given."""
        return self._samples

    @samples.setter
    def samples(self, count: int | None) -> None:
        """Set the number of samples. Raises `UsageError` for a value that is not a whole number above 0."""
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise UsageError(f"samples is {count!r}; it must be a whole number above 0, or None.")
        self._samples = count

    @property
    def samples_per_second(self) -> float | None:
        """Samples of the block divided by its seconds; None if one of them is missing."""
        return self.samples / self.seconds if self.samples and self.seconds else None

    @property
    def advice(self) -> tuple[str, ...]:
        """Suggested changes to the code, and the limits of the measurements; empty while the block runs."""
        if self.seconds is None:
            return ()
        compiled = (BEYOND_LIMIT,) if self.uncompiled_calls else ()
        return *compiled, *advice_on(self.gpus, self.thread_share)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the measured values of the block as pairs of a label and a text."""
        if self.seconds is None:
            yield "watching", "the block has not ended yet"
            return
        yield "time", show_seconds(self.seconds)
        if self.samples_per_second is not None:
            yield "samples/s", f"{self.samples_per_second:.2f} ({self.samples} samples)"
        for gpu in self.gpus:
            yield f"GPU {gpu.index}", f"{gpu.name or 'unnamed'}{f' ({gpu.uuid})' if gpu.uuid else ''}"
            yield from _gpu_lines(gpu)
        if self.without_gpu:
            yield "GPU", f"none watched: {self.without_gpu}"
        if self.host_bytes is not None:
            yield "host memory", f"{show_bytes(self.host_bytes)} (peak of this process so far)"
        if self.thread_share is not None:
            yield "Python busy", f"{self.thread_share:.0%} of the time, in this thread"
        for number, sentence in enumerate(self.advice):
            yield "" if number else "advice", sentence

    def __str__(self) -> str:
        lines = list(self.lines())
        width = max(len(name) for name, _ in lines) + 2
        return "\n".join(f"{name:<{width}}{value}" for name, value in lines)

    def __repr__(self) -> str:
        return f"<Seen: {'running' if self.seconds is None else show_seconds(self.seconds)}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self.lines()
        )
        return f"<table>{rows}</table>"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """Print the measurements as IPython's plain text. `repr` is the short form inside other objects."""
        printer.text(str(self))

    def to_json(self) -> dict[str, Any]:
        """Return the measurements as a JSON object."""
        return {
            "schema": SCHEMA,
            "what": "seen",
            "seconds": self.seconds,
            "samples": self.samples,
            "samples_per_second": self.samples_per_second,
            "host_bytes": self.host_bytes,
            "thread_share": self.thread_share,
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "without_gpu": self.without_gpu,
            "advice": list(self.advice),
        }


def _gpu_lines(gpu: WatchedGpu) -> Iterator[tuple[str, str]]:
    peaks = (
        ("requested", gpu.requested_bytes),
        ("allocated", gpu.allocated_bytes),
        ("reserved", gpu.reserved_bytes),
    )
    for name, peak in peaks:
        if peak is not None:
            yield f"  {name}", f"{show_bytes(peak)} at its peak"
    if gpu.retries:
        yield "  retries", f"{gpu.retries}: the allocator released its cache to continue"
    if gpu.nvml_bytes is not None:
        gap = (
            f", without the driver's {show_bytes(gpu.reserve_bytes)}" if gpu.reserve_bytes is not None else ""
        )
        yield "  NVML", f"{show_bytes(gpu.nvml_bytes)} at its peak, all processes{gap}"
    if gpu.process_bytes is not None:
        yield "  this process", show_bytes(gpu.process_bytes)
    if gpu.utilization is not None:
        yield "  kernels ran", f"{gpu.utilization:.0%} of the time"
    if gpu.doubt:
        yield "  but", gpu.doubt


# ---- advice -----------------------------------------------------------------------------------------------


BEYOND_LIMIT = (
    "torch.compile reached torch._dynamo.config.recompile_limit and ran further variants of a function "
    "uncompiled, which takes more memory and time. For layers that fill a cache, set "
    "model.config.use_cache = False. "
    "For other variants, raise the limit."
)

FULL_SHARE = 0.95
"""Share of the GPU's memory above which a longer batch may not fit (chosen)."""

ROOMY_SHARE = 0.5
"""Share of the GPU's memory below which a larger batch fits (chosen)."""

IDLE = 0.8
"""Share of time with running kernels below which the GPU counts as idle (chosen)."""

BUSY, WAITING = 0.7, 0.4
"""Limits for the share of time in which the thread computed (chosen). Above `BUSY` the thread delays the GPU,
below `WAITING` it waits too. Between them, advice is not possible.
"""

FRAGMENTED, FRAGMENTED_BYTES = 0.15, GIB
"""Limits of reserved but unallocated memory, as a share of reserved bytes and in bytes. Above both, the
advice mentions fragmentation.
"""


def advice_on(gpus: Sequence[WatchedGpu], thread_share: float | None) -> Iterator[str]:
    """Yield a sentence for each measurement that suggests a change, then sentences on the limits of the
    measurements.
    """
    is_advised = False
    for gpu in gpus:
        name = f"GPU {gpu.index}: " if len(gpus) > 1 else ""
        for sentence in (*_about_memory(gpu), *_about_time(gpu, thread_share)):
            is_advised = True
            yield name + sentence
    if not gpus:
        yield "No GPU was watched, so there is no advice. `snugfit predict MODEL --gpu NAME` needs no GPU."
        return
    if not is_advised:
        yield "These readings call for no change."
    yield (
        "Not known from outside: which part of a step takes the time. `snugfit measure` and "
        "`snugfit predict --gpu NAME` show it for a job."
    )


def _about_memory(gpu: WatchedGpu) -> Iterator[str]:
    used = gpu.nvml_bytes if gpu.nvml_bytes is not None else gpu.reserved_bytes
    usable = (gpu.total_bytes or 0) - (gpu.reserve_bytes or 0)
    plan = f'`snugfit plan MODEL --gpu "{gpu.name}"`' if gpu.name else "`snugfit plan MODEL --gpu NAME`"
    smaller = (
        f"{plan} finds recipes that take less; snugfit.fit and snugfit.accelerate continue with one when "
        "memory runs out."
    )
    if gpu.retries:
        yield (
            f"Memory was too tight: {gpu.retries} times the allocator had to release its cache, which costs "
            f"time. {smaller}"
        )
    elif used and usable > 0 and used > FULL_SHARE * usable:
        yield f"At its peak {used / usable:.0%} of the memory was used: a longer batch may not fit. {smaller}"
    unused = (gpu.reserved_bytes or 0) - (gpu.allocated_bytes or 0)
    if unused > max(FRAGMENTED_BYTES, FRAGMENTED * (gpu.reserved_bytes or 0)):
        yield (
            f"{show_bytes(unused)} were reserved and not in use at the peaks. "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True often makes that smaller (`expandable` in a "
            "recipe)."
        )
    if gpu.other_processes:
        yield (
            f"{gpu.other_processes[0].upper()}{gpu.other_processes[1:]}: their memory and their time are in "
            "these figures. End them (`nvidia-smi` shows them), or take another GPU."
        )


def _about_time(gpu: WatchedGpu, thread_share: float | None) -> Iterator[str]:
    if gpu.utilization is None:
        yield (
            "It is not known if the GPU waited: its utilization was not "
            f"read{f' ({gpu.utilization_fault})' if gpu.utilization_fault else ''}. Install "
            "nvidia-ml-py, or read nvidia-smi."
        )
        return
    if gpu.utilization >= IDLE:
        return
    idle = f"For {1 - gpu.utilization:.0%} of the time no kernel ran on the GPU"
    if thread_share is None:
        yield f"{idle}; the cause is not known. torch.profiler shows it."
    elif thread_share < WAITING:
        yield (
            f"{idle}, and Python waited too ({1 - thread_share:.0%} of the time): for data, a disk or a "
            "network. More loader workers may help (`dataloader_num_workers`; `workers` in a recipe)."
        )
    elif thread_share > BUSY:
        usable = (gpu.total_bytes or 0) - (gpu.reserve_bytes or 0)
        used = gpu.nvml_bytes or gpu.reserved_bytes or 0
        larger = " There is memory for a larger batch." if 0 < used < ROOMY_SHARE * usable else ""
        yield (
            f"{idle}, while Python was busy {thread_share:.0%} of it: it launches kernels more slowly than "
            "they run, or loads data in the same process. A larger batch, `torch.compile` and a fused "
            f"optimizer launch less per sample; loader workers load elsewhere.{larger}"
        )
    else:
        yield (
            f"{idle}. Python was busy {thread_share:.0%} of it, so the cause may be the launch of kernels "
            "or the wait for data. Try loader workers first, then a larger batch."
        )
