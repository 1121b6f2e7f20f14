"""The table of GPUs: properties of each GPU model with their sources, and the lookup by name.

`gpus.json` contains the facts. It distinguishes three sizes of memory, because they are often mixed up. The
total of nvidia-smi is `nvml_total_bytes`, and the driver's reserve `driver_reserved_bytes`. The rest for
processes is torch's total, `memory_bytes`.

Names are matched loosely. Vendor words, case, spaces and punctuation are ignored; `a100-80gb` means the model
A100 with 80 GB.

A name that matches no entry is refused, with the most similar names. No figure is guessed: an unknown one is
None, and `doubts` lists each estimate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from snugfit.documents import JsonFields
from snugfit.errors import GpuError, nearest

_VENDOR_WORDS = frozenset(
    {"nvidia", "geforce", "tesla", "amd", "instinct", "intel", "r", "tm", "apple", "gpu"}
)
COMMON = (
    "RTX4090", "H100-SXM", "A100-SXM-80", "V100-SXM2-16", "T4", "L40S", "A100-SXM-40", "H200-SXM", "A10",
)  # fmt: skip
"""Keys of the GPUs that are tried for an ambiguous GPU name or a memory size. The most common in training
machines come first.
"""

_MEMORY = re.compile(r"(?<![a-z0-9])(\d{1,3})\s*(?:g|gb|gib)(?![a-z0-9])")
_FORM = re.compile(r"(?<![a-z])(sxm|pcie|nvl)\d?(?![a-z0-9])")
# Training machines mostly have this form; `a100-80gb-pcie` finds the other.
PREFERRED_FORM = "SXM"


@dataclass(frozen=True, kw_only=True)
class Gpu(JsonFields):
    """One GPU model with the figures of its data sheet; a figure is None if it is unknown."""

    key: str
    """Short name, unique in the table: `H200-SXM`."""

    names: tuple[str, ...]
    """Names of the GPU that the driver reports."""

    vendor: str
    """`NVIDIA`, `AMD`, `Intel` or `Apple`."""

    model: str
    """Marketing name without vendor, form factor and memory: `A100`."""

    form: str | None
    """`SXM`, `PCIe` or `NVL`, for models that come in several."""

    marketed_gb: int | None
    """Memory in GB according to the product's name or data sheet."""

    architecture: str
    """Architecture of the GPU, such as `Hopper` or `CDNA3`."""

    chip: str | None
    """Name of the GPU's die, such as `GH100`."""

    platform: str
    """torch's name for the platform: `cuda`, `rocm`, `xpu` or `mps`."""

    compute_capability: tuple[int, int] | None
    """CUDA compute capability, such as (9, 0) for Hopper; None on other platforms."""

    target: str | None
    """Name of the compilation target on other platforms than CUDA, such as `gfx942`."""

    release_year: int | None
    """Year in which the GPU was released."""

    sm_count: int | None
    """Number of streaming multiprocessors, compute units or cores, as the vendor counts them."""

    nvml_total_bytes: int | None
    """Total memory in bytes according to nvidia-smi, with a current driver."""

    memory_bytes: int | None
    """Bytes of GPU memory that processes can use, as torch reports."""

    driver_reserved_bytes: int | None
    """Bytes of GPU memory that the driver reserves for itself."""

    memory_type: str | None
    """Type of the GPU's memory, such as `HBM3e` or `GDDR6`."""

    bandwidth: int | None
    """Memory bandwidth in bytes per second, by data sheet."""

    l2_cache_bytes: int | None
    """Bytes of the second-level cache."""

    boost_clock_hz: int | None
    """Boost clock of the data sheet, in Hz."""

    peak_dense: Mapping[str, int] = field(default_factory=dict)
    """Peak operations per second without sparsity, by `fp32 tf32 fp16 fp16_accumulate_fp16 bf16 fp8 int8`."""

    bf16_native: bool
    """True if hardware computes bfloat16; False if it is emulated."""

    tf32: bool
    """True if float32 matrix products can run as TensorFloat-32."""

    fp8: bool
    """True if hardware computes 8-bit floating point."""

    tensor_cores: bool
    """True if the GPU has matrix units for float16."""

    host_link: Mapping[str, Any] | None
    """Connection to the host: `type`, `bytes_per_second` in one direction."""

    gpu_link: Mapping[str, Any] | None
    """Connection to other GPUs: `type`, `bytes_per_second` in one direction."""

    power_watts: float | None
    """Thermal design power, in watts."""

    context_bytes: int | None
    """GPU bytes of a process with one tiny tensor and a current torch: those of the CUDA context. None if not
    measured.
    """

    libraries_bytes: int | None
    """Bytes that a first forward pass adds to the context for kernels and libraries; None if not measured."""

    context_source: str | None
    """Device and software of the measurement of `context_bytes` and `libraries_bytes`."""

    backward_bytes: int | None = None
    """Bytes that a first backward pass adds to the context, since it runs in a separate thread; None if not
    measured.
    """

    cudnn_bytes: int | None = None
    """Bytes that cuDNN (its attention, convolutions) adds to the context; None if not measured."""

    achieved: Mapping[str, Any] = field(default_factory=dict)
    """Published speeds that others measured on this GPU, each with its source."""

    sources: Mapping[str, str] = field(default_factory=dict)
    """Sources of the figures of this GPU, by subject."""

    doubts: tuple[str, ...] = ()
    """Warnings about figures that are estimated, unverified or variable."""

    notes: tuple[str, ...] = ()
    """Further sentences about this GPU for the user."""

    @property
    def name(self) -> str:
        """The first name that the driver reports for the GPU."""
        return self.names[0]


