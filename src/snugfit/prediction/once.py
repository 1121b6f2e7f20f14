"""What a run pays once: from the process's beginning until its steps are steady.

    once = imports + context + building the model + what the first step takes longer than a steady one

Imports, the context and the first use of a kernel are the host's: which GPU it has changes little, which
disk and processor much. So there is one set of constants (`OnceRate`), and no rates of a GPU in it.

A model is built tensor by tensor: its modules are made, then every weight is drawn at random, on the device
or on one core of the host, which takes long. The model is the job's; that a recipe holds it in fewer bytes or
hangs adapters on it changes this little, and is left out.

CUDA loads a kernel when it is first asked for, and cuBLAS chooses one when it first meets a shape. So the
first step pays for each different kernel of the tape once: by operator and dtype, and for products by the
magnitude of their sizes too. What is small and comes with them (handles, workspaces, the allocator's
segments) is in the same constant.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from snugfit.prediction.kernel_seconds import PRODUCTS
from snugfit.step.footprint import Startup

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.rehearsal.tape import Kernel
    from snugfit.techniques.setup import Setup

OWN_PACKAGES = frozenset({"torch", "transformers", "snugfit"})
"""Imported by every run."""

Loaded = frozenset[Hashable]
"""Different kernels, each loaded once."""


@dataclass(frozen=True, kw_only=True)
class OnceRate:
    """Seconds that happen once, on one host."""

    imports: float
    """Python, torch, transformers and the model's code, from the process's beginning."""

    package: float
    """A further package that the recipe needs."""

    framework: float
    """What the accelerate loop and the Trainer import and set up."""

    context: float
    """CUDA, and the device's context."""

    build: float
    """A model, beside its tensors, and its optimizer."""

    tensor: float
    """A tensor of the model: its module is made, its numbers are asked for."""

    device_element: float
    """A number drawn on the device."""

    host_element: float
    """A number drawn on the host, and moved."""

    first: float
    """The first step, beside what it loads."""

    kernel: float
    """A kernel that is loaded."""

    worker: float
    """A worker process that is started."""


RATE = OnceRate(
    imports=6.0,
    package=1.5,
    framework=2.0,
    context=0.3,
    build=0.1,
    tensor=1e-4,
    device_element=1e-12,
    host_element=1e-8,
    first=0.3,
    kernel=2e-3,
    worker=0.05,
)
"""PLACEHOLDER: guessed, not measured."""


def startup(
    job: Job,
    setup: Setup,
    loaded: Loaded,
    *,
    step_seconds: float = 0.0,
    loop: str = "plain",
    rate: OnceRate = RATE,
) -> Startup:
    """The start of a run of this job whose steady step takes so long, and whose first one loads these
    kernels."""
    size = size_of(job)
    host = job.build_on == "host" or loop == "trainer"
    framework = 0.0 if loop == "plain" else rate.framework
    return Startup(
        imports_seconds=rate.imports + framework + rate.package * packages(setup),
        context_seconds=rate.context,
        build_seconds=rate.build
        + rate.tensor * size.tensors
        + (rate.host_element if host else rate.device_element) * size.elements,
        first_step_seconds=step_seconds
        + rate.first
        + rate.kernel * len(loaded)
        + rate.worker * setup.loader.workers,
    )


def loaded_by(kernels: Iterable[Kernel]) -> Loaded:
    """The different kernels that these load."""
    return frozenset(map(_kind, kernels))


def packages(setup: Setup) -> int:
    """How many this Setup brings beside everybody's: its optimizer's, and that of its adapters."""
    wish = setup.optimizer
    roots = {call.path.partition(".")[0] for call in (wish.factory, wish.prepare) if call}
    return len(roots - OWN_PACKAGES) + (setup.adapt is not None)


class Size(NamedTuple):
    """How large a job's model is."""

    tensors: int
    elements: int


def size_of(job: Job) -> Size:
    """The size of this job's model, built without data."""
    if job.model.module is not None:
        return _counted(job.model.module)
    return _built(job)


@lru_cache(maxsize=64)
def _built(job: Job) -> Size:
    import torch

    with torch.device("meta"):
        return _counted(job.model.build(job, dtype="float32", attention="sdpa"))


def _counted(model: torch.nn.Module) -> Size:
    sizes = [parameter.numel() for parameter in model.parameters()]
    return Size(len(sizes), sum(sizes))


def _kind(kernel: Kernel) -> Hashable:
    shapes = kernel.shapes if kernel.operator in PRODUCTS else ()
    return (
        kernel.operator,
        kernel.dtype,
        tuple(tuple(length.bit_length() for length in shape) for shape in shapes),
    )
