"""The plain loop: the reference loop to which every figure of snugfit refers.

An optimizer step runs these operations for each micro-batch. Place it on the device. Under autocast (if set)
run the model and take its loss, scaled to the global batch. Run backward. Then unscale and clip (if the job
clips), step the optimizer, and drop the gradients (`set_to_none=True`). fp16 goes through a GradScaler.

The loss is scaled by the micro-batch's share of the counted items: samples, or tokens with a label. The host
counts them before the batch is placed, so micro-batches equal the whole batch also with uneven padding. The
loss of an undivided batch is not scaled, which saves a kernel.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.job.batch import label_items
from snugfit.step.applier import (
    after_update,
    distribute_model,
    evaluated_model,
    forward_context,
    make_scaler,
    pass_context,
    prepare_pieces,
    run_context,
    step_passes,
    step_runner,
)
from snugfit.step.batches import micro_batches, place
from snugfit.step.build import build_model, build_optimizer
from snugfit.step.clipping import clip
from snugfit.step.loss import loss_of
from snugfit.step.step import Outputs, Step
from snugfit.techniques.several_gpus import ranks_of

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.step.step import Observer, StepPasses
    from snugfit.step.step_runner import StepRunner
    from snugfit.techniques.setup import Setup


@dataclass(frozen=True)
class Built:
    """The objects that a training loop has built: model, optimizer, gradient scaler and batches."""

    model: torch.nn.Module
    """Model on the device, with the changes of the Setup (training settings)."""

    runs: torch.nn.Module
    """Module that the loop calls: the model, or its wrapper (DDP) if several processes train it."""

    optimizer: torch.optim.Optimizer
    """Optimizer of the trainable parameters."""

    scaler: torch.amp.GradScaler | None
    """Gradient scaler of fp16 training; None for other dtypes."""

    batches: Iterator[list[dict[str, Any]]]
    """Iterator over the steps' micro-batches on the host, a list for each step."""

    observer: Observer
    """Observer that is notified of each phase and step."""


class OptimizerLoop(Step):
    """The plain loop without its forward and backward passes: it builds the model, then clips and updates in
    each step. Subclasses compute the gradients, so that an optimizer update can be simulated alone.
    """

    passes: StepPasses | None = None
    """Forward and backward passes of this process's pipeline stages; None if the process has all layers."""

    runner: StepRunner | None = None
    """Object that runs the steps in place of the loop, such as a replay of CUDA graphs; None if the loop runs
    them itself."""

    def start_runner(self) -> None:
        """Let the Setup's `StepRunner`, such as a replay of CUDA graphs, run the following steps, if it has
        one.
        """
        self.runner = step_runner(self)

    def start_passes(self, model: torch.nn.Module, runs: torch.nn.Module) -> None:
        """Set `passes`, which runs forward and backward if this process has only some layers of the model.
        `runs` is the module to call.
        """
        self.passes = step_passes(self.setup, model, runs, self.forward_context)

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the forward pass under this Setup, such as autocast."""
        return forward_context(self.setup, self.device)

    @abstractmethod
    def _accumulate(self, built: Built) -> torch.Tensor | None:
        """Compute one step's gradients into the parameters, and return its loss if losses are kept."""

    def _train(self, steps: int, observer: Observer) -> list[float]:
        observer.phase("build")
        model = build_model(self.job, self.setup, self.device)
        runs = distribute_model(self.setup, model)
        optimizer = build_optimizer(self.job, self.setup, model)
        scaler = make_scaler(self.setup, self.device)
        observer.build_ends(model, optimizer)
        losses: list[torch.Tensor] = []
        with contextlib.closing(self._batches()) as batches:
            built = Built(model, runs, optimizer, scaler, batches, observer)
            self.start_passes(model, runs)
            for index in range(steps):
                observer.step_begins(index)
                loss = self._accumulate(built)
                self._clip_and_update(built)
                optimizer.zero_grad(set_to_none=not self.keep_gradients)
                after_update(self.setup, runs, index)
                observer.step_ends(index)
                if self.keep_losses and loss is not None:  # a replay overwrites the loss
                    losses.append(loss if self.runner is None else loss.clone())
        self.model, self.optimizer = model, optimizer
        if self.passes is not None and self.keep_losses:
            return self.passes.tell_losses(losses, steps)
        # Losses are read only here, because reading one waits for the GPU.
        return [float(loss) for loss in losses]

    def _clip_and_update(self, built: Built) -> None:
        self._clip(built)
        built.observer.phase("update")
        if built.scaler is None:
            built.optimizer.step()
        else:
            built.scaler.step(built.optimizer)
            built.scaler.update()

    def _clip(self, built: Built) -> None:
        if not self.job.clip:
            return
        built.observer.phase("clip")
        # The limit applies to the norm of the unscaled gradients.
        if built.scaler is not None:
            built.scaler.unscale_(built.optimizer)
        if self.passes is not None:
            self.passes.clip(built.model.parameters(), self.job.clip)
        else:
            clip(built.model.parameters(), self.job.clip, built.optimizer)

    def _batches(self) -> Generator[list[dict[str, Any]], None, None]:
        return micro_batches(self.job, self.setup, self.device, self.pieces, always_mask=self.always_mask)


