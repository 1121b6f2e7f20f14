"""The option `report_to`: a run's metrics for TensorBoard, Weights & Biases and all other trackers of
transformers.

snugfit calls transformers' own callbacks, with a `TrainerState` made from the run's events. So every
integration of the Trainer works. The names are those of existing dashboards (`train/loss`, `train/grad_norm`,
`train/learning_rate`, `train/epoch`, `eval/loss`). As in the Trainer, the loss is logged every
`logging_steps`, as the mean since the last log.

A resumed run appends to the same log. Repeated steps would appear twice, so TensorBoard drops its entries
from that step on (its own `purge_step`). Other trackers resume in their own way (W&B: WANDB_RUN_ID and
WANDB_RESUME), and one process sends no step to them twice.

A tracker that fails during the run causes one warning and is not called again. It does not end the training.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from snugfit.errors import UsageError, did_you_mean
from snugfit.training.journal import Event, read_journal
from snugfit.training.run.trained import STOPPED

if TYPE_CHECKING:
    import torch

    from snugfit.training.options import TrainOptions
    from snugfit.training.run.run import Run


def callbacks_for(options: TrainOptions) -> list[Any]:
    """Return transformers' callbacks for the trackers in `report_to`.

    Raises `UsageError` for an unknown name, and for a package that is not installed.
    """
    if not options.reports:
        return []
    from transformers import integrations
    from transformers.integrations import integration_utils

    names = list(options.reports)
    if names == ["all"]:
        names = integrations.get_available_reporting_integrations()
    known = sorted(integration_utils.INTEGRATION_TO_CALLBACK)
    for name in names:
        if name not in known:
            raise UsageError(
                f"report_to is {name!r}.{did_you_mean(name, known)} Allowed: none, all, {', '.join(known)}."
            )
    return [
        _create(name, kind)
        for name, kind in zip(names, integrations.get_reporting_integration_callbacks(names))
    ]


def _create(name: str, kind: type[Any]) -> Any:
    try:
        return kind()
    except (RuntimeError, ImportError) as missing:
        raise UsageError(
            f"report_to is {name!r}, but its package is not installed: {missing} Or leave report_to out."
        ) from None


@final
class Reports:
    """Callback that passes a run's events (such as a step's loss) to the trackers in its options."""

    def __init__(self, run: Run, *, restart: bool, warn: Callable[[str], None]) -> None:
        self._callbacks = callbacks_for(run.options) if run.ranks.is_first else []
        self._run, self._restart, self._warn = run, restart, warn
        self._losses: list[float] = []
        self._saved: list[int] = []
        self._sent = 0
        self._samples, self._since = 0, time.perf_counter()
        self._begun = False
        if self._callbacks:
            from transformers import TrainerControl, TrainerState

            self._args, self._control = _arguments(run), TrainerControl()
            self._state = TrainerState(
                is_local_process_zero=True,
                is_world_process_zero=True,
                logging_steps=run.options.logging_steps,
            )

    def open(self, model: torch.nn.Module, step: int, steps: int) -> None:
        """Start the trackers for a run whose last finished step is `step`, out of `steps`. It may be called
        again when the run returns to an earlier step.
        """
        if not self._callbacks:
            return
        self._state.global_step, self._state.max_steps = step, steps
        for callback in self._callbacks:
            if hasattr(callback, "tb_writer"):
                self._safely(callback, lambda tracker: self._resume_log(tracker, step))
        # After a rewind in the same process, the trackers are already initialized.
        if not self._begun:
            self._begun = True
            self._call("on_train_begin", model=model)
        # The mean in the next log line includes losses from before the resume.
        self._losses = self._since_the_last_line(step)

    def _resume_log(self, callback: Any, step: int) -> None:
        """Give TensorBoard's callback a writer that drops the log's entries after this step."""
        from transformers.integrations.integration_utils import default_logdir

        if callback.tb_writer is not None:
            callback.tb_writer.close()
        if callback.logging_dir is None:
            # transformers' `default_logdir` is a folder below `runs`.
            logs = self._run.folder / "runs"
            folders = [folder for folder in logs.glob("*") if folder.is_dir()] if not self._restart else []
            newest = max(folders, key=lambda folder: folder.stat().st_mtime, default=None)
            callback.logging_dir = str(newest or _unused_name(self._run.folder / default_logdir()))
        callback.tb_writer = callback._SummaryWriter(log_dir=callback.logging_dir, purge_step=step + 1)

    def _since_the_last_line(self, step: int) -> list[float]:
        """Return the losses since the last log line. Only the later loss of a repeated step counts."""
        first = step - step % self._run.options.logging_steps
        if first == step:
            return []
        losses = {
            event["step"]: event["loss"]
            for event in read_journal(self._run.folder)
            if event.get("event") == "step" and first < event["step"] <= step
        }
        return [float(loss) for _, loss in sorted(losses.items())]

    def __call__(self, event: Event) -> None:
        """Pass a run's event to the trackers. The event `saved` comes from another thread and waits for the
        next event.
        """
        if event["event"] == "saved":
            self._saved.append(event["step"])
        elif self._callbacks and event["event"] in ("step", "evaluated", "ended"):
            self._pass_on_saved()
            {"step": self._log_step, "evaluated": self._log_evaluation, "ended": self._log_end}[
                event["event"]
            ](event)

    def _pass_on_saved(self) -> None:
        while self._saved:
            self._state.global_step = self._saved.pop(0)
            self._call("on_save")

    def _log_step(self, event: Event) -> None:
        self._losses.append(event["loss"])
        self._samples += event["samples"]
        self._state.global_step, self._state.epoch = event["step"], event["epoch"]
        if event["step"] % self._run.options.logging_steps:
            return
        norm = {} if event["norm"] is None else {"grad_norm": event["norm"]}
        loss = math.fsum(self._losses) / len(self._losses)
        self._log({"loss": loss, **norm, "learning_rate": event["learning_rate"]})
        self._losses = []
        self._sent = max(self._sent, event["step"])

    def _log_evaluation(self, event: Event) -> None:
        self._state.global_step = event["step"]
        metrics = {f"eval_{name}": event[name] for name in ("loss", "accuracy") if event[name] is not None}
        self._log(metrics)
        self._call("on_evaluate", metrics=metrics)

    def _log_end(self, event: Event) -> None:
        self._state.global_step = event["step"]
        seconds = time.perf_counter() - self._since
        # A stopped run may be resumed, so its totals are not known yet.
        if event["outcome"] != STOPPED and self._samples:
            speed = self._samples / seconds
            self._log({"train_runtime": seconds, "train_samples_per_second": speed})

    def _log(self, logs: dict[str, float]) -> None:
        logs["epoch"] = self._state.epoch or 0.0
        again = self._state.global_step <= self._sent
        self._call("on_log", only=lambda tracker: not again or hasattr(tracker, "tb_writer"), logs=logs)

    def end(self, model: torch.nn.Module | None) -> None:
        """Call the trackers at the end of the run; `model` is None after an error."""
        if self._begun:
            self._begun = False
            self._pass_on_saved()
            self._call(
                "on_train_end",
                # At the end, trackers may upload the model. TensorBoard's only closes its file.
                only=lambda tracker: model is not None or hasattr(tracker, "tb_writer"),
                model=model,
            )

    def _call(self, name: str, only: Callable[[Any], bool] = lambda tracker: True, **more: Any) -> None:
        for callback in filter(only, list(self._callbacks)):
            self._safely(
                callback,
                lambda tracker: getattr(tracker, name)(self._args, self._state, self._control, **_copy(more)),
            )

    def _safely(self, callback: Any, do: Callable[[Any], Any]) -> None:
        try:
            do(callback)
        except Exception as fault:
            self._callbacks.remove(callback)
            what = (
                f"{type(callback).__name__} failed and is no longer called ({type(fault).__name__}: {fault})"
            )
            self._warn(f"{what}. The run continues without it.")


def _copy(more: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a callback's keyword arguments for one tracker, with new dicts, because some trackers
    write into them.
    """
    return {name: dict(value) if isinstance(value, dict) else value for name, value in more.items()}


