"""The options of a run's length, evaluation, checkpoints and logs, mostly under the HF Trainer's names.

The job decides a step's mathematics (model, batch, clipping, decay groups, learning rate), and the recipe its
computation. All other settings are here. Five defaults differ from the Trainer's. A line is logged every 10
steps, not 500. The end of the run keeps a checkpoint too. Two checkpoints are kept, not all. Weights decay at
the optimizer's default (AdamW: 0.01), not 0. A NaN loss ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from snugfit.documents import JsonFields
from snugfit.errors import UsageError, did_you_mean

SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
    "inverse_sqrt", "cosine_with_min_lr", "warmup_stable_decay",
)  # fmt: skip
"""Names of transformers' learning rate schedules that depend on the step number alone."""

STRATEGIES = ("no", "steps", "epoch")
SAMPLING = ("random", "sequential", "group_by_length")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(JsonFields):
    """The settings of a run next to job and recipe: its length, seeds, checkpoints, evaluations and logs."""

    num_train_epochs: float = 3.0
    """Epochs of training; a fraction is rounded up to whole steps."""

    max_steps: int | None = None
    """Number of optimizer steps of the run, which overrides `num_train_epochs`; None uses the epochs."""

    lr_scheduler_type: str = "linear"
    """The learning rate's schedule, one of `SCHEDULES`."""

    lr_scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the learning rate schedule, such as `{"num_cycles": 2}`."""

    warmup_steps: float = 0
    """Number of steps in which the learning rate rises from 0. Below 1 it is a share of all steps, rounded
    up."""

    weight_decay: float | None = None
    """Weight decay of the optimizer; None keeps the optimizer's default (AdamW: 0.01)."""

    seed: int = 42
    """Seed of new weights, of dropout, and of all other random numbers of a step."""

    data_seed: int | None = None
    """Seed of the order of the samples; None uses `seed`."""

    train_sampling_strategy: str = "random"
    """`random`; `sequential` in the order of the dataset; `group_by_length` batches samples of similar
    length."""

    dataloader_drop_last: bool = False
    """True to leave out an epoch's last samples if they do not fill a global batch."""

    pad_to_multiple_of: int | None = None
    """Number of tokens to a multiple of which micro-batches are padded (tensor cores prefer 8); None uses no
    multiple."""

    save_strategy: str = "steps"
    """The time of checkpoints: every `save_steps`, at each epoch's end, or `no`. Unless it is `no`, one is
    also kept at the end or stop of a run."""

    save_steps: int = 500
    """Steps between two checkpoints."""

    save_total_limit: int | None = 2
    """Number of checkpoints to keep: the newest, the best if `load_best_model_at_end`, then older ones. None
    keeps all."""

    eval_strategy: str = "no"
    """The time of evaluations: every `eval_steps` and at the run's end, at each epoch's end, or `no`."""

    eval_steps: int | None = None
    """Steps between two evaluations; None takes `logging_steps`."""

    per_device_eval_batch_size: int | None = None
    """Samples per forward pass of an evaluation; None takes the micro-batch of the training."""

    load_best_model_at_end: bool = False
    """True to return the weights of the best evaluation instead of the last ones."""

    metric_for_best_model: str = "loss"
    """Name of the metric that decides the best evaluation: `loss`, or for classifiers `accuracy`."""

    early_stopping_patience: int | None = None
    """Number of evaluations in a row without an improvement that ends the run."""

    early_stopping_threshold: float = 0.0
    """Smallest difference of the metric that counts as an improvement."""

    logging_steps: int = 10
    """Steps between two lines on the terminal; the file has every step."""

    report_to: str | Sequence[str] = "none"
    """Trackers that get the metrics: `tensorboard`, `wandb`, ... as in the Trainer, separated by commas;
    `all` that are installed; or `none`."""

    run_name: str | None = None
    """The name of the run in the trackers."""

    on_nonfinite: str = "stop"
    """Reaction to a NaN or infinite loss or gradient: `stop` before the step, or `skip` the step and count
    it."""

    on_loss_spike: str = "warn"
    """Reaction to a spike of the loss: `warn`, `stop` before the step, or `skip` the step and count it."""

    loss_spike_rtol: float | None = 2.0
    """A loss is a spike if it differs from the mean of the last ten by more than this multiple of it. None
    disables the check."""

    most_skipped_in_a_row: int = 50
    """Number of skipped steps in a row (including fp16 overflows) after which the run ends as diverged."""

    stop_seconds: float | None = None
    """Seconds for writing a checkpoint after a signal, after which the run ends without it. None sets no
    limit."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("lr_scheduler_type", SCHEDULES),
            ("save_strategy", STRATEGIES),
            ("eval_strategy", STRATEGIES),
            ("train_sampling_strategy", SAMPLING),
            ("metric_for_best_model", ("loss", "accuracy")),
            ("on_nonfinite", ("stop", "skip")),
            ("on_loss_spike", ("warn", "stop", "skip")),
        ):
            given = getattr(self, name)
            if given not in allowed:
                raise UsageError(
                    f"{name} is {given!r}.{did_you_mean(str(given), allowed)} Allowed: {', '.join(allowed)}."
                )
        for name, least in _WHOLE.items():
            given = getattr(self, name)
            if given is None and name in _OPTIONAL:
                continue
            # Exact type, because a bool is also an int in Python.
            if type(given) is not int or given < least:
                none = ", or none" if name in _OPTIONAL else ""
                share = ", and no share of all steps" if name in _STEP_OPTIONS else ""
                raise UsageError(
                    f"{name} is {given!r}; it must be a whole number from {least} up{none}{share}."
                )
        for name, above in _NUMBERS.items():
            given = getattr(self, name)
            if given is None and name in _OPTIONAL:
                continue
            if (
                type(given) not in (int, float)
                or not math.isfinite(given)
                or given < 0
                or (above and not given)
            ):
                raise UsageError(
                    f"{name} is {given!r}; it must be a number {'above' if above else 'from'} 0."
                )
        for name in ("dataloader_drop_last", "load_best_model_at_end"):
            if type(getattr(self, name)) is not bool:
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be True or False.")
        self._refuse_what_is_no_name()
        self._refuse_what_does_nothing()

    def _refuse_what_is_no_name(self) -> None:
        """Raise `UsageError` for options that must be text and are not, such as names of trackers. A feature
        checks the trackers' names later.
        """
        given = self.report_to
        if not isinstance(given, str | list | tuple) or not all(isinstance(name, str) for name in given):
            raise UsageError(f"report_to is {given!r}; it must be names of trackers, all, or none.")
        if self.run_name is not None and not isinstance(self.run_name, str):
            raise UsageError(f"run_name is {self.run_name!r}; it must be text.")

    def _refuse_what_does_nothing(self) -> None:
        if self.eval_strategy == "no":
            for name in ("load_best_model_at_end", "early_stopping_patience"):
                if getattr(self, name):
                    raise UsageError(
                        f"{name} needs evaluations: set eval_strategy to 'steps' or 'epoch', and give"
                        " evaluation data."
                    )
        if self.load_best_model_at_end and self.save_strategy == "no":
            raise UsageError(
                "load_best_model_at_end needs checkpoints, but save_strategy is 'no'. Set "
                "save_strategy to 'steps' or 'epoch', or leave load_best_model_at_end out."
            )

    @property
    def order_seed(self) -> int:
        """The random seed of the order of the training data."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def reports(self) -> tuple[str, ...]:
        """The experiment trackers that `report_to` names, without duplicates."""
        given = self.report_to.split(",") if isinstance(self.report_to, str) else self.report_to
        named = dict.fromkeys(name for part in given if (name := part.strip()))
        return () if tuple(named) == ("none",) else tuple(named)


_WHOLE = {
    "max_steps": 1,
    "seed": 0,
    "data_seed": 0,
    "pad_to_multiple_of": 1,
    "save_steps": 1,
    "save_total_limit": 1,
    "eval_steps": 1,
    "per_device_eval_batch_size": 1,
    "early_stopping_patience": 1,
    "logging_steps": 1,
    "most_skipped_in_a_row": 1,
}
"""Options that are whole numbers, each with the smallest allowed value."""

_STEP_OPTIONS = ("save_steps", "eval_steps", "logging_steps")
"""Options with a number of steps. A value below 1 is a share of all steps, as in the Trainer."""

_NUMBERS = {
    "num_train_epochs": True,
    "warmup_steps": False,
    "weight_decay": False,
    "early_stopping_threshold": False,
    "loss_spike_rtol": True,
    "stop_seconds": True,
}
"""Options that are numbers, each with True if it must be above 0, False if 0 is allowed."""

_OPTIONAL = {field.name for field in fields(TrainOptions) if "None" in str(field.type)}
