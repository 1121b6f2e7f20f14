"""Measurement of a block of the user's own code, in the user's own process.

    with snugfit.watch() as seen:
        trainer.train()
    print(seen)

Unlike in `measure`, the GPU may be shared and the process has run before. The allocator's peaks are this
process's since the beginning of the block, where the counters are reset. NVML's peak is that of all processes
on the GPU, with this process's share where the driver reports it. Without a GPU the result has the time, the
host's memory, and the reason. It ends with advice.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, NamedTuple

from snugfit.errors import GpuError
from snugfit.features.watch.gpu import WatchedGpu
from snugfit.features.watch.result import WatchResult
from snugfit.measurement.contamination import GpuBaseline, sentence_on_processes
from snugfit.measurement.host import peak_resident_bytes
from snugfit.measurement.nvml import Card, Nvml, NvmlUnavailable, open_nvml
from snugfit.measurement.sampler import Sampler
from snugfit.measurement.visible_devices import card_at
from snugfit.versions import torch_cuda

_ALLOCATOR_PEAKS = ("requested", "allocated", "reserved")


CENSUSES_BEFORE = 4
"""Number of first readings of the driver's utilization that are ignored. A reading covers up to the last
second, which may include time before the block.
"""


class _Utilization:
    """Records NVML's GPU utilization at each reading, except in the first second of the block."""

    def __init__(self, card: Card) -> None:
        self._card, self._censuses = card, 0
        self.shares: list[float] = []
        self.fault: str | None = "the block was shorter than a second"
        """Reason why no utilization was read; None if it was."""

    def read(self) -> None:
        """Record the GPU utilization once; the sampler calls it after counting the GPU's processes."""
        self._censuses += 1
        if self._censuses <= CENSUSES_BEFORE:
            return
        try:
            self.shares.append(self._card.utilization())
        except NvmlUnavailable as reason:
            self.fault = str(reason)


class _SampledCard(NamedTuple):
    """A GPU with the thread that samples its memory use."""

    card: Card
    sampler: Sampler
    utilization: _Utilization

    def facts(self) -> dict[str, Any]:
        """Return the fields of a `WatchedGpu` that NVML measures, by name."""
        censuses = list(self.sampler.censuses.values())  # the sampling thread may add one
        shares = [process.bytes for census in censuses for process in census.own if process.bytes]
        facts: dict[str, Any] = {
            "name": self.card.name,
            "uuid": self.card.uuid,
            "nvml_bytes": self.sampler.peak_bytes,
            "process_bytes": max(shares, default=None),
            "other_processes": sentence_on_processes(
                censuses, GpuBaseline(used_bytes=None, pids=frozenset(), reason=None)
            ),
        }
        if self.utilization.shares:
            facts["utilization"] = statistics.fmean(self.utilization.shares)
        else:
            facts["utilization_fault"] = self.utilization.fault
        try:
            memory = self.card.memory()
        except NvmlUnavailable as reason:
            return facts | {"doubt": str(reason)}
        return facts | {"total_bytes": memory.total_bytes, "reserve_bytes": memory.reserve_bytes}


