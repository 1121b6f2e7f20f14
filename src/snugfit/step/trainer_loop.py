"""The installed `transformers.Trainer`: its `train()` itself, with synthetic batches.

No logic of the Trainer is copied. A subclass that only adds an observer runs the Trainer's own loop,
`training_step`, clipping, step and logging of the installed version. A user's own subclass can replace
`Trainer`, and its `compute_loss` then runs.

As in users' scripts, the model is built on the host and passed to the Trainer, which moves it. Clipping is
the Trainer's default (a norm of 1.0) unless the job sets another; 0 never clips.
"""

from __future__ import annotations

import functools
import tempfile
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.step.applier import (
    accelerate_context,
    build_for_accelerate,
    forward_context,
    run_context,
    set_accelerator,
    setup_for_accelerate,
    training_arguments,
)
from snugfit.step.batches import collator, dataset
from snugfit.step.build import build_model, build_optimizer
from snugfit.step.step import SKIPPED, Step
from snugfit.step.transformers_internals import arguments_class, place_state, placed_on
from snugfit.techniques.several_gpus import ranks_of

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.step.step import Observer
    from snugfit.techniques.setup import Setup

FIRST_SKIPPED = 2
"""Index of the first micro-batch that can be skipped. The first micro-batch allocates the gradients, and the
second accumulates into them.
"""


class TrainerStep(Step):
    """Runs optimizer steps by the HF Trainer's own `train()`, over synthetic batches of one job."""

    def __init__(self, job: Job, setup: Setup, device: torch.device, *, keep_losses: bool = False) -> None:
        super().__init__(job, setup_for_accelerate(setup), device, keep_losses=keep_losses)

    def run(self, steps: int, observer: Observer) -> list[float]:
        """Run the Trainer for `steps` optimizer steps, and return their losses."""
        if not self.job.trains:
            raise UsageError("The trainer loop only trains. Evaluate with --loop plain.")
        with (
            placed_on(self.device),
            accelerate_context(self.setup, self.device),
            run_context(self.setup),
            tempfile.TemporaryDirectory(prefix="snugfit-trainer-") as folder,
        ):
            return self._train(folder, steps, observer)

    def _train(self, folder: str, steps: int, observer: Observer) -> list[float]:
        import transformers

        observer.phase("build")
        arguments = self._training_arguments(folder, steps)
        # The arguments come first, since transformers may read them while it builds the model.
        trainer_arguments = arguments_class(self.device)(**arguments)
        model = self._model()
        if self.keep_gradients:  # the Trainer calls it after each step, without this argument
            model.zero_grad = functools.partial(model.zero_grad, set_to_none=False)  # type: ignore[method-assign]
        optimizer = None if "optim" in arguments else build_optimizer(self.job, self.setup, model)
        trainer_class = observe(self.trainer_class or transformers.Trainer)
        trainer = trainer_class(
            model=model,
            args=trainer_arguments,
            train_dataset=dataset(self.job, self.setup, self.device, steps * ranks_of(self.setup)),
            optimizers=(optimizer, None),
            data_collator=collator(self.job, self.device, always_mask=self.always_mask),
            callbacks=[_callback(observer)],
        )
        trainer.observer, trainer.losses = observer, [] if self.keep_losses else None
        trainer.setup = self.setup
        if self.skips_micro_batches:
            # The last micro-batch runs, since the Trainer then exchanges the gradients and steps.
            trainer.skipped_micro_batches = range(FIRST_SKIPPED, self.pieces - 1)
        for unwanted in (transformers.PrinterCallback, transformers.ProgressCallback):
            trainer.remove_callback(unwanted)
        place_state(trainer.accelerator, self.device)
        set_accelerator(self.setup, trainer.accelerator, model)
        self._watch(trainer, observer)
        trainer.train()
        self._finish(trainer)
        pieces = self.pieces
        losses = [float(loss) for loss in trainer.losses or ()]
        # The Trainer divides the loss of each micro-batch, so their sum is the loss of the step.
        return [sum(losses[start : start + pieces]) for start in range(0, len(losses), pieces)]

    def _model(self) -> torch.nn.Module:
        """Build the model as users do. A model to be sharded is built on the host, and accelerate moves its
        shards.
        """
        build = functools.partial(build_model, self.job, self.setup, self.device, on_host=True)
        return build_for_accelerate(self.setup, build)

    def _watch(self, trainer: Any, observer: Observer) -> None:
        """Attach the observer and the remaining settings to a trainer before its `train()`."""

    def _finish(self, trainer: Any) -> None:
        """Store the trained model and the unwrapped optimizer of the trainer on this Step."""
        # accelerate has wrapped the optimizer.
        self.model, self.optimizer = trainer.model, trainer.optimizer.optimizer

    def _training_arguments(self, folder: str, steps: int) -> dict[str, Any]:
        job = self.job
        clip = {} if job.clip is None else {"max_grad_norm": job.clip}
        return {
            "output_dir": folder,
            "max_steps": steps,
            "learning_rate": job.learning_rate,
            "lr_scheduler_type": "constant",
            "dataloader_pin_memory": self.device.type == "cuda",
            "use_cpu": self.device.type == "cpu",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            # Every synthetic input is one of the model's, and adapters hide some of their names.
            "remove_unused_columns": False,
            **clip,
            **training_arguments(self.setup, job, self.device),
            **self.trainer_arguments,
        }


def observe(trainer_class: type[Any]) -> type[Any]:
    """Return a subclass of `trainer_class` that reports steps and phases to an observer, and changes nothing
    else.
    """

    class _ObservedTrainer(trainer_class):  # type: ignore[misc]
        observer: Observer
        losses: list[torch.Tensor] | None
        setup: Setup
        skipped_micro_batches = range(0)
        """Indices of a step's micro-batches whose forward and backward passes are skipped."""
        micro_batch_index = 0
        loss_before_skipped: Any = None
        """Loss of the last micro-batch that ran, while its successors are skipped; None otherwise."""

        def get_batch_samples(self, *arguments: Any, **keywords: Any) -> Any:
            """Report the beginning of a step to the observer, and return its batches. The Trainer calls this
            method first, before its callbacks.
            """
            self.observer.step_begins(self.state.global_step)
            self.observer.phase("load")
            self.micro_batch_index = 0
            return super().get_batch_samples(*arguments, **keywords)

        def training_step(self, *arguments: Any, **keywords: Any) -> Any:
            if self.micro_batch_index in self.skipped_micro_batches:
                self.observer.phase(SKIPPED)
                loss = self.loss_before_skipped
            else:
                self.observer.phase("forward")
                loss = super().training_step(*arguments, **keywords)
            self.micro_batch_index += 1
            # A reference that outlives the skipped micro-batches would keep the loss alive for longer than
            # the Trainer does.
            self.loss_before_skipped = loss if self.micro_batch_index in self.skipped_micro_batches else None
            # Before its next callback, the Trainer only clips, if at all.
            self.observer.phase("clip")
            if self.losses is not None:
                self.losses.append(loss.detach())
            return loss

        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            with forward_context(self.setup, self.args.device, in_accelerate=True):
                loss = super().compute_loss(*arguments, **keywords)
            self.observer.phase("backward")
            return loss

    _ObservedTrainer.__name__ = trainer_class.__name__
    return _ObservedTrainer


def _callback(observer: Observer) -> Any:
    import transformers

    class _ObserverCallback(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            optimizer = more.get("optimizer")
            observer.build_ends(more["model"], getattr(optimizer, "optimizer", optimizer))

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            observer.phase("update")

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            # The Trainer has already counted this step.
            observer.step_ends(state.global_step - 1)

    return _ObserverCallback()
