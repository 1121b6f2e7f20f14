"""The callback `snugfit.SnugfitCallback`, which logs the predicted memory and seconds of a Trainer's step
beside the measured ones.

    trainer.add_callback(snugfit.SnugfitCallback(trainer))
    trainer.train()

When training begins, the callback reads the job and the recipe from the trainer, as `snugfit.fit` does, and
predicts the step. During training it measures the allocator's peaks and NVML's, and the mean seconds of a
step. Each line of the Trainer's log with a loss is followed by a line with both. It is written by
`trainer.log`, so all trackers of the Trainer receive it. Training itself is unchanged.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainerCallback

from snugfit.errors import UsageError, one_line
from snugfit.features.loops.trainer.job import job_of
from snugfit.features.loops.trainer.plan import recipe_of
from snugfit.features.loops.trainer.ranks import processes_of
from snugfit.features.loops.trainer.trainer_hooks import overrides
from snugfit.training.rng import preserve_rng

if TYPE_CHECKING:
    from snugfit.features.watch.result import WatchResult
    from snugfit.features.watch.watch import Watch
    from snugfit.results.prediction import Prediction

WARM_UP = 2
"""Number of first steps that are not timed. They create the optimizer's state and load kernels, and the
predicted seconds are those of a later step.
"""

LOGGED = ("allocated_bytes", "reserved_bytes", "nvml_bytes", "host_bytes", "step_seconds")
"""Names of the logged figures, after `snugfit_predicted_` or `snugfit_measured_`."""

PREFIX = "snugfit_"


class SnugfitCallback(TrainerCallback):  # type: ignore[misc]
    """Callback of a `transformers.Trainer` that logs the predicted step beside the measured one."""

    def __init__(self, trainer: Any = None, *, gpu: str | None = None) -> None:
        """Create the callback for this trainer. `gpu` is the name of the GPU to predict for; the default is
        the trainer's.

        Raises `UsageError` for an object that is not a Trainer.
        """
        if not isinstance(trainer, Trainer):
            raise UsageError(
                f"SnugfitCallback needs an instance of transformers.Trainer, not {trainer!r:.80}. Add it to "
                "a trainer that exists: trainer.add_callback(snugfit.SnugfitCallback(trainer))."
            )
        # The trainer refers to its callbacks. A cycle would keep its GPU memory until a garbage collection.
        self._trainer, self._gpu = weakref.ref(trainer), gpu
        self._watch: Watch | None = None
        self._clock = _StepClock(trainer.args.device)
        self.prediction: Prediction | None = None
        """Prediction of the trainer's step; None before training, and if no prediction is possible."""
        self.measured: WatchResult | None = None
        """Measured memory, time and advice of the whole training; complete after it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Predict the step, and start to measure."""
        from snugfit.features.watch.watch import watch

        trainer = self._trainer()
        if trainer is None or not state.is_world_process_zero:
            return
        self._stop()  # an earlier training may have ended by an error
        self.prediction = None
        try:
            self.prediction = _predict(trainer, self._gpu)
        except Exception as fault:  # a training run must not end because its prediction fails
            logging.getLogger("snugfit").warning("The step is not predicted: %s", one_line(fault))
        self._watch, self._clock = watch(), _StepClock(args.device)
        self.measured = self._watch.__enter__()

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Continue the clock after an evaluation or a checkpoint."""
        self._clock.resume()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Count a step. Stop the clock before an evaluation, a checkpoint and the end of training."""
        self._clock.count(control.should_evaluate or control.should_save or control.should_training_stop)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Log predicted and measured figures after each log line of a loss, and after that of the totals."""
        trainer = self._trainer()
        is_of_training = {"loss", "train_runtime"} & set(logs or ())
        if trainer is not None and self._watch is not None and is_of_training:
            trainer.log(self._figures())

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Stop to measure, and complete the figures of `measured`."""
        self._stop()

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None

    def _figures(self) -> dict[str, int | float]:
        """Return the known figures of `LOGGED`, in bytes and seconds, by their names in the log."""
        from snugfit.features.watch.gpu import WatchedGpu

        assert self._watch is not None
        gpus, host_bytes = self._watch.readings()
        gpu = next(iter(gpus), WatchedGpu(index=0))  # on a CPU, a GPU without readings
        measured: dict[str, int | float | None] = {
            "allocated_bytes": gpu.allocated_bytes,
            "reserved_bytes": gpu.reserved_bytes,
            # In a container the driver often hides the share of each process.
            "nvml_bytes": gpu.process_bytes or gpu.nvml_bytes,
            "host_bytes": host_bytes,
            "step_seconds": self._clock.step_seconds(),
        }
        footprint = self.prediction and self.prediction.footprint
        timing = self.prediction and self.prediction.timing
        predicted = {name: getattr(footprint, name, getattr(timing, name, None)) for name in LOGGED}
        return {
            f"{PREFIX}{kind}_{name}": value
            for name in LOGGED
            for kind, value in (("predicted", predicted[name]), ("measured", measured[name]))
            if value is not None
        }


class _StepClock:
    """A clock that measures the mean seconds of a step, without evaluations and checkpoints."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps, self._pause = 0, 0.0
        self._began: float | None = None
        self._stopped: float | None = None

    def count(self, stops: bool) -> None:
        """Count a finished step. With `stops`, the time until `resume` does not count."""
        self._steps += 1
        if (self._steps == WARM_UP or stops) and self._device.type == "cuda":
            # The host is ahead of the GPU, whose work belongs to the steps before this moment.
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._steps == WARM_UP:
            self._began, self._pause = now, 0.0
        if stops:
            self._stopped = now

    def resume(self) -> None:
        """Continue after a pause, if there was one."""
        if self._stopped is not None:
            self._pause += time.perf_counter() - self._stopped
            self._stopped = None

    def step_seconds(self) -> float | None:
        """Return the mean seconds of the steps after `WARM_UP`; None before the end of the first of them.

        The Trainer has read a loss from the device just before, so no kernel of these steps is waiting.
        """
        steps = self._steps - WARM_UP
        if self._began is None or steps < 1:
            return None
        now = time.perf_counter() if self._stopped is None else self._stopped
        return (now - self._began - self._pause) / steps


def _predict(trainer: Any, gpu: str | None) -> Prediction:
    """Return the prediction of the trainer's step, with its own arguments or under the recipe of `fit`.

    Raises `UsageError` for a trainer of several GPUs, and as `snugfit.predict` does.
    """
    from snugfit.planning.search.auto import predict

    device = trainer.args.device
    gpus = max(processes_of(trainer), trainer.args.n_gpu)
    if gpus > 1 or trainer.is_deepspeed_enabled or trainer.is_model_parallel:
        raise UsageError(
            "the trainer uses several GPUs or DeepSpeed. `snugfit predict --gpus` predicts these."
        )
    if gpu is None and device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
    plan = getattr(trainer, "snugfit", None)
    with preserve_rng(device):
        job = plan.job if plan else job_of(trainer)
        own = recipe_of(trainer)
        unknown = [] if plan else [slot.value for slot in own.user_slots]
        unknown += [name for name in ("compute_loss", "training_step") if overrides(trainer, name)]
        if unknown:
            logging.getLogger("snugfit").warning(
                "The prediction leaves out the trainer's own %s.", ", ".join(sorted(unknown))
            )
        return predict(job, plan.recipe if plan else own.recipe, gpu=gpu, loop="trainer")