@cache
def all_gpus() -> tuple[Gpu, ...]:
    """Return every GPU of the table, oldest architecture first."""
    content = resources.files("snugfit.job").joinpath("gpus.json").read_text(encoding="utf-8")
    return tuple(Gpu.from_json(entry) for entry in json.loads(content)["gpus"])


def find_gpu(text: Gpu | str, *, exact: bool = False) -> Gpu:
    """Return the GPU called `text`; a `Gpu` is returned unchanged.

    If several match, the most common one is returned, unless an `exact` name is required. Raises `GpuError`
    with the choices for no match, or for several without a common one.
    """
    if isinstance(text, Gpu):
        return text
    candidates = find_gpus(text)
    common = sorted((gpu for gpu in candidates if gpu.key in COMMON), key=lambda gpu: COMMON.index(gpu.key))
    if len(candidates) == 1 or (common and not exact):
        # If entries differ in memory (`a100`, `v100`), the common card is returned, which `choice_of`
        # describes.
        return (common or candidates)[0]
    raise GpuError(f"{text!r} can be {_list(candidates)}. Give the full name, or add the memory.")


def choice_of(text: str) -> str:
    """Return a sentence on the GPU that was chosen for an ambiguous name such as `h100`; empty for a clear
    name.
    """
    candidates = find_gpus(text)
    if len(candidates) == 1:
        return ""
    chosen = find_gpu(text)
    rest = ", ".join(gpu.key for gpu in candidates if gpu is not chosen)
    return f"{text} is taken as {chosen.key} ({chosen.name}). The table also has {rest}."


def common_card(memory_bytes: int) -> Gpu | None:
    """Return the most common GPU with this nominal memory, given in bytes; None if there is none."""
    # The amount may be meant in GiB or in GB.
    sizes = {memory_bytes / (1 << 30), memory_bytes / 10**9}
    cards = {gpu.key: gpu for gpu in all_gpus()}
    return next((cards[key] for key in COMMON if cards[key].marketed_gb in sizes), None)


