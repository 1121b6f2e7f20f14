"""Construction of a run's model, optimizer and schedule for its next step: new, or from a checkpoint.

Seeds are set before anything is built, so that a new run depends only on its seed. A resumed run is built in
the same way, with the weights of the checkpoint. Then all other states are restored. The random generators
come last, because building draws from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from snugfit.errors import OutOfMemory, SnugfitError, UsageError
from snugfit.hub_kernels import import_peft
from snugfit.job.weights import LoadedWeights
from snugfit.step.applier import distribute_model, engine_of, is_adapted, make_scaler, set_process
from snugfit.step.build import build_model, build_optimizer, could_be_spread_from_the_host
from snugfit.techniques.several_gpus import job_of_rank
from snugfit.training.checkpoint.model_state import (
    beginning_of,
    load_model_state,
    names_kept_beside,
)
from snugfit.training.checkpoint.parts import state_parts
from snugfit.training.checkpoint.state import TrainState, restore
from snugfit.training.checkpoint.weights import load_weights
from snugfit.training.rng import seed_all
from snugfit.training.run.run import lengthens

if TYPE_CHECKING:
    import torch

    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import Setup
    from snugfit.training.checkpoint.manifest import Checkpoint
    from snugfit.training.run.run import Run


def open_run(
    run: Run,
    setup: Setup,
    steps: int,
    checkpoint: Checkpoint | None,
    tell: Callable[[str], None] = lambda text: None,
) -> TrainState:
    """Build the run's model, optimizer and schedule under `setup`, for `steps` optimizer steps in total.

    The run is at its beginning, or in the state of `checkpoint`. `tell` receives notes, such as the newly
    initialized weights. Raises `SnugfitError` if the checkpoint does not fit the model.
    """
    seed = run.options.seed
    seed_all(seed)  # all processes build the same weights
    set_process(setup, run.device)
    model = _model(run, setup, checkpoint, tell)
    runs = distribute_model(setup, model)
    optimizer = build_optimizer(run.job, setup, model, weight_decay=run.options.weight_decay)
    if (engine := engine_of(setup)) is not None:
        runs, optimizer = engine.start(job_of_rank(run.job, setup), setup, model, optimizer)
    state = TrainState(
        model=model,
        runs=runs,
        ranks=run.ranks,
        optimizer=optimizer,
        scheduler=schedule(run, optimizer, steps),
        scaler=make_scaler(setup, run.device),
        device=run.device,
    )
    if run.ranks.data_rank:  # processes with the same part draw the same numbers
        seed_all(seed, run.ranks.data_rank)
    if checkpoint is not None:
        streams = restore(state, checkpoint.folder)
        state_parts().restore(state, checkpoint.folder)
        if streams < run.ranks.size:
            tell(f"The random numbers of {run.ranks.size - streams} of {run.ranks.size} GPUs start again.")
        if lengthens(run, checkpoint.about, checkpoint.step):
            _set_rates(state.scheduler)
    return state


def not_built(run: Run, recipe: Recipe, cause: str) -> OutOfMemory:
    """Return the error for memory that ran out while the model was built under this recipe, with advice."""
    advice = "snugfit plan --memory finds a recipe that needs less."
    if could_be_spread_from_the_host(run.job, recipe.setup()):
        advice = (
            "Each GPU builds the whole model before it keeps its part. With build_on: host in the job file "
            "(--set build_on=host) it takes that from the host, layer by layer."
        )
    return OutOfMemory(f"Memory ran out ({cause}) while the model was built, under '{recipe}'. {advice}")


def _set_rates(scheduler: Any) -> None:
    """Set the optimizer's learning rates to the schedule's for the current step, in place of a
    checkpoint's.
    """
    step = scheduler.last_epoch
    scheduler._last_lr = [
        rate * factor(step) for rate, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = rate


def _model(
    run: Run, setup: Setup, checkpoint: Checkpoint | None, tell: Callable[[str], None]
) -> torch.nn.Module:
    """Build the model with its weights: a transformers model from its files, any other is built first and
    then gets its weights.

    A model for DeepSpeed's engine gets its weights on the host, before the engine partitions them.
    """
    stays = engine_of(setup) is not None
    parts = state_parts()
    if checkpoint is not None and parts.has_files(checkpoint.folder):  # loaded into the built model
        model = build_model(run.job, setup, run.device, stays=stays)
        beginning_of(model)
        if stays:
            parts.load_weights(model, checkpoint.folder, run.ranks)
        return model
    whole = (
        checkpoint is not None
        and not is_adapted(setup)
        and run.job.model.module is None
        and not run.job.added_task.reads_first_weights
    )
    weights = checkpoint.folder if checkpoint is not None and whole else run.weights

    def on_loaded(loaded: LoadedWeights) -> None:
        assert weights is not None
        if whole and (lost := set(loaded.new) - names_kept_beside(weights)):
            raise SnugfitError(
                f"{weights} does not have {min(lost)}, a weight of this model. Resume with the model that "
                "wrote it, or start a new run."
            )
        if checkpoint is None:
            for line in loaded.lines(weights):
                tell(line)

    model = build_model(run.job, setup, run.device, stays=stays, weights=weights, on_loaded=on_loaded)
    beginning_of(model)
    if checkpoint is not None:
        (load_model_state if whole else load_weights)(model, checkpoint.folder)
    return model


def schedule(run: Run, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return transformers' learning-rate schedule over optimizer steps. Raises `UsageError` for bad
    arguments."""
    import_peft()  # TrainingArguments would import peft with bitsandbytes' advice about missing kernels
    from transformers import TrainingArguments, get_scheduler

    options = run.options
    warmup = options.warmup_steps
    arguments = TrainingArguments.__new__(TrainingArguments)  # __init__ would search for devices
    arguments.warmup_steps = warmup
    warmup_steps = arguments.get_warmup_steps(steps)
    if warmup_steps > steps:
        raise UsageError(
            f"warmup_steps is {warmup:g}, but the run has only {steps} step{'s' * (steps > 1)}. Set "
            f"warmup_steps to at most {steps}."
        )
    try:
        return get_scheduler(
            options.lr_scheduler_type,
            optimizer,
            num_warmup_steps=warmup_steps,
            num_training_steps=steps,
            scheduler_specific_kwargs=dict(options.lr_scheduler_kwargs) or None,
        )
    except (TypeError, ValueError) as fault:
        raise UsageError(f"lr_scheduler_type {options.lr_scheduler_type!r}: {fault}") from None
