"""Watching: what any code of the user's own takes, in the user's own process.

    with snugfit.watch() as seen:
        trainer.train()
    print(seen)

Unlike `measure`, nothing here is in our hands: the GPU may be shared, the process has a past. So each number
says whose it is: the allocator's peaks are this process's since the beginning of the block (their counters
are reset there), NVML's is the device's with everybody on it, and this process's share stands beside it where
the driver tells. Without a GPU there remain the time and the host's memory, and the reason.
"""

from __future__ import annotations

import html
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from snugfit.errors import GpuError, UsageError
from snugfit.measurement.host import peak_resident_bytes
from snugfit.measurement.nvml import Card, Nvml, NvmlSilent, open_nvml
from snugfit.measurement.sampler import Sampler
from snugfit.measurement.versions import torch_cuda
from snugfit.measurement.visible import choose
from snugfit.units import show_bytes, show_seconds

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class SeenGpu:
    """What was seen of one GPU; None is what could not be."""

    index: int
    """As CUDA counts in this process."""

    name: str | None = None
    """As the driver calls it."""

    uuid: str | None = None
    """By which NVML was asked."""

    requested_bytes: int | None = None
    """Peak of what this process's tensors asked for."""

    allocated_bytes: int | None = None
    """Peak of what they were handed."""

    reserved_bytes: int | None = None
    """Peak of what the allocator took from the device."""

    retries: int | None = None
    """How often the allocator gave its cache back to go on."""

    nvml_bytes: int | None = None
    """Peak of what everybody used on the device, the driver's reserve apart where NVML tells it."""

    process_bytes: int | None = None
    """Of that, this process's share, where the driver tells it."""

    reserve_bytes: int | None = None
    """The driver's own reserve."""

    total_bytes: int | None = None
    """The whole framebuffer."""

    doubt: str | None = None
    """Why something is missing."""


class Seen:
    """What a watched block took. Filled when the block ends; `samples` may be set inside or after it."""

    def __init__(self, samples: int | None = None) -> None:
        self.samples = samples
        """Samples processed in the block, when the user says so."""
        self.seconds: float | None = None
        """Wall time of the block; None while it runs."""
        self.host_bytes: int | None = None
        """Largest resident memory of this process, its past included: the kernel's counter starts there."""
        self.gpus: tuple[SeenGpu, ...] = ()
        """The watched GPUs."""
        self.without_gpu: str | None = None
        """Why no GPU was watched."""

    @property
    def samples(self) -> int | None:
        """Samples processed in the block."""
        return self._samples

    @samples.setter
    def samples(self, count: int | None) -> None:
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise UsageError(f"samples is {count!r}; it is a whole number above 0, or None.")
        self._samples = count

    @property
    def samples_per_second(self) -> float | None:
        """Samples over seconds, when both are known."""
        return self.samples / self.seconds if self.samples and self.seconds else None

    def lines(self) -> Iterator[tuple[str, str]]:
        """What was seen as pairs of a name and a value."""
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
            yield "host memory", f"{show_bytes(self.host_bytes)} (largest of this process so far)"

    def __str__(self) -> str:
        return "\n".join(f"{name:<14}{value}" for name, value in self.lines())

    def __repr__(self) -> str:
        return f"<Seen: {'running' if self.seconds is None else show_seconds(self.seconds)}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self.lines()
        )
        return f"<table>{rows}</table>"

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "schema": SCHEMA,
            "what": "seen",
            "seconds": self.seconds,
            "samples": self.samples,
            "samples_per_second": self.samples_per_second,
            "host_bytes": self.host_bytes,
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "without_gpu": self.without_gpu,
        }


def _gpu_lines(gpu: SeenGpu) -> Iterator[tuple[str, str]]:
    peaks = (
        ("requested", gpu.requested_bytes),
        ("allocated", gpu.allocated_bytes),
        ("reserved", gpu.reserved_bytes),
    )
    for name, peak in peaks:
        if peak is not None:
            yield f"  {name}", f"{show_bytes(peak)} at its peak"
    if gpu.retries:
        yield "  retries", f"{gpu.retries}: the allocator gave its cache back to go on"
    if gpu.nvml_bytes is not None:
        apart = (
            f", the driver's {show_bytes(gpu.reserve_bytes)} apart" if gpu.reserve_bytes is not None else ""
        )
        yield "  NVML", f"{show_bytes(gpu.nvml_bytes)} at its peak, all processes{apart}"
    if gpu.process_bytes is not None:
        yield "  this process", show_bytes(gpu.process_bytes)
    if gpu.doubt:
        yield "  but", gpu.doubt