def find_gpus(text: str) -> list[Gpu]:
    """Return the GPU models that `text` can mean, such as three for 'h100'. Raises `GpuError` for none."""
    if not isinstance(text, str):
        raise GpuError(f"The name of a GPU must be text, such as 'h200', not {text!r}.")
    # A complete name has priority over a loose match, which may match several entries.
    exact = [gpu for gpu in all_gpus() if _normalize(text) in _exact_names(gpu)]
    if candidates := exact or _prefer_sxm(_matches(text)):
        return candidates
    if re.fullmatch(r"(cuda|gpu)(:\d+)?|local|here|auto", text.strip().lower()):
        raise GpuError(
            f"{text!r} is a device of this machine, and a prediction is for a model of GPU. snugfit doctor "
            "shows the name of this machine's GPU, such as h200 or 'rtx 4090'."
        )
    if amount := _MEMORY.fullmatch(text.strip().lower()):
        raise GpuError(
            f"{text!r} is an amount of memory, not the name of a GPU. Leave --gpu out and write --memory "
            f"{amount[1]}GiB (in Python memory_bytes), or name a GPU. snugfit gpus lists all."
        )
    similar = _nearest(text) or " Names are written like h200, a100-80gb or 'rtx 4090'."
    raise GpuError(
        f"No GPU {text!r} in the table.{similar} snugfit gpus lists all. For another card give its size in "
        "place of its name: --memory 8GiB (in Python memory_bytes)."
    )


def _matches(text: str) -> list[Gpu]:
    """Return the GPUs of the table whose name, and memory and form factor if given, match the text."""
    lowered = text.lower().replace("_", " ")
    memory, form = _MEMORY.search(lowered), _FORM.search(lowered)
    # Memory and form are taken out, so that the rest is the model's name alone.
    model = _normalize(_FORM.sub(" ", _MEMORY.sub(" ", lowered)))
    return [
        gpu
        for gpu in all_gpus()
        if model in _model_names(gpu)
        and (memory is None or _has_memory(gpu, int(memory[1])))
        and (form is None or form[1].upper() == (gpu.form or "").upper())
    ]


def _prefer_sxm(gpus: list[Gpu]) -> list[Gpu]:
    """Return only the SXM modules if all these GPUs are variants of one model; otherwise all of them."""
    if len({(gpu.model, gpu.marketed_gb) for gpu in gpus}) == 1:
        return [gpu for gpu in gpus if gpu.form == PREFERRED_FORM] or gpus
    return gpus


def _normalize(text: str) -> str:
    """Return a GPU's name in lower-case letters and digits, without vendor words: `rtx4090` for `NVIDIA
    GeForce RTX 4090`.
    """
    words = re.findall(r"[a-z0-9]+", text.lower())
    return "".join(word for word in words if word not in _VENDOR_WORDS)


def _exact_names(gpu: Gpu) -> set[str]:
    return {_normalize(name) for name in (gpu.key, *gpu.names)}


def _model_names(gpu: Gpu) -> set[str]:
    """Return a GPU's model name with and without its family: `4090`, `a6000`."""
    model = _normalize(gpu.model)
    # People omit `rtx`; a professional card keeps its letter (`a6000`).
    return {model, model.removeprefix("rtx")} if re.fullmatch(r"rtx(a?\d{4}).*", model) else {model}


def _has_memory(gpu: Gpu, gigabytes: int) -> bool:
    """Return True if a GPU has this nominal memory in GB, or if its total in nvidia-smi is within 1 GiB of
    it.
    """
    # Drivers before R510 hid their reserve, so a V100 of 16,384 MiB read 16,160.
    shown = (gpu.nvml_total_bytes or 0) / (1 << 30)
    return gigabytes == gpu.marketed_gb or abs(gigabytes - shown) <= 1


def _nearest(text: str) -> str:
    names: dict[str, Gpu] = {}
    for gpu in all_gpus():
        for name in (*_exact_names(gpu), *_model_names(gpu)):
            names.setdefault(name, gpu)
    given = _normalize(text)
    # Names that contain the given one are nearer than names with other digits.
    containing = sorted((name for name in names if given and given in name), key=len)
    similar = (*containing, *nearest(given, names, cutoff=0.5))
    keys = list(dict.fromkeys(names[name].key for name in similar))[:3]
    near = [gpu for gpu in all_gpus() if gpu.key in keys]
    return f" Similar: {_list(near)}." if near else ""


def _list(gpus: Iterable[Gpu]) -> str:
    return ", ".join(f"{gpu.key} ({gpu.name}, {gpu.marketed_gb or '?'} GB)" for gpu in gpus)


def capability_of(device: Any) -> tuple[int, int] | None:
    """Return the compute capability of a GPU of this machine, a `torch.device`; None for the CPU."""
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
