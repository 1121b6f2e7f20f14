"""Interface for predictions of communication between processes, which the feature for several GPUs implements
as `Exchanges`.

The base classes here are for one process: no communication, and one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from snugfit.results.footprint import Kind
from snugfit.techniques.registry import hooks

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.prediction.allocator import Replay
    from snugfit.prediction.rates import HostLaunchCosts, Rates
    from snugfit.rehearsal.trace.trace import Kernel, Trace
    from snugfit.results.prediction import RankPredicted
    from snugfit.results.step_seconds import StepSeconds
    from snugfit.techniques.setup import Setup

GPUS_PER_HOST = 8
"""Number of GPUs of one host: the usual number in hosts for sale and for rent."""


class ForeseenRank(NamedTuple):
    """Simulated step of one rank (process), with its trace and its predicted bytes."""

    rank: int
    trace: Trace
    after: Replay
    context: int
    communication: int
    doubts: list[str]

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free on the rank's GPU: CUDA context and reserved memory."""
        return self.context + self.after.reserved_peak


class StreamsRun(Protocol):
    """Protocol: a simulated step whose kernels run in several CUDA streams."""

    seconds: float
    """Seconds between the ends of two consecutive steps, after the first ones."""

    @property
    def moments(self) -> Sequence[tuple[float, float, float]]:
        """For each kernel, the seconds from the step's beginning to its launch, its start and its end."""


class DifferingRanks(Protocol):
    """Protocol: a simulated step of ranks with different work, such as pipeline stages."""

    def seconds(self, rank: int, batch_size: int, rates: Rates) -> StepSeconds:
        """Return the seconds of this rank's step."""

    def predictions(self) -> tuple[RankPredicted, ...]:
        """Return the predicted bytes of each rank."""


class GpuLink:
    """Speed of the link between GPUs. The base class is for one GPU, which has no link."""

    def seconds(self, kernel: Kernel) -> float:
        """Return the seconds of this collective kernel (such as all-reduce) while no other kernel runs."""
        return 0.0

    def share(self, operator: str, gpus: int) -> float:
        """Return the fraction, from 0 to 1, of the link's bytes per second that this kernel reaches among
        this number of GPUs.
        """
        return 1.0


class Exchanges:
    """Predicted bytes and seconds of communication between processes. The base class is for one process,
    which never communicates."""

    modules: Sequence[str] = ()
    """Python modules that a process imports before it simulates communication."""

    # ---- bytes ----

    def ranks_to_rehearse(self, job: Job, setup: Setup) -> Sequence[int]:
        """Return the ranks to simulate: one of each group of ranks with the same work."""
        return (0,)

    @staticmethod
    def group_bytes(setup: Setup, loop: str) -> int:
        """Return the NVML bytes of the process group (`torch.distributed`); they count as CUDA context."""
        return 0

    @staticmethod
    def communication_bytes(trace: Trace, gpus: int) -> int:
        """Return the NVML bytes of NCCL's buffers for the collectives in a trace."""
        return 0

    @staticmethod
    def late_frees(trace: Trace, gpu: Gpu | None, setup: Setup, rates: Rates | None) -> dict[int, int]:
        """Return the delayed frees of blocks that other streams still use (`record_stream`). Each maps the
        event of the free to the event before which the block is reusable.
        """
        return {}

    def weights_on_host(self, job: Job, setup: Setup, traces: Sequence[Trace], loop: str) -> int:
        """Return the bytes of the weights that a process builds on the host."""
        # The HF Trainer builds on the host and moves the model later.
        on_host = job.build_on == "host" or loop == "trainer"
        return on_host * weight_bytes(traces[0])

    def weights_dtype(self, setup: Setup) -> str | None:
        """Return the dtype of the model's weights in each process; None for the loaded dtype."""
        return setup.weights_dtype

    # ---- seconds ----

    @staticmethod
    def link(gpu: Gpu, rates: Rates | None = None) -> GpuLink:
        """Return the speed of the link between GPUs of this model."""
        return GpuLink()

    @staticmethod
    def run_in_streams(
        kernels: Sequence[Kernel],
        device: Sequence[float],
        launches: Sequence[float],
        syncs: Sequence[int],
        host: HostLaunchCosts,
    ) -> StreamsRun:
        """Simulate a step whose kernels run in several CUDA streams.

        `device` are each kernel's seconds on the GPU while no other kernel runs, and `launches` those of its
        launch on the host. Before the kernels with the indices `syncs`, the host waits for the compute
        stream.
        """
        raise NotImplementedError

    def differing(
        self, ranks: Sequence[ForeseenRank], job: Job, setup: Setup, gpu: Gpu | None
    ) -> DifferingRanks | None:
        """Return the simulated step of these ranks together, as for pipeline stages; None if all ranks have
        the same work.
        """
        return None

    @staticmethod
    def doubts(trace: Trace, gpu: Gpu | None, rates: Rates | None = None) -> list[str]:
        """Return warnings about the accuracy of a trace's collectives."""
        return []


def weight_bytes(trace: Trace) -> int:
    """Return the bytes of the model's weights in a trace."""
    return sum(block.nbytes for block in trace.blocks if block.kind == Kind.WEIGHTS)


def modules_of(job: Job) -> list[str]:
    """Return the names of the Python modules that worker processes import to predict this job.

    The last is ignored if transformers has no such file.
    """
    name = job.model.architecture
    return [*exchanges().modules, f"transformers.models.{name}.modeling_{name}"]


@cache
def exchanges() -> Exchanges:
    """Return the predictor of communication between processes. It is the base class if the feature for
    several GPUs is missing."""
    # Without a feature for several processes, the base class returns the figures of one process.
    return next((make() for make in hooks("exchanges")), Exchanges())