class Watch:
    """The context manager that `watch` gives; entering it gives the `Seen`."""

    def __init__(self, samples: int | None, gpus: Sequence[int] | None, library: Any | None = None) -> None:
        self._seen, self._asked, self._library = Seen(samples), gpus, library
        self._open = ExitStack()
        self._watched: dict[int, tuple[Card, Sampler] | str] = {}
        self._retries: dict[int, int] = {}

    def __enter__(self) -> Seen:
        self._cuda = _cuda()
        self._indices = self._choose()
        with ExitStack() as opened:
            if self._indices:
                self._open_cards(opened)
            self._open = opened.pop_all()
        if self._cuda is not None and self._cuda.is_initialized():
            for index in self._indices:
                self._cuda.synchronize(index)
                self._cuda.reset_peak_memory_stats(index)
                self._retries[index] = self._cuda.memory_stats(index).get("num_alloc_retries", 0)
        self._began = time.perf_counter()
        return self._seen

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cuda = self._cuda or _cuda()  # torch may have been imported inside the block
        fault = self._finish_work()
        self._seen.seconds = time.perf_counter() - self._began
        for watched in self._watched.values():
            if not isinstance(watched, str):
                watched[1].count()
        gpus = [self._look(index, fault) for index in self._indices]
        self._open.close()
        self._seen.gpus = tuple(gpus)
        self._seen.host_bytes = peak_resident_bytes()

    def _choose(self) -> list[int]:
        """The indices to watch; none, with the reason, where there is no GPU and none was asked for."""
        if self._asked is not None:
            indices = list(self._asked)
            if not indices or any(type(index) is not int or index < 0 for index in indices):
                raise GpuError(f"gpus is {self._asked!r}; it is a list of CUDA's indices, such as [0, 1].")
            if self._in_use() and max(indices) >= self._cuda.device_count():
                raise GpuError(
                    f"gpus is {indices}; this process sees {self._cuda.device_count()} GPUs, from 0."
                )
            return list(dict.fromkeys(indices))
        if torch_cuda() is None:
            self._seen.without_gpu = "the installed torch is built without CUDA"
            return []
        if self._cuda is not None and self._cuda.is_initialized():
            return [self._cuda.current_device()]
        return [0]

    def _open_cards(self, opened: ExitStack) -> None:
        """Starts a sampler for each watched GPU; where one cannot be found the reason is kept."""
        try:
            nvml = opened.enter_context(open_nvml(self._library))
        except NvmlSilent as reason:
            self._refuse(str(reason))
            return
        for index in self._indices:
            try:
                card = self._card(nvml, index)
                sampler = opened.enter_context(Sampler(card, belongs=lambda pid: pid == os.getpid()))
                self._watched[index] = (card, sampler)
            except (NvmlSilent, GpuError) as reason:
                if self._asked is not None and isinstance(reason, GpuError):
                    raise
                self._watched[index] = str(reason)
        if self._asked is None and not self._in_use() and isinstance(self._watched[self._indices[0]], str):
            self._refuse(str(self._watched[self._indices[0]]))

    def _refuse(self, reason: str) -> None:
        """No NVML. GPUs that were asked for, or are in use, are still watched by torch's own counters."""
        if self._asked is None and not self._in_use():
            self._seen.without_gpu, self._indices, self._watched = reason, [], {}
        else:
            self._watched = dict.fromkeys(self._indices, reason)

    def _in_use(self) -> bool:
        return self._cuda is not None and bool(self._cuda.is_initialized())

    def _card(self, nvml: Nvml, index: int) -> Card:
        """The card by the UUID that torch tells, when CUDA runs already; else by CUDA_VISIBLE_DEVICES."""
        if self._in_use():
            uuid = str(getattr(self._cuda.get_device_properties(index), "uuid", ""))
            for prefix in ("", "GPU-", "MIG-"):
                with suppress(NvmlSilent):
                    return nvml.card(prefix + uuid)
        return choose(nvml, os.environ, index)

    def _finish_work(self) -> str | None:
        """Waits for the watched GPUs; what a broken context answers is kept as a doubt."""
        if not self._in_use():
            return None
        try:
            for index in self._indices:
                self._cuda.synchronize(index)
        except Exception as fault:
            return f"CUDA failed inside the block: {str(fault).splitlines()[0]}"
        return None

    def _look(self, index: int, fault: str | None) -> SeenGpu:
        """Everything that is known about one GPU at the end of the block."""
        facts: dict[str, Any] = {"doubt": fault}
        watched = self._watched.get(index)
        if isinstance(watched, tuple):
            facts |= _device_facts(*watched)
        elif watched is not None:
            facts["doubt"] = fault or watched
        if self._in_use() and fault is None:
            stats = self._cuda.memory_stats(index)
            facts |= {f"{name}_bytes": stats.get(f"{name}_bytes.all.peak", 0) for name in _ALLOCATOR_PEAKS}
            facts["retries"] = stats.get("num_alloc_retries", 0) - self._retries.get(index, 0)
            facts.setdefault("name", self._cuda.get_device_name(index))
        return SeenGpu(index=index, **facts)


_ALLOCATOR_PEAKS = ("requested", "allocated", "reserved")


def _device_facts(card: Card, sampler: Sampler) -> dict[str, Any]:
    shares = [
        process.bytes for census in sampler.censuses.values() for process in census.ours if process.bytes
    ]
    facts: dict[str, Any] = {
        "name": card.name,
        "uuid": card.uuid,
        "nvml_bytes": sampler.peak_bytes,
        "process_bytes": max(shares, default=None),
    }
    try:
        memory = card.memory()
    except NvmlSilent as reason:
        return facts | {"doubt": str(reason)}
    return facts | {"total_bytes": memory.total_bytes, "reserve_bytes": memory.reserve_bytes}


def _cuda() -> Any:
    """`torch.cuda` where torch is imported already and can use it; watching imports nothing."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.version.cuda is not None else None


def watch(*, samples: int | None = None, gpus: Sequence[int] | None = None) -> Watch:
    """Watches a block: `with snugfit.watch() as seen: ...`, then `print(seen)`.

    `samples` gives samples per second (or set `seen.samples`). `gpus` are CUDA's indices; without it the
    current GPU is watched, and without a GPU time and host memory. Raises `GpuError` for a GPU that is asked
    for and is not there.
    """
    return Watch(samples, gpus)
