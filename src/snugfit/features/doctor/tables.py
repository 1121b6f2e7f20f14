"""The report of `snugfit doctor` in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType

from snugfit.features.doctor.examine import Doctor, GpuStatus
from snugfit.report.text.table import table
from snugfit.report.text.terminal import words
from snugfit.units import show_bytes


def render(doctor: Doctor) -> RenderableType:
    """Return terminal tables of the packages, the extras (optional packages), and the GPUs with their
    driver.
    """
    packages = table(
        ("Package", "Version", ""),
        (
            (one.name, one.version or "-", "missing" if one.required and not one.version else "")
            for one in doctor.packages
        ),
    )
    extras = table(
        ("Extra", "Brings", "State"),
        ((one.name, ", ".join(one.techniques), one.off or "on") for one in doctor.extras),
    )
    return Group(table(("", "This machine"), _machine(doctor)), packages, extras, *_gpus(doctor))


def _machine(doctor: Doctor) -> Iterator[tuple[str, str]]:
    yield "snugfit", doctor.snugfit
    yield "Python", f"{doctor.python} ({doctor.executable})"
    yield "platform", doctor.platform
    yield "torch's CUDA", doctor.torch_cuda or "none: a build for the CPU"
    usable = "yes" if doctor.cuda_usable else f"no: {doctor.cuda_reason or 'the reason is not known'}"
    yield "CUDA can be used", f"{usable} (found without torch)"
    yield "driver", doctor.driver or "none"
    if doctor.nvml:
        yield "NVML", doctor.nvml
    if doctor.spills:
        yield "full GPU memory", doctor.spills
    if doctor.visible_devices is not None:
        yield "CUDA_VISIBLE_DEVICES", doctor.visible_devices or "(empty: hides every GPU)"


def _gpus(doctor: Doctor) -> list[RenderableType]:
    if not doctor.gpus:
        return [words("This machine has no GPU. Predictions need none. Measurements will run on the CPU.")]
    heads = ("GPU", "UUID", "CC>", "Total>", "Used>", "Driver's own>", "Processes>", "")
    return [table(heads, (_gpu(gpu) for gpu in doctor.gpus))]


def _gpu(gpu: GpuStatus) -> tuple[str, ...]:
    capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else "?"
    sizes = (gpu.total_bytes, gpu.used_bytes, gpu.reserve_bytes)
    shown = ("?" if size is None else show_bytes(size) for size in sizes)
    processes = "?" if gpu.processes is None else str(gpu.processes)
    return (gpu.name, gpu.uuid, capability, *shown, processes, gpu.fault or "")
