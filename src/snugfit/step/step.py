"""The Step: an object with the real model class, optimizer and loop code, which runs training steps on any
device.

A Step is simulated (on tensors with shapes and no data), measured on a device, or trained. The class is the
same each time: only its device and its observer differ. Each loop has a name:

- `plain`: the loop every figure of ours refers to (`plain_loop.py`);
- `accelerate`: the guide's hand-written loop on the installed accelerate (`accelerate_loop.py`);
- `trainer`: the installed `transformers.Trainer`, its own step and none of its logic copied
  (`trainer_loop.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from snugfit.results.footprint import Kind

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

PHASES = ("build", "load", "forward", "backward", "clip", "update")
SKIPPED = "skipped"
"""Phase of a micro-batch whose forward and backward passes a short simulation skips."""

LOOPS = ("plain", "accelerate", "trainer")
"""Names of the training loops. `open_step.py` maps each to its subclass of `Step`."""


class Observer:
    """Base class of objects that are notified while a step runs, such as recorders and timers. The methods of
    this class do nothing.
    """

    def step_begins(self, index: int) -> None:
        """Handle the beginning of optimizer step `index` (from 0)."""

    def step_ends(self, index: int) -> None:
        """Handle the end of optimizer step `index`, after which its gradients are freed."""

    def phase(self, name: str) -> None:
        """Handle the start of a phase of the step, such as `forward` (one of `PHASES` or a feature's). All
        later work belongs to it.
        """

    def claim(self, tensor: torch.Tensor, kind: str, module: str = "") -> None:
        """Label this tensor's bytes (weight, gradient, optimizer state, ...), with their module if one is
        given.
        """

    def state(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set the value of a tensor that a simulation cannot compute, from a CPU tensor of its shape."""

    def build_ends(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Handle the end of building: model and optimizer exist, and the first step has not begun."""


class Outputs(NamedTuple):
    """Outputs of an evaluation for one batch, with which two runs of a model are compared."""

    values: torch.Tensor
    """Logits of the batch, or the model's first output if it has no logits."""
    ids: torch.Tensor
    """Index of the largest logit in each row, or the generated tokens."""


class StepPasses(Protocol):
    """Forward and backward passes of pipeline parallelism, in which each process has some of the layers."""

    def accumulate(
        self,
        loop: Any,
        built: Any,
        pieces: Sequence[Mapping[str, Any]],
        weights: Sequence[float | None],
    ) -> torch.Tensor | None:
        """Compute the gradients of these host micro-batches into the parameters, each loss times its weight.
        Return the sum of the losses if this process computes them and losses are kept.
        """

    def clip(self, weights: Iterable[torch.nn.Parameter], largest: float) -> None:
        """Scale the gradients of all processes down so that their common norm is at most `largest`."""

    def norm_of_all(self, trained: Iterable[torch.nn.Parameter]) -> torch.Tensor:
        """Return the L2 norm of the gradients of all processes; `trained` are the weights of this process."""

    def in_turn(self) -> Any:
        """Return a module that runs the layers of all pipeline stages in turn, for forward passes without
        gradients.
        """

    def tell_losses(self, losses: Sequence[torch.Tensor], steps: int) -> list[float]:
        """Send the losses of this many steps to all processes, and return these losses as numbers."""


class StepEngine(Protocol):
    """Another library's code, such as DeepSpeed's engine, that runs the optimizer steps in place of the
    training loop.
    """

    @property
    def training_step(self) -> type[Any]:
        """Return the `TrainingStep` class whose steps over real data the engine runs."""

    def step_class(self, loop: str, ranks: int) -> type[Step]:
        """Return the class that runs a training loop's steps with this engine. Raises `UsageError` for a loop
        that does not support it.
        """

    def context(self, device: torch.device, tell: Callable[[str], None]) -> AbstractContextManager[Any]:
        """Return the context around a training run with this engine; `tell` is called with messages for the
        user.
        """

    def start(
        self, job: Job, setup: Setup, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Any, torch.optim.Optimizer]:
        """Return the module that steps call and the engine's optimizer. `job` has this process's part of the
        global batch, and `model` is on the host.
        """

    def group_bytes(self, loop: str) -> int:
        """Return the GPU bytes (as NVML counts) of the process group that the engine creates in this loop."""

    def stop(self, runs: Any) -> None:
        """Remove the engine's hooks from the model; no step follows."""


class Step(ABC):
    """Base class that builds a job's model and runs its optimizer steps on a device. A subclass exists for
    each training loop.
    """

    updates_by_others = False
    """True if a user's code clips and updates, so that a `StepRunner` runs only the passes."""

    keep_gradients = False
    """True to zero gradients in place after a step and not free them (the default of torch before 2.0)."""

    skips_micro_batches = False
    """True to skip the passes of each step's micro-batches from the third to the last but one, in the
    Trainer's loop.

    A simulation inserts the passes of the second micro-batch in their place.
    """

    trainer_class: type[Any] | None = None
    """Subclass of `transformers.Trainer` that the Trainer's loop runs; None for `Trainer` itself."""

    trainer_arguments: Mapping[str, Any] = {}
    """`TrainingArguments` that the Trainer's loop gets in addition to those of the Setup."""

    rank: int | None = 0
    """Number of the rank (process) that a simulation runs; None for the first rank with the largest shard."""

    always_mask = False
    """True to pass an attention mask also for batches without padding (the default of transformers before
    5.0).
    """

    def __init__(self, job: Job, setup: Setup, device: torch.device, *, keep_losses: bool = False) -> None:
        self.job, self.setup, self.device, self.keep_losses = job, setup, device, keep_losses
        self.pieces = setup.micro_batches
        """Number of micro-batches in a step."""
        self.model: torch.nn.Module | None = None
        self.results: dict[str, Any] = {}
        """Further results of a measured run by name, as JSON values. An example is the size of an exported
        file.
        """
        self.optimizer: torch.optim.Optimizer | None = None

    def kind_of(self, operator: str, module: str, dtype: str) -> str:
        """Return the category (weight, activation, ...) of a memory block that no other rule labels, in a
        phase that a feature adds.
        """
        return Kind.TEMPORARIES

    @abstractmethod
    def run(self, steps: int, observer: Observer) -> list[float]:
        """Build model and optimizer, run `steps` optimizer steps, and return each step's loss (mean over the
        global batch).

        The list is empty unless losses are kept, which takes a few bytes on the device. Afterwards `model`
        and `optimizer` are the trained objects.
        """