class Watch:
    """The context manager that `watch` returns. Entering it returns the `WatchResult`."""

    def __init__(self, samples: int | None, gpus: Sequence[int] | None, library: Any | None = None) -> None:
        self._result, self._gpus, self._library = WatchResult(samples), gpus, library
        self._open = ExitStack()
        self._watched: dict[int, _SampledCard | str] = {}
        """Sampled GPUs by CUDA index. A string is the reason why a GPU is not sampled."""
        self._retries: dict[int, int] = {}

    def __enter__(self) -> WatchResult:
        self._cuda = _cuda()
        self._indices = self._choose()
        # After an error here the GPUs' handles are closed. Otherwise they stay open until `__exit__`.
        with ExitStack() as opened:
            if self._indices:
                self._open_cards(opened)
            self._open = opened.pop_all()
        if self._cuda is not None and self._cuda.is_initialized():
            for index in self._indices:
                # Work from before the block must not count in its peaks or its seconds.
                self._cuda.synchronize(index)
                self._cuda.reset_peak_memory_stats(index)
                self._retries[index] = self._cuda.memory_stats(index).get("num_alloc_retries", 0)
        self._uncompiled = uncompiled_calls()
        self._thread, self._computed = threading.get_ident(), time.thread_time()
        self._began = time.perf_counter()
        return self._result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cuda = self._cuda or _cuda()  # the block may have imported torch
        # The block's seconds include its kernels, so the host waits before it reads the clock.
        fault = self._finish_work()
        self._result.seconds = time.perf_counter() - self._began
        # `thread_time` belongs to one thread, so the block must end in the thread in which it began.
        if self._thread == threading.get_ident() and self._result.seconds:
            self._result.thread_share = min(1.0, (time.thread_time() - self._computed) / self._result.seconds)
        for watched in self._watched.values():
            if not isinstance(watched, str):
                # The sampling thread's last reading may be older than the block's last allocation.
                watched.sampler.read()
                watched.sampler.count()
        # Computing the results needs NVML, so it is closed afterwards.
        self._result.gpus, self._result.host_bytes = self.readings(fault)
        self._result.uncompiled_calls = uncompiled_calls() - self._uncompiled
        self._open.close()

    def readings(self, fault: str | None = None) -> tuple[tuple[WatchedGpu, ...], int | None]:
        """Return the measurements of the GPUs since the beginning of the block, and the peak host bytes of
        this process. `fault` is the error of a broken CUDA context.
        """
        return tuple(self._result_of(index, fault) for index in self._indices), peak_resident_bytes()

    def _choose(self) -> list[int]:
        """Return the CUDA indices of the GPUs to watch. If there is no GPU and none was requested, store the
        reason and return an empty list.
        """
        if self._gpus is not None:
            indices = list(self._gpus) if isinstance(self._gpus, Iterable) else []
            if not indices or any(type(index) is not int or index < 0 for index in indices):
                raise GpuError(f"gpus is {self._gpus!r}; it must be a list of CUDA indices, such as [0, 1].")
            if self._in_use() and max(indices) >= self._cuda.device_count():
                raise GpuError(
                    f"gpus is {indices}, but this process sees {self._cuda.device_count()} GPUs, "
                    "counted from 0. Name some of them."
                )
            return list(dict.fromkeys(indices))
        if torch_cuda() is None:
            self._result.without_gpu = "the installed torch is built without CUDA"
            return []
        if self._cuda is not None and self._cuda.is_initialized():
            return [self._cuda.current_device()]
        return [0]

    def _open_cards(self, opened: ExitStack) -> None:
        """Start to sample each watched GPU. If NVML does not find a GPU, store the reason."""
        try:
            nvml = opened.enter_context(open_nvml(self._library))
        except NvmlUnavailable as reason:
            self._refuse(str(reason))
            return
        for index in self._indices:
            try:
                card = self._card(nvml, index)
                utilization = _Utilization(card)
                sampler = Sampler(card, belongs=lambda pid: pid == os.getpid(), also=utilization.read)
                self._watched[index] = _SampledCard(card, opened.enter_context(sampler), utilization)
            except (NvmlUnavailable, GpuError) as reason:
                if self._gpus is not None and isinstance(reason, GpuError):
                    raise
                self._watched[index] = str(reason)
        if self._gpus is None and not self._in_use() and isinstance(self._watched[self._indices[0]], str):
            self._refuse(str(self._watched[self._indices[0]]))

    def _refuse(self, reason: str) -> None:
        """Store the reason why NVML is not available. GPUs that were requested, or are in use, are still
        measured by torch's own counters.
        """
        if self._gpus is None and not self._in_use():
            self._result.without_gpu, self._indices, self._watched = reason, [], {}
        else:
            self._watched = dict.fromkeys(self._indices, reason)

    def _in_use(self) -> bool:
        return self._cuda is not None and bool(self._cuda.is_initialized())

    def _card(self, nvml: Nvml, index: int) -> Card:
        """Return the NVML device by torch's UUID if CUDA is initialized, else by CUDA_VISIBLE_DEVICES."""
        if self._in_use():
            uuid = str(getattr(self._cuda.get_device_properties(index), "uuid", ""))
            # torch's UUID has no prefix, while NVML's has one.
            for prefix in ("", "GPU-", "MIG-"):
                with suppress(NvmlUnavailable):
                    return nvml.card(prefix + uuid)
        return card_at(nvml, os.environ, index)

    def _finish_work(self) -> str | None:
        """Synchronize the watched GPUs. Return the error of a broken CUDA context as text, or None."""
        if not self._in_use():
            return None
        try:
            for index in self._indices:
                self._cuda.synchronize(index)
        except Exception as fault:
            return f"CUDA failed inside the block: {str(fault).splitlines()[0]}"
        return None

    def _result_of(self, index: int, fault: str | None) -> WatchedGpu:
        """Return all measurements of one GPU at the end of the block."""
        facts: dict[str, Any] = {"doubt": fault}
        watched = self._watched.get(index)
        if isinstance(watched, str):
            facts["doubt"] = fault or watched
        elif watched is not None:
            facts |= watched.facts()
        if self._in_use() and fault is None:
            stats = self._cuda.memory_stats(index)
            facts |= {f"{name}_bytes": stats.get(f"{name}_bytes.all.peak", 0) for name in _ALLOCATOR_PEAKS}
            facts["retries"] = stats.get("num_alloc_retries", 0) - self._retries.get(index, 0)
            facts.setdefault("name", self._cuda.get_device_name(index))
        return WatchedGpu(index=index, **facts)


def _cuda() -> Any:
    """Return `torch.cuda` if torch is already imported and built with CUDA, else None. Watching never imports
    torch.
    """
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.version.cuda is not None else None


def uncompiled_calls() -> int:
    """Return the number of calls in this process that `torch.compile` ran uncompiled at its recompile limit.

    Dynamo counts them by their message (`torch._dynamo.utils.counters`).
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    reasons = utils.counters["unimplemented"].items()
    return sum(count for reason, count in reasons if "recompile limit exceeded" in str(reason))


def watch(*, samples: int | None = None, gpus: Sequence[int] | None = None) -> Watch:
    """Measure a block of code: `with snugfit.watch() as seen: ...`, then `print(seen)`.

    `samples` is the number of samples in the block, for samples per second (or set `seen.samples`). `gpus`
    are CUDA indices. The default is the current GPU; without a GPU only time and host memory are measured.
    Raises `GpuError` for a requested GPU that does not exist.
    """
    return Watch(samples, gpus)
