"""The result of a watched block, with its output for a terminal and a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from snugfit.errors import UsageError
from snugfit.measurement.advice import advice_on
from snugfit.measurement.watched_gpu import WatchedGpu
from snugfit.units import show_bytes, show_seconds

SCHEMA = 1


class WatchResult:
    """The measured values of a watched block; set when the block ends. `samples` may be set inside or after
    it."""

    def __init__(self, samples: int | None = None) -> None:
        self.samples = samples
        self.seconds: float | None = None
        """Wall time of the block; None while it runs."""
        self.host_bytes: int | None = None
        """Largest resident memory of this process since its start, also before the block: the kernel's
        counter starts with the process."""
        self.thread_share: float | None = None
        """Share of the time in which the block's own thread computed and did not wait."""
        self.gpus: tuple[WatchedGpu, ...] = ()
        self.without_gpu: str | None = None
        """Reason why no GPU was watched."""

    @property
    def samples(self) -> int | None:
        """Number of samples that the block processed; None if it was not given."""
        return self._samples

    @samples.setter
    def samples(self, count: int | None) -> None:
        """Raise `UsageError` for a value that is no whole number above 0."""
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise UsageError(f"samples is {count!r}; it must be a whole number above 0, or None.")
        self._samples = count

    @property
    def samples_per_second(self) -> float | None:
        """Samples divided by seconds; None where one of them is missing."""
        return self.samples / self.seconds if self.samples and self.seconds else None

    @property
    def advice(self) -> tuple[str, ...]:
        """Suggested changes, and the limits of the readings; empty while the block runs."""
        return () if self.seconds is None else tuple(advice_on(self.gpus, self.thread_share))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the result as pairs of a name and a value."""
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

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
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
        apart = (
            f", without the driver's {show_bytes(gpu.reserve_bytes)}" if gpu.reserve_bytes is not None else ""
        )
        yield "  NVML", f"{show_bytes(gpu.nvml_bytes)} at its peak, all processes{apart}"
    if gpu.process_bytes is not None:
        yield "  this process", show_bytes(gpu.process_bytes)
    if gpu.utilization is not None:
        yield "  kernels ran", f"{gpu.utilization:.0%} of the time"
    if gpu.doubt:
        yield "  but", gpu.doubt