class PlainStep(OptimizerLoop):
    """Runs optimizer steps in a plain training loop, over synthetic batches of one job."""

    def __init__(self, job: Job, setup: Setup, device: torch.device, *, keep_losses: bool = False) -> None:
        super().__init__(job, setup, device, keep_losses=keep_losses)
        self.items_of: Callable[[Mapping[str, Any]], float] = lambda piece: label_items(job, piece)
        """Function that returns the number of items in a micro-batch on the host. The loss is a mean over
        these items.
        """
        self.rows = max(1, setup.per_piece(job.batch_size))
        """Number of samples in a micro-batch."""
        self.loss_of: Callable[[Any, Mapping[str, Any]], torch.Tensor] = _loss
        """Function that computes the loss from a model and a micro-batch on the device."""
        self.computed: Callable[[torch.Tensor], None] = _ignore_loss
        """Callback for the sum of the step's losses so far. It is called before the last backward pass, if
        losses are kept.
        """

    def run(self, steps: int, observer: Observer) -> list[float]:
        """Build model and optimizer, run `steps` optimizer steps, and return their losses."""
        with run_context(self.setup):
            if not self.job.trains:
                return self._evaluate(steps, observer)
            self.start_runner()
            try:
                return self._train(steps, observer)
            finally:
                if self.runner is not None:
                    self.runner.close()

    def _accumulate(self, built: Built) -> torch.Tensor | None:
        built.observer.phase("load")
        pieces: Sequence[Mapping[str, Any]] = next(built.batches)
        weights = self._weights_of(pieces)
        pieces = prepare_pieces(self, built.model, pieces)
        if self.passes is not None:
            return self.passes.accumulate(self, built, pieces, weights)
        if self.runner is not None:
            return self.runner.run_passes(built, pieces, weights)
        return self.run_passes(built, pieces, weights)

    def needs_norm(self) -> bool:
        """Return True if the next step needs the norm of all gradients before its first weight is updated."""
        return bool(self.job.clip)

    def reads_gradients(self) -> bool:
        """Return True if the host reads the next step's gradients, which a replayed CUDA graph cannot do."""
        return False

    def _clip_and_update(self, built: Built) -> None:
        if self.runner is None:
            super()._clip_and_update(built)
        else:
            self.runner.update(built)

    def run_passes(
        self,
        built: Built,
        pieces: Sequence[Mapping[str, Any]],
        weights: Sequence[float | None],
        *,
        again: bool = False,
    ) -> torch.Tensor | None:
        """Run forward and backward passes of these host micro-batches without a `StepRunner`, each loss times
        its weight. Return the sum of the losses if losses are kept, and None in passes that repeat earlier
        ones (`again`).
        """
        model, observer = built.runs, built.observer
        total: torch.Tensor | None = None
        is_alone = ranks_of(self.setup) == 1
        counted = [  # the mean over nothing is no number, but several processes wait for each other
            (piece, weight)
            for piece, weight in zip(pieces, weights, strict=True)
            if weight != 0 or not is_alone
        ]
        for number, (piece, weight) in enumerate(counted, 1):
            is_last = number == len(counted)
            observer.phase("load")
            batch = place(piece, self.device)
            with pass_context(self.setup, model, batch, is_last=is_last):
                observer.phase("forward")
                with self.forward_context():
                    loss = self.loss_of(model, batch)
                if weight is not None:
                    loss = loss * weight
                if (
                    self.keep_losses and not again
                ):  # added up in fp32, as in the Trainer, for a loss of any dtype
                    total = loss.detach().float() if total is None else total + loss.detach()
                    self.computed(total)
                observer.phase("backward")
                self.backward(built, loss, is_last=is_last)
                # Otherwise the loss would live until the next micro-batch replaces it.
                del loss
        return total

    def backward(self, built: Built, loss: torch.Tensor, *, is_last: bool) -> None:
        """Run the backward pass of a micro-batch, which may be the last of its step."""
        (loss if built.scaler is None else built.scaler.scale(loss)).backward()

    def _weights_of(self, pieces: Sequence[Mapping[str, Any]]) -> Sequence[float | None]:
        """Return the weight of each host micro-batch's loss: its fraction of the labels in the loss, 0
        without any. None leaves the loss of a single micro-batch unscaled.
        """
        if len(pieces) == 1:
            return [None]
        items = [self.items_of(piece) for piece in pieces]
        # If no item counts, the weights are 0, and not 0/0.
        return [share / (sum(items) or 1) for share in items]

    def evaluated_model(self) -> Any:
        """Build and return the model that an evaluation calls, on the device."""
        return evaluated_model(self, lambda: build_model(self.job, self.setup, self.device))

    def first_batch(self) -> dict[str, Any]:
        """Return the inputs of the first call of an evaluation, on the device."""
        with contextlib.closing(self._batches()) as batches:
            return place(next(batches)[0], self.device)

    def outputs(self) -> Outputs:
        """Return the outputs for the job's first batch of the model that an evaluation has run."""
        import torch

        assert self.model is not None
        batch = self.first_batch()
        with torch.no_grad(), self.forward_context():
            out = self.model(**batch)
        values = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple) else (out,)
        # The loss is a scalar, and an exported model has none.
        largest = next(output for output in values if torch.is_tensor(output) and output.dim())
        # An engine may skip padding, whose outputs have no meaning.
        if (mask := batch.get("attention_mask")) is not None and largest.shape[:2] == mask.shape:
            largest = largest[mask.bool()]
        return Outputs(largest, largest.argmax(-1))

    def differences(self, own: Outputs, plain: Outputs) -> Mapping[str, Any]:
        """Return the differences of this step's outputs from those of the plain model, by the name of the
        result. Values of both have the same shape.
        """
        return {
            "largest_error": float((own.values - plain.values).abs().max()),
            "ids_equal": own.ids.shape == plain.ids.shape and bool((own.ids == plain.ids).all()),
        }

    def _evaluate(self, steps: int, observer: Observer) -> list[float]:
        import torch

        observer.phase("build")
        model = self.evaluated_model()
        observer.build_ends(model, None)
        with contextlib.closing(self._batches()) as batches:
            for index in range(steps):
                observer.step_begins(index)
                for piece in next(batches):
                    observer.phase("load")
                    batch = place(piece, self.device)
                    observer.phase("forward")
                    with torch.no_grad(), self.forward_context():
                        out = model(**batch)
                    # Otherwise the outputs would live during the next forward pass.
                    del out
                observer.step_ends(index)
        self.model = model
        return []


def _loss(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    return loss_of(model(**batch))


def _ignore_loss(total: torch.Tensor) -> None:
    """Ignore a step's loss. It is the default of the callback `computed`."""
