"""The hand-written loop of transformers' performance guide on the installed accelerate: prepare, backward,
step, zero_grad.

It follows Hugging Face's "Efficient training on a single GPU". The loss of each micro-batch is divided by
their number, and the optimizer steps after the last one. If the job clips, accelerate clips.
`Accelerator.prepare` itself changes the model (autocast around forward, outputs back to fp32), the optimizer
and the loader, in a simulation too.

Each of several processes runs the same loop on its part of the batch. `prepare` wraps the model in DDP or
shards it with FSDP2. For FSDP2 the model is built on the host, as accelerate's documentation recommends.
`prepare` then moves it, one group of weights after the other. Gradients are exchanged after the last
micro-batch (`Accelerator.no_sync` before it, as `accumulate` does).

The plain loop makes NCCL release DDP's first buckets; this loop does not, since no user's loop does
(`features/distributed/apply/parallel.py`). So a simulation keeps them as long as NCCL may.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.step.applier import (
    accelerate_context,
    accelerator_arguments,
    build_for_accelerate,
    forward_context,
    run_context,
    set_accelerator,
    setup_for_accelerate,
)
from snugfit.step.batches import loader
from snugfit.step.build import build_model, build_optimizer
from snugfit.step.loss import loss_of
from snugfit.step.step import Step
from snugfit.step.transformers_internals import place_state, placed_on
from snugfit.techniques.several_gpus import ranks_of

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.step.step import Observer
    from snugfit.techniques.setup import Setup


class AccelerateStep(Step):
    """Runs optimizer steps in Hugging Face's hand-written accelerate loop, over synthetic
    batches of one job.
    """

    def __init__(self, job: Job, setup: Setup, device: torch.device, *, keep_losses: bool = False) -> None:
        super().__init__(job, setup_for_accelerate(setup), device, keep_losses=keep_losses)

    def run(self, steps: int, observer: Observer) -> list[float]:
        """Build model and optimizer, run `steps` optimizer steps, and return their losses."""
        if not self.job.trains:
            raise UsageError("The accelerate loop only trains. Evaluate with --loop plain.")
        with (
            placed_on(self.device),
            accelerate_context(self.setup, self.device),
            run_context(self.setup),
        ):
            from accelerate import Accelerator

            accelerator = Accelerator(**accelerator_arguments(self.setup), cpu=self.device.type == "cpu")
            place_state(accelerator, self.device)
            return self._train(accelerator, steps, observer)

    def _train(self, accelerator: Any, steps: int, observer: Observer) -> list[float]:
        observer.phase("build")
        model, optimizer, batches = self._prepare(self._model(), accelerator)
        observer.build_ends(getattr(model, "module", model) if ranks_of(self.setup) > 1 else model, optimizer)
        pieces = self.pieces
        losses: list[torch.Tensor] = []
        for index in range(steps):
            observer.step_begins(index)
            total: Any = 0.0
            for piece in range(pieces):
                observer.phase("load")
                batch = next(batches)
                with self._exchange(accelerator, model, is_last=piece == pieces - 1):
                    loss = self._forward(model, batch, observer) / pieces
                    if self.keep_losses:
                        total = total + loss.detach()
                    observer.phase("backward")
                    accelerator.backward(loss)
            if self.job.clip:
                observer.phase("clip")
                accelerator.clip_grad_norm_(model.parameters(), self.job.clip)
            observer.phase("update")
            optimizer.step()
            optimizer.zero_grad(set_to_none=not self.keep_gradients)
            observer.step_ends(index)
            if self.keep_losses:
                losses.append(total)
        self.model, self.optimizer = accelerator.unwrap_model(model), optimizer.optimizer
        return [float(loss) for loss in losses]

    def _model(self) -> torch.nn.Module:
        """Build the model on the device. A model that is sharded over processes is built on the host, and
        accelerate moves its shards."""
        build = functools.partial(build_model, self.job, self.setup, self.device)
        return build_for_accelerate(self.setup, build)

    def _exchange(
        self, accelerator: Any, model: Any, *, is_last: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """Return accelerate's `no_sync` context before the last micro-batch, so that gradients are exchanged
        only after it."""
        if is_last or ranks_of(self.setup) == 1:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = accelerator.no_sync(model)
        return context

    def _prepare(self, model: torch.nn.Module, accelerator: Any) -> tuple[Any, Any, Iterator[Any]]:
        """Return model, optimizer and an endless iterator of batches, all prepared by accelerate."""
        set_accelerator(self.setup, accelerator, model)
        optimizer = build_optimizer(self.job, self.setup, model)
        host_batches = loader(self.job, self.setup, self.device, always_mask=self.always_mask)
        model, optimizer, batches = accelerator.prepare(model, optimizer, host_batches)
        return model, optimizer, _without_end(batches)

    def _forward(self, model: Any, batch: Any, observer: Observer) -> Any:
        """Run the model on a micro-batch and return the loss."""
        observer.phase("forward")
        with forward_context(self.setup, self.device, in_accelerate=True):
            return loss_of(model(**batch))


def _without_end(batches: Any) -> Iterator[Any]:
    """Yield a loader's batches without end, starting over after each epoch."""
    while True:
        yield from batches
