"""DeepSpeed's engine in accelerate and in the HF Trainer: each builds it itself, from the configuration of
`config.py`.

accelerate takes it as a `DeepSpeedPlugin`, the Trainer as `TrainingArguments(deepspeed=...)`. Both exchange
the optimizer for DeepSpeed's where states are on the host. Both get the configuration before the model is
built, as their documentation requires. With the third stage transformers then builds the model within
`deepspeed.zero.Init`. Its random weights differ from those without, for the same seed: transformers draws
them module by module, with each module's weights fetched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.features.distributed.engine.config import engine_config, width_of
from snugfit.features.distributed.engine.loop import built_by_transformers, in_process_group
from snugfit.step.accelerate_loop import AccelerateStep
from snugfit.step.applier import run_context
from snugfit.step.trainer_loop import TrainerStep
from snugfit.step.transformers_internals import place_state, placed_on

if TYPE_CHECKING:
    import torch

    from snugfit.step.step import Observer


class EngineAccelerateStep(AccelerateStep):
    """A hand-written training loop, as in transformers' performance guide, with DeepSpeed's engine built by
    accelerate.
    """

    def run(self, steps: int, observer: Observer) -> list[float]:
        """Build model and engine, run `steps` optimizer steps, and return their losses."""
        if not self.job.trains:
            raise UsageError("DeepSpeed's engine only trains. Evaluate without it.")
        with placed_on(self.device), run_context(self.setup), made_by_accelerate(self.device):
            from accelerate import Accelerator
            from accelerate.utils import DeepSpeedPlugin

            observer.phase("build")
            config = engine_config(
                self.setup,
                batch_size=self.job.batch_size,
                clip=self.job.clip,
                width=width_of(self.job.config_to_read()),
            )
            accelerator = Accelerator(
                deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
                gradient_accumulation_steps=self.pieces,
            )
            place_state(accelerator, self.device)
            model = built_by_transformers(self.job, self.setup, self.device)
            return self._steps(model, accelerator, steps, observer)

    def _steps(self, model: Any, accelerator: Any, steps: int, observer: Observer) -> list[float]:
        engine, optimizer, batches = self._prepare(model, accelerator)
        tell_of_updates(engine, observer)
        observer.build_ends(engine.module, engine.optimizer.optimizer)
        pieces = self.pieces
        losses: list[torch.Tensor] = []
        for index in range(steps):
            observer.step_begins(index)
            total: Any = 0.0
            for _ in range(pieces):
                observer.phase("load")
                batch = next(batches)
                with accelerator.accumulate(engine):
                    loss = self._forward(engine, batch, observer)
                    if self.keep_losses:
                        total = total + loss.detach() / pieces
                    observer.phase("backward")
                    accelerator.backward(loss)
                    del loss
                    # `backward` has already updated weights and dropped gradients, so these calls do nothing.
                    optimizer.step()
                    optimizer.zero_grad()
            observer.step_ends(index)
            if self.keep_losses:
                losses.append(total)
        self.model, self.optimizer = engine.module, engine.optimizer.optimizer
        answers = [float(loss) for loss in losses]
        engine.destroy()
        return answers


class EngineTrainerStep(TrainerStep):
    """Steps of the HF Trainer, which builds DeepSpeed's engine from `TrainingArguments(deepspeed=...)`."""

    def run(self, steps: int, observer: Observer) -> list[float]:
        """Build model and engine, run `steps` optimizer steps, and return their losses."""
        with made_by_accelerate(self.device):
            return super().run(steps, observer)

    def _model(self) -> torch.nn.Module:
        return built_by_transformers(self.job, self.setup, self.device)

    def _training_arguments(self, folder: str, steps: int) -> dict[str, Any]:
        """Return the `TrainingArguments` without `use_cpu`, because accelerate ignores the engine with it.
        The environment sets the device.
        """
        arguments = super()._training_arguments(folder, steps)
        return {**arguments, "use_cpu": False}

    def _watch(self, trainer: Any, observer: Observer) -> None:
        import transformers

        class _EngineCallback(transformers.TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                tell_of_updates(trainer.deepspeed, observer)

        trainer.add_callback(_EngineCallback)

    def _finish(self, trainer: Any) -> None:
        engine = trainer.deepspeed
        self.model, self.optimizer = engine.module, engine.optimizer.optimizer
        engine.destroy()


def tell_of_updates(engine: Any, observer: Observer) -> None:
    """Notify the observer of the beginning of the optimizer update, which DeepSpeed's engine starts within
    `backward`.
    """
    step = engine.step

    def tell_and_step(*arguments: Any, **keywords: Any) -> Any:
        observer.phase("update")
        return step(*arguments, **keywords)

    engine.step = tell_and_step


@contextlib.contextmanager
def made_by_accelerate(device: torch.device) -> Iterator[None]:
    """Context in which accelerate builds DeepSpeed's engine for this process as a group of one.

    Afterwards the engine's records in accelerate and transformers are deleted.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    with in_process_group(device):
        try:
            yield
        finally:
            unset_hf_deepspeed_config()