def _unused_name(folder: Path) -> Path:
    """Return this path, or the path with a number appended if it exists. The default name is the time in
    seconds, which may repeat.
    """
    if not folder.exists():
        return folder
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in numbered if not path.exists())


def _arguments(run: Run) -> Any:
    """Return the run's settings as `TrainingArguments`, which trackers store next to the metrics."""
    options, setup = run.options, run.recipe.setup()
    given = {name: value for name, value in options.to_json().items() if value is not None}
    arguments = _description()(output_dir=str(run.folder), use_cpu=True, recipe=str(run.recipe))
    known = {
        **given,
        "report_to": list(options.reports),
        "learning_rate": run.job.learning_rate,
        "max_grad_norm": run.job.clip or 0.0,
        "per_device_train_batch_size": setup.per_piece(run.job.batch_size),
        "gradient_accumulation_steps": run.recipe.pieces,
    }
    vars(arguments).update({name: value for name, value in known.items() if name in vars(arguments)})
    return arguments


@cache
def _description() -> type[Any]:
    """Return a subclass of `TrainingArguments` that only describes a run to trackers, without side effects.

    The original class chooses a device and resets accelerate's state, which may belong to the user.
    """
    from dataclasses import dataclass

    import torch
    from transformers import TrainingArguments

    @dataclass
    class Description(TrainingArguments):  # type: ignore[misc]
        """`TrainingArguments` of a run, with the recipe, for trackers."""

        recipe: str = ""

        @property
        def _setup_devices(self) -> torch.device:
            self.distributed_state, self._n_gpu = None, 1
            return torch.device("cpu")

    return Description
