"""Reports on GPUs for a terminal: the table of all GPUs, and one GPU with the sources of its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType

from snugfit.job.gpu import Gpu
from snugfit.report.text.table import table
from snugfit.report.text.terminal import words
from snugfit.units import GIB, show_bytes

TERA = 10**12

WIDE = 103
"""Number of terminal columns that the full table needs."""


class _GpuTable:
    """A table with one line for each GPU; a narrow terminal gets it without architecture and year."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = gpus

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        heads = ["GPU", "Architecture", "Year>", "CC>", "GiB>", "GB/s>", "fp32>", "tf32>", "fp16>", "bf16>"]
        first = 1 if options.max_width >= WIDE else 3
        rows = ((gpu.key, *_cells(gpu)[first - 1 :]) for gpu in self._gpus)
        yield table([heads[0], *heads[first:]], rows)


def render(gpus: Sequence[Gpu]) -> RenderableType:
    """Return a table of these GPUs for a terminal; a missing figure is an empty cell."""
    note = (
        "GiB: memory that processes can use. fp32 to bf16: dense TFLOP/s from the data sheet. For one GPU "
        "with its sources: snugfit gpus NAME"
    )
    return Group(_GpuTable(gpus), words(note))


def _cells(gpu: Gpu) -> tuple[object, ...]:
    return (
        gpu.architecture,
        gpu.release_year or "",
        _capability(gpu),
        f"{gpu.memory_bytes / GIB:.2f}" if gpu.memory_bytes else "",
        f"{gpu.bandwidth / 1e9:,.0f}" if gpu.bandwidth else "",
        *(_tera(gpu, kind) for kind in ("fp32", "tf32", "fp16", "bf16")),
    )


def render_one(gpu: Gpu) -> RenderableType:
    """Return a report of one GPU's figures, each with its source, and the uncertain ones."""
    return Group(table(("", gpu.name), _facts(gpu)), table(("Figure", "Source"), gpu.sources.items()))


def _facts(gpu: Gpu) -> Iterator[tuple[str, str]]:
    sizes = (
        ("nvidia-smi's total", gpu.nvml_total_bytes),
        ("reserved by the driver", gpu.driver_reserved_bytes),
        ("for processes", gpu.memory_bytes),
        ("context of one process", gpu.context_bytes),
        ("libraries loaded by training", gpu.libraries_bytes),
    )
    yield "key", gpu.key
    yield "architecture", f"{gpu.architecture} {gpu.chip or ''} {_capability(gpu)}".strip()
    yield from ((label, show_bytes(size)) for label, size in sizes if size is not None)
    if gpu.context_source:
        yield "context measured on", gpu.context_source
    yield from ((f"{kind}, TFLOP/s", _tera(gpu, kind)) for kind in gpu.peak_dense)
    yield from (("uncertain", doubt) for doubt in gpu.doubts)
    yield from (("note", note) for note in gpu.notes)


def _capability(gpu: Gpu) -> str:
    return ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else (gpu.target or "")


def _tera(gpu: Gpu, kind: str) -> str:
    rate = gpu.peak_dense.get(kind)
    return f"{rate / TERA:,.1f}" if rate else ""
