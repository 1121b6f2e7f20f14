"""Predict the start-up of a training run: seconds from process start until its steps have their final speed.

start-up = imports + context + building the model + extra seconds of the first step

Imports, the context and the first use of a kernel depend on the host, above all on its disk and processor.
They depend little on the GPU. So one set of constants (`StartupRates`) serves all GPUs.

A model is constructed tensor by tensor, and every weight is initialised at random. Initialisation takes
almost no time on a GPU. On one core of the host, its seconds are proportional to the number of elements. The
effect of quantized weights and adapters is small and ignored.

CUDA loads a kernel at its first use, and cuBLAS chooses one for each new shape. So the first step loads each
different kernel of the trace. Kernels differ by operator and dtype, and matrix products by the magnitude of
their sizes too. The constant per kernel includes library handles, the allocator's segments and the
optimizer's states, since seven runs do not separate them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from snugfit.job.build import instantiate
from snugfit.rehearsal.trace.trace import MATRIX_PRODUCTS, TRITON
from snugfit.results.footprint import Startup
from snugfit.techniques.registry import hooks
from snugfit.techniques.wish import used_wishes

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.rehearsal.trace.trace import Kernel
    from snugfit.techniques.setup import Setup

OWN_PACKAGES = frozenset({"torch", "transformers", "snugfit"})
"""Packages that every run imports, so that importing them takes no additional time."""

KernelSet = frozenset[Hashable]
"""Type of a set of keys of different kernels. CUDA loads each kernel at its first use."""


@dataclass(frozen=True, kw_only=True)
class StartupRates:
    """Seconds of the parts of a run's start-up on one host, such as imports."""

    imports: float
    """Seconds to start Python and import torch, transformers and the model's code."""

    package: float
    """Seconds to import a further package that the recipe needs."""

    context: float
    """Seconds to initialise CUDA and create the device's context."""

    tensor: float
    """Seconds to create one parameter of the model, with its share of its module."""

    host_number: float
    """Seconds to initialise one element of a parameter on the host and move it to the device."""

    kernel: float
    """Seconds to load a kernel's code at its first use."""

    worker: float
    """Seconds to start a loader's worker process."""

    triton: float = 0.6
    """Seconds to compile a library's Triton kernel. Later processes read it from the disk."""

    pinned_byte: float = 3.3e-10
    """Seconds to page-lock one byte of host memory for offloaded activations."""


STARTUP_RATES = StartupRates(
    imports=6.1,
    package=0.5,
    context=0.28,
    tensor=2e-4,
    host_number=1.5e-8,
    kernel=8e-3,
    worker=0.1,
)
"""Seconds of the parts of the start-up, fitted to seven runs on the host of one H200, 2026-11-21
(`tests/data/once-h200.json`).

The error of the predicted start-up is 8 % in the median and 16 % at most. For the first step it is 17 % and
34 %. `package` (bitsandbytes), `host_number` and `worker` come from a single run each. The runs timed the
import of the model's code and its construction together. So `tensor` comes from the construction of
BERT-large and Llama-3.1-8B without data on another host. The rest counts as imports. Other hosts and disks
were not measured. The first process that reads torch's files waits for the disk too.

`triton`: three runs with Liger's kernels on the host of one H200. With six uncached kernels, Llama-3.2-1B's
first step took 3.4 s longer than without. With eight, Qwen3-0.6B's took 5.8 s in all. With six kernels cached
on the disk it took 0.5 s longer (results/h200-2026-11-23/liger).

`pinned_byte`: five runs with offloaded activations on the host of one H200 (2026-11-23). Without this term,
first steps took 0.36 to 0.86 s longer than predicted for each page-locked GiB. The two largest took 0.36 s.
Page-locking 4 GiB alone took 0.35 s per GiB (results/h200-2026-11-23/activation-offload).
"""


def startup(
    job: Job,
    setup: Setup,
    kernels: KernelSet,
    *,
    step_seconds: float = 0.0,
    pinned_bytes: int = 0,
    in_programs: int = 0,
    rates: StartupRates = STARTUP_RATES,
) -> Startup:
    """Return the predicted start-up seconds of a training run of this job in the plain loop.

    `kernels` are the different ones of its step. `step_seconds` is the time of a later step, and
    `pinned_bytes` its page-locked host memory. `in_programs` is the number of kernels that its compiled
    layers launch.
    """
    size = model_size(job)
    # On a GPU, the initialisation of weights takes no time per element.
    drawing = rates.host_number * size.numbers if job.build_on == "host" else 0.0
    return Startup(
        imports_seconds=rates.imports + rates.package * count_packages(setup),
        context_seconds=rates.context,
        build_seconds=rates.tensor * size.tensors + drawing,
        first_step_seconds=step_seconds
        + rates.kernel * len(kernels)
        + rates.triton * _count_of_triton(kernels)
        + rates.worker * setup.loader.workers
        + rates.pinned_byte * pinned_bytes
        + sum(further(setup, kernels, in_programs) for further in hooks("first_step_seconds")),
    )


def count_in_programs(kernels: Iterable[Kernel], setup: Setup) -> int:
    """Return the number of kernels that compiled layers (`torch.compile`) launch in one micro-batch."""
    # Each micro-batch launches the same programs again.
    return setup.per_piece(sum(kernel.compiled for kernel in kernels))


def operator_of(kernel: Hashable) -> str:
    """Return the operator's name from a kernel's key in a `KernelSet`; empty for other keys."""
    return str(kernel[0]) if isinstance(kernel, tuple) else ""


def distinct_kernels(kernels: Iterable[Kernel]) -> KernelSet:
    """Return the keys of the different kernels among these, each of which CUDA has to load."""
    objects = {id(kernel): kernel for kernel in kernels}  # repeated steps and micro-batches share objects
    return frozenset(map(_load_key, objects.values()))


def _count_of_triton(kernels: KernelSet) -> int:
    return sum(operator_of(kernel).startswith(TRITON) for kernel in kernels)


def count_packages(setup: Setup) -> int:
    """Return the number of packages beyond `OWN_PACKAGES` that this Setup imports: its optimizer's and its
    features'.
    """
    wish = setup.optimizer
    roots = {call.path.partition(".")[0] for call in (wish.factory, wish.prepare) if call}
    roots.update(*(used.packages for used in used_wishes(setup)))
    return len(roots - OWN_PACKAGES)


class ModelSize(NamedTuple):
    """Size of a job's model: numbers of parameters and of their elements."""

    tensors: int
    """Number of the model's parameters, each a tensor."""
    numbers: int
    """Number of elements of all parameters together."""


def model_size(job: Job) -> ModelSize:
    """Return the size of this job's model, which is built on the meta device."""
    if job.model.module is not None:
        return _size_of(job.model.module)
    return _size_on_meta(job)


@lru_cache(maxsize=64)
def _size_on_meta(job: Job) -> ModelSize:
    import torch

    with torch.device("meta"):
        return _size_of(instantiate(job, dtype="float32", attention="sdpa"))


def _size_of(model: torch.nn.Module) -> ModelSize:
    sizes = [parameter.numel() for parameter in model.parameters()]
    return ModelSize(len(sizes), sum(sizes))


def _load_key(kernel: Kernel) -> Hashable:
    """Return a key that is equal for kernels that CUDA loads from one library module."""
    shapes = kernel.shapes if kernel.operator in MATRIX_PRODUCTS else ()
    return (
        kernel.operator,
        kernel.dtype,
        # cuBLAS chooses a kernel by the magnitude of the sizes.
        tuple([tuple(map(int.bit_length, shape)) for shape in shapes]),
    )
