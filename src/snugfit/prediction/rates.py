"""Hardware rates: the speed of kernels on one GPU, and the seconds in which its host launches them.

They are achieved rates, not those of a data sheet. A large matrix product reaches two thirds to nine tenths
of the peak, a small one a tenth. Its shape determines the share (`kernel_seconds.py`). `rates.json` contains
the measured rates, by the GPU's key. An unmeasured GPU gets the H200's rates, scaled by the two data sheets.
Published rates (`achieved` in the table of GPUs) are preferred. Predictions report this.

The host has separate rates, since the seconds of a launch depend on the machine and on other programs on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Self

from snugfit.documents import JsonFields
from snugfit.errors import GpuError
from snugfit.job.gpu import Gpu, find_gpu
from snugfit.prediction.power import PowerRates

FP8 = "fp8"

PRECISIONS = {
    "torch.float32": "fp32",
    "tf32": "tf32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float8_e4m3fn": FP8,
    "torch.float8_e5m2": FP8,
}
"""Name of a kernel's precision in the GPU's data sheet, by the kernel's dtype.

Matrix products of 8-bit floats were not measured. They are assumed to reach the same share of the data
sheet's rate as bfloat16.
"""

REFERENCE = "H200-SXM"
"""Key of the measured GPU on which the rates of unmeasured GPUs are based. Both reach equal shares of their
data sheets' rates.
"""

LARGEST_FILE = 1 << 20

ALIGNMENT = 16
"""Bytes to which the rows of a matrix product must be aligned for its fastest kernels."""

FLASH_SHARES = {"flash": 0.55, "flash backward": 0.45}
"""Shares of the 16-bit peak FLOP/s that FlashAttention-2 reaches, on GPUs with the tensor cores for which it
was written. On an A100 it reaches 50 to 73 % forward and less backward (Dao 2023, arXiv 2307.08691). Hopper's
tensor cores need other instructions. On an H200 the same kernels reached a quarter.
"""

FLASH_MAJORS = (8, 12)
"""Major compute capabilities of GPUs with `FLASH_SHARES`: Ampere, Ada, and Blackwell without `wgmma`."""

OTHER_HOST = 0.7
"""Assumed ratio of launch seconds: host of an unmeasured GPU to the H200's host (a rented machine).

The value is chosen. With 1.0, predicted steps on a V100 have another order of speed than those published in
Hugging Face's guide.
"""


@dataclass(frozen=True, kw_only=True)
class MatmulRate:
    """Speed of matrix products of one precision. Multiprocessors compute the result's tiles in waves."""

    flops: float
    """FLOPs per second of the whole GPU while every multiprocessor computes a tile of 256 x 128."""

    start: float
    """Seconds of a matrix product in addition to its tiles: launch on the device, and end."""

    wave: float
    """Seconds of a wave of tiles (one per multiprocessor) in addition to its arithmetic. They fill the
    pipeline and write the result.
    """

    efficiency: tuple[float, float, float, float]
    """Fractions of `flops` that tiles of 128 x 128, 128 x 64, 64 x 64 and 64 x 32 reach."""

    unaligned: tuple[float, float, float]
    """Fractions of `flops` that matrix products reach if operand rows are aligned to only 2, 4 and 8 bytes,
    not to 16.
    """

    def share(self, alignment: int) -> float:
        """Return the fraction of `flops` that matrix products reach when rows are aligned to this power of
        two of bytes.
        """
        # Alignments of 2, 4 and 8 bytes have indices 0, 1 and 2.
        return 1.0 if alignment >= ALIGNMENT else self.unaligned[alignment.bit_length() - 2]


