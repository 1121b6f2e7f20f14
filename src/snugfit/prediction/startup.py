"""What a run pays once: from the process's beginning until its steps are steady.

    once = imports + context + building the model + what the first step takes longer than a steady one

Imports, the context and the first use of a kernel are the host's: which GPU it has changes little, which
disk and processor much. So there is one set of constants (`OnceRate`), and no rates of a GPU in it.

A model is built tensor by tensor, and every weight is drawn at random: on a GPU in no time, on one core of
the host number by number. The model is the job's; that a recipe holds it in fewer bytes or hangs adapters on
it changes this little, and is left out.

CUDA loads a kernel when it is first asked for, and cuBLAS chooses one when it first meets a shape. So the
first step pays for each different kernel of the trace once: by operator and dtype, and for products by the
magnitude of their sizes too. What comes with them (handles, the allocator's segments, the optimizer's states)
is in the same constant: seven runs do not tell it apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from snugfit.job.build import instantiate
from snugfit.rehearsal.trace.trace import MATRIX_PRODUCTS
from snugfit.results.footprint import Startup

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.rehearsal.trace.trace import Kernel
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

    context: float
    """CUDA, and the device's context."""

    tensor: float
    """A tensor of the model: its module is made, its numbers are asked for."""

    host_number: float
    """A number that is drawn on the host, and moved."""

    kernel: float
    """A kernel that is used for the first time."""

    worker: float
    """A worker process that is started."""


RATE = OnceRate(
    imports=6.1,
    package=0.5,
    context=0.28,
    tensor=2e-4,
    host_number=1.5e-8,
    kernel=8e-3,
    worker=0.1,
)
"""Fitted to seven runs on the host of one H200, 2026-11-21 (`tests/data/once-h200.json`): all that is paid
once is met within 8 % in the median and 16 % at the worst, the first step within 17 % and 34 %. `package`
(bitsandbytes), `host_number` and `worker` rest on one of the runs each. The runs timed importing the model's
code and building together: `tensor` is from building BERT-large and Llama-3.1-8B without data on another
host, and what is left counts as imports. Other hosts and disks are not measured; a process that is the first
to read torch's files waits for the disk too."""


def startup(
    job: Job, setup: Setup, loaded: Loaded, *, step_seconds: float = 0.0, rate: OnceRate = RATE
) -> Startup:
    """The start of a run of this job, in the plain loop, whose steady step takes so long and whose first step
    uses these kernels."""
    size = size_of(job)
    drawn = rate.host_number * size.numbers if job.build_on == "host" else 0.0
    return Startup(
        imports_seconds=rate.imports + rate.package * packages(setup),
        context_seconds=rate.context,
        build_seconds=rate.tensor * size.tensors + drawn,
        first_step_seconds=step_seconds + rate.kernel * len(loaded) + rate.worker * setup.loader.workers,
    )


def loaded_by(kernels: Iterable[Kernel]) -> Loaded:
    """The different kernels that these load."""
    different = {id(kernel): kernel for kernel in kernels}  # repeated steps and pieces have the very same
    return frozenset(map(_kind, different.values()))


def packages(setup: Setup) -> int:
    """How many this Setup brings beside everybody's: its optimizer's, and that of its adapters."""
    wish = setup.optimizer
    roots = {call.path.partition(".")[0] for call in (wish.factory, wish.prepare) if call}
    return len(roots - OWN_PACKAGES) + (setup.adapt is not None)


class Size(NamedTuple):
    """How large a job's model is."""

    tensors: int
    """Parameters, each a tensor."""
    numbers: int
    """Numbers in them."""


def size_of(job: Job) -> Size:
    """The size of this job's model, built without data."""
    if job.model.module is not None:
        return _counted(job.model.module)
    return _built(job)


@lru_cache(maxsize=64)
def _built(job: Job) -> Size:
    import torch

    with torch.device("meta"):
        return _counted(instantiate(job, dtype="float32", attention="sdpa"))


def _counted(model: torch.nn.Module) -> Size:
    sizes = [parameter.numel() for parameter in model.parameters()]
    return Size(len(sizes), sum(sizes))


def _kind(kernel: Kernel) -> Hashable:
    shapes = kernel.shapes if kernel.operator in MATRIX_PRODUCTS else ()
    return (
        kernel.operator,
        kernel.dtype,
        tuple([tuple(map(int.bit_length, shape)) for shape in shapes]),
    )