@dataclass(frozen=True, kw_only=True)
class HostLaunchCosts:
    """Seconds that Python and torch take on the host to launch one kernel, by sort of kernel."""

    forward: float
    """Seconds to launch a kernel of the forward pass, or of its recomputation (activation checkpointing)."""

    cast: float
    """Seconds to launch a dtype cast in the forward pass or its recomputation. Autocast launches casts
    without Python.
    """

    module: float
    """Seconds to call an `nn.Module`, in the forward pass or its recomputation."""

    backward: float
    """Seconds to launch a kernel of the backward pass, by autograd's own thread."""

    checkpoint: float
    """Seconds to begin a checkpointed region, or its recomputation, without its kernels."""

    view: float
    """Seconds that the host takes for an operator without a kernel, such as a view or `empty`, with
    autograd's work for it.
    """

    update: float
    """Seconds to launch a kernel of an optimizer or of gradient clipping."""

    python_launched: float
    """Seconds to launch a kernel of a library from Python, as bitsandbytes does. Its JSON key is `foreign`.
    """

    tensor: float
    """Seconds to launch a foreach or fused kernel, for each further tensor in its lists."""

    copy: float
    """Seconds to launch the copy of one tensor of a micro-batch to the device, without creating the
    tensor."""

    prepared: float
    """Seconds to take one tensor of a micro-batch from the loader workers' queue and launch its copy."""

    sample: float
    """Seconds to read a sample from the dataset and collate it in the training loop's own process."""

    byte: float
    """Seconds to create one byte of a batch in the training loop's own process."""

    step: float
    """Seconds of the host in each step that launch no kernel, for the training loop and the learning rate
    scheduler.
    """

    wait: float
    """Seconds of overhead of each synchronisation of the host with the device, without the wait itself."""

    intercepted: float = 1.6e-05
    """Seconds in which selective checkpointing intercepts one operator in Python. Older calibrations lack
    this field.

    On an H200's host that was shared (2026-11-23) it took 5 to 40 microseconds, 23 in the mean of eight
    readings. At the same time, launches took 1.45 times their usual seconds. On another host the shortest of
    many repetitions took 16 microseconds.
    """

    product: float = 2e-05
    """Seconds to launch a matrix product of an optimizer such as Muon.

    Most of these products copy a matrix first, and include that launch. The figure is from one step of
    BERT-large on an H200's host that was shared (2026-11-23). Older calibrations lack this field.
    """

    function: float = 7e-05
    """Seconds that the host takes for a library's autograd Function, forward or backward, or for one of
    DeepSpeed's hooks around a module.

    Kernel launches in the function are not included. Older calibrations lack this field. On two H200s' hosts
    (2026-11-23 and 24) eight steps with Liger took 80 microseconds for each, against five steps without. Four
    with bitsandbytes' 4-bit weights took 60 to 75. Two of ZeRO-3 took 65 and 90 for each of its hooks
    (`features/distributed/simulate/engine.py`).

    Alone, on a CPU, such a hook took 28 to 50 microseconds. An autograd Function of DeepSpeed's took 25 to
    75. Both ran without CUDA's streams, events and ranges.
    """

    generated: float = 1.03e-5
    """Seconds in which compiled code (`torch.compile`) launches a kernel that the compiler generated.

    This value and the next three are fitted to ten readings on the hosts of three H200s, torch 2.11. Eight
    are forward and backward passes of compiled layers, against the same passes uncompiled
    (results/h200-2026-11-23/compiled/host.json). Two are steps of BERT that is compiled whole
    (`features/compile/tests/data/compiled-h200.json`); their 344 and 1,864 launches limit the step. All ten
    are predicted within 6 %.
    """

    in_program: float = 3.1e-5
    """Seconds in which compiled code launches one of torch's own kernels, with the views and buffers for its
    call."""

    program: float = 3.08e-4
    """Seconds to call the compiled code of a forward pass, for its guards and autograd's work."""

    backward_program: float = 5.1e-5
    """Seconds in which autograd calls the compiled code of a backward pass."""

    shard_hook: float = 3.4e-4
    """Seconds of one of FSDP2's hooks around a group of sharded weights (`SHARD_HOOKS`), without the seconds
    to launch kernels.

    Two run before a group's forward and backward, two after its backward pass, and one at its all-gather. The
    figure is from two H200s, against steps of the same models without FSDP2. Three models of 13, 20 and 27
    groups with 10 to 20 weights each took 0.28 to 0.39 ms. The number of weights in a group made no
    difference (results/h200-2026-11-26/host-2.json). `snugfit calibrate --gpus N` measures it.
    """

    sharded_operand: float = 1.7e-6
    """Seconds in which the host inspects a sharded operand (DTensor) of an operator (`SHARDED_OPERANDS`).

    In updates of three models it took 1.6 to 1.9 microseconds for each operand (same file).
    """

    part_operator: float = 5.5e-5
    """Seconds of an operator of DTensor in forward and backward passes (`PART_OPERATORS`), without the
    seconds to launch kernels.

    Four steps with `tensor(2)` on two H100s took 48 to 65 microseconds for each
    (results/h100-2026-11-26/several-gpus-2.json). The other rates were measured there by `snugfit calibrate
    --gpus 2`.
    """

    weight_apart: float = 2.5e-4
    """Seconds for each weight whose gradient a pipeline computes separately from the gradients of a stage's
    inputs, without kernel launches.

    For each (`WEIGHTS_APART`), torch traverses the autograd graph in Python. The figure is approximate. A
    step with 592 of them took two H200s 438 ms, and 284 interleaved
    (results/h200-2026-11-26/several-gpus-x4.json). That is 0.19 to 0.37 ms for each: the host was as fast as
    a calibrated one, or 1.3 times slower.
    """

    def slower(self, factor: float) -> HostLaunchCosts:
        """Return the launch costs of a host that takes `factor` times as long for each launch."""
        return HostLaunchCosts(**{name: seconds * factor for name, seconds in asdict(self).items()})

    def to_json(self) -> dict[str, float]:
        """Return a JSON object of seconds; `HostLaunchCosts.from_json` reads it back."""
        return {_HOST_KEYS.get(name, name): seconds for name, seconds in asdict(self).items()}

    @classmethod
    def from_json(cls, document: Mapping[str, float]) -> Self:
        """Return the costs that `to_json` wrote."""
        fields = {key: name for name, key in _HOST_KEYS.items()}
        return cls(**{fields.get(key, key): seconds for key, seconds in document.items()})


_HOST_KEYS = {"python_launched": "foreign"}
"""JSON keys of fields whose names differ in Python. Files of rates and calibrations keep the old keys."""


@dataclass(frozen=True, kw_only=True)
class Rates(JsonFields):
    """Speeds that one GPU and its host achieve: matrix products, attention, memory, links and kernel
    launches."""

    gpu: str
    """Key of the GPU in the table of GPUs, such as `H200-SXM`."""

    multiprocessors: int
    """Number of streaming multiprocessors that compute at the same time."""

    products: Mapping[str, MatmulRate]
    """Rates of matrix products by precision: those of `fp32 tf32 bf16 fp16 fp8` that the GPU supports."""

    attention: Mapping[str, tuple[float, float]]
    """FLOPs per second and seconds of overhead of an attention kernel, by kernel (`cudnn flash efficient`,
    each also `... backward`).

    `efficient half` is efficient attention in 16 bits, which no H200 chooses: timed alone on one
    (`lab/time_kernels.py`). `... with dropout` and `... long` exist where that was measured.
    """

    bandwidth: float
    """Bandwidth of a large element-wise kernel, in bytes read and written per second."""

    start: float
    """Seconds of the smallest kernel, which are the minimum for any kernel."""

    link: float
    """Bandwidth of copies to or from page-locked host memory, in bytes per second.

    An H200's is from four steps with copies both ways (`results/h200-2026-11-23/activation-offload`). They do
    not distinguish the two directions.
    """

    patterns: Mapping[str, tuple[float, float]]
    """Bytes per second and seconds of overhead of operators that are slower than `bandwidth`, by layout or
    operator.
    """

    host: HostLaunchCosts
    """Seconds that the host takes to launch kernels, by sort of launch."""

    source: str
    """Sentence on the measurement that gave the rates."""

    power: PowerRates | None = None
    """Power of the GPU, for its clock at the power limit; None if no such GPU was measured."""

    measured: bool = True
    """False for rates that were scaled from another GPU's by the two data sheets."""

    calibrated: bool = False
    """True for rates that `snugfit calibrate` measured, with the host. Older files lack this field."""

    gpus: int = 1
    """Number of the host's GPUs that ran kernels at the same time during the calibration."""

    bus: Mapping[str, float] = field(default_factory=dict)
    """Share of the bandwidth between GPUs that large collectives reach, by NCCL kernel.

    It contains only calibrated kernels (`Exchanges.link`).
    """

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; `Rates.from_json` reads it back."""
        return {**asdict(self), "host": self.host.to_json()}


def rates_for(gpu: Gpu, gpus: int = 1) -> Rates:
    """Return the hardware rates of this GPU while `gpus` GPUs of its model compute at the same time.

    The user's own calibration of this number of GPUs comes first, then that of a single GPU. Packaged
    measurements come next, and last the H200's rates, scaled by data sheets. Raises `GpuError` when the table
    does not give its speed, or when a calibration cannot be read.
    """
    # Rates may depend on the number of GPUs that work at once.
    calibrated = _read_calibration(calibration_file(gpu, gpus)) if gpus > 1 else None
    return calibrated or _read_calibration(calibration_file(gpu)) or packaged_rates(gpu)


def packaged_rates(gpu: Gpu) -> Rates:
    """Return the packaged hardware rates of this GPU, without a calibration of the user's. Raises `GpuError`
    as `rates_for` does.
    """
    measured = _measured_rates()
    if gpu.key in measured:
        return measured[gpu.key]
    return _scale(measured[REFERENCE], find_gpu(REFERENCE), gpu)


def knows_alignment(gpu: Gpu) -> bool:
    """Return True if the cost of unaligned rows (`MatmulRate.unaligned`) was measured on this GPU.

    On other GPUs the H200's shares are assumed, even if they were calibrated.
    """
    return gpu.key in _measured_rates()


def calibration_file(gpu: Gpu, gpus: int = 1) -> Path:
    """Return the path for the rates that `snugfit calibrate` measures on this GPU, while `gpus` of them
    compute at once.

    The file is in `$SNUGFIT_RATES`, else in the user's configuration folder.
    """
    folder = os.environ.get("SNUGFIT_RATES")
    config = os.path.expanduser(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    name = f"{gpu.key}-x{gpus}.json" if gpus > 1 else f"{gpu.key}.json"
    return (Path(folder) if folder else Path(config) / "snugfit" / "rates") / name


def _read_calibration(file: Path) -> Rates | None:
    """Return the rates in this file; None if it does not exist. Raises `GpuError` for an invalid file."""
    try:
        # A larger file is not a calibration, and would be read into memory.
        if file.stat().st_size > LARGEST_FILE:
            raise ValueError("it is too large")
        return Rates.from_json(json.loads(file.read_text(encoding="utf-8"))["rates"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise GpuError(
            f"{file} is not a calibration that this snugfit can read ({type(fault).__name__}: {fault}). "
            "Run `snugfit calibrate` again, or delete it."
        ) from None


@cache
def _measured_rates() -> dict[str, Rates]:
    text = resources.files("snugfit.prediction").joinpath("rates.json").read_text(encoding="utf-8")
    return {key: Rates.from_json(entry) for key, entry in json.loads(text).items()}


def _scale(known: Rates, measured_gpu: Gpu, gpu: Gpu) -> Rates:
    """Scale the hardware rates `known`, measured on the GPU `measured_gpu`, by the data sheets to another
    GPU.
    """
    if not gpu.bandwidth or not gpu.sm_count or not measured_gpu.bandwidth or not gpu.peak_dense.get("fp32"):
        raise GpuError(
            f"{gpu.key}: its bandwidth, multiprocessors or peak rates are not in the table, so its "
            "seconds are not known. Its memory is predicted. For seconds, run snugfit calibrate on it."
        )
    products = {
        precision: replace(rate, flops=flops)
        for precision, rate in known.products.items()
        if (flops := _products_flops(rate, precision, measured_gpu, gpu)) is not None
    }
    # Attention in 32 bits is scaled by the fp32 peak, and all other attention by the 16-bit peak.
    faster = {
        False: _peak(gpu, "fp32") / _peak(measured_gpu, "fp32"),
        True: _peak(gpu, "fp16") / _peak(measured_gpu, "fp16"),
    }
    wider, busier = gpu.bandwidth / measured_gpu.bandwidth, _instructions(gpu) / _instructions(measured_gpu)
    patterns = {
        name: (_scale_pattern(rate, known.bandwidth, wider, busier), start)
        for name, (rate, start) in known.patterns.items()
    }
    return replace(
        known,
        gpu=gpu.key,
        multiprocessors=gpu.sm_count,
        products=products,
        attention={
            name: (_attention_flops(name, gpu) or flops * faster[not _in_32_bits(name)], start)
            for name, (flops, start) in known.attention.items()
        },
        bandwidth=known.bandwidth * wider,
        link=known.link * host_link_bandwidth(gpu) / host_link_bandwidth(measured_gpu),
        patterns=patterns,
        host=known.host.slower(OTHER_HOST),
        power=_scale_power(known.power, measured_gpu, gpu),
        source=f"scaled from {known.gpu} by the data sheets",
        measured=False,
    )


def _products_flops(rate: MatmulRate, precision: str, measured_gpu: Gpu, gpu: Gpu) -> float | None:
    """Return `MatmulRate.flops` of another GPU than `measured_gpu`; None if it has no such precision.

    Published rates of matrix products replace the data sheet's peak. Their fastest product bounds the fastest
    tile. Within an architecture, clocks depend on power in the same way, so their ratio applies.
    """
    own, measured = (
        (rates.achieved.get("torch_matmul_best_tflops") or {}).get(precision) for rates in (gpu, measured_gpu)
    )
    if own and measured and gpu.architecture == measured_gpu.architecture:
        return rate.flops * float(own) / float(measured)
    if own:
        return float(own) * 1e12 / max(1.0, *rate.efficiency)
    peak = gpu.peak_dense.get(precision)
    return rate.flops * peak / measured_gpu.peak_dense[precision] if peak else None


def _scale_power(power: PowerRates | None, measured_gpu: Gpu, gpu: Gpu) -> PowerRates | None:
    """Return the power of a GPU with the chip and the highest clock of the measured one; None for others."""
    is_alike = (gpu.architecture, gpu.boost_clock_hz) == (
        measured_gpu.architecture, measured_gpu.boost_clock_hz
    )  # fmt: skip
    if power is None or not is_alike or not gpu.power_watts or not measured_gpu.power_watts:
        return None
    return replace(power, limit_watts=power.limit_watts * gpu.power_watts / measured_gpu.power_watts)


def _in_32_bits(attention: str) -> bool:
    return attention.startswith("efficient") and "half" not in attention


def _attention_flops(name: str, gpu: Gpu) -> float | None:
    """Return the FLOP/s of an attention kernel on this GPU by its published share (`FLASH_SHARES`); None if
    none applies."""
    share, capability = FLASH_SHARES.get(name), gpu.compute_capability
    return share * _peak(gpu, "fp16") if share and capability and capability[0] in FLASH_MAJORS else None


def _peak(gpu: Gpu, precision: str) -> float:
    return float(gpu.peak_dense.get(precision) or gpu.peak_dense["fp32"])


def link_of(gpu: Gpu | None) -> float | None:
    """Return the bytes per second between this GPU and its host, in one direction; None without rates."""
    try:
        return None if gpu is None else rates_for(gpu).link
    except GpuError:
        return None


def host_link_bandwidth(gpu: Gpu) -> float:
    """Return the bytes per second to the host by the GPU's data sheet; those of PCIe gen3 x16 if unknown."""
    return float((gpu.host_link or {}).get("bytes_per_second") or 15_750_000_000)


def _scale_pattern(rate: float, bandwidth: float, wider: float, busier: float) -> float:
    """Scale a kernel's measured bytes per second to another GPU.

    On the measured GPU, the kernel reached `rate` and the bandwidth is `bandwidth`. The other GPU has `wider`
    times this bandwidth and issues `busier` times as many instructions. The time that memory traffic does not
    explain is assigned to instructions. On H100s, an optimizer kernel of 26 bytes a weight reaches 2.9 TB/s,
    and this formula gives 2.89 (`results/h100-2026-11-27/update-kernels.json`). Recorded steps of four
    models: `dev/log.md`.
    """
    # Only the bytes limit a kernel that reaches the bandwidth.
    if rate >= bandwidth:
        return rate * wider
    by_bytes, by_instructions = 1 / bandwidth, 1 / rate - 1 / bandwidth
    return 1 / (by_bytes / wider + by_instructions / busier)


def _instructions(gpu: Gpu) -> float:
    """Return a number proportional to the instructions that a GPU issues per second."""
    return float(gpu.sm_count or 1) * float(gpu.boost_clock_hz or 1e9)
