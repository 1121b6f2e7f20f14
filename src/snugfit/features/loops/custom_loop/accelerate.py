"""The function `snugfit.accelerate`, which prepares a hand-written training loop for a recipe (its
techniques) or a plan.

    run = snugfit.accelerate(model, optimizer, loader, "bf16 + micro_batches(4)", output_dir="out")
    run.resume()
    for epoch in run.epochs(3):
        for batch in run:
            loss = run.step(batch)
        run.save()

The loader yields the same global batches as without snugfit; a step splits each into the recipe's
micro-batches. The loop's code between two steps is unchanged.

The user's attention, optimizer, adapters and loader stay, unless the recipe names others. A named optimizer
is created from the user's parameter groups. A torch `DataLoader` is recreated for workers or pinned memory.
All errors are raised before the first change.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, final

from snugfit.errors import NothingFits, UsageError
from snugfit.features.loops.custom_loop.batches import Batches
from snugfit.features.loops.custom_loop.checkpoints import RunCheckpoints, RunFolder
from snugfit.features.loops.custom_loop.run import HandRun
from snugfit.features.loops.custom_loop.step import CustomStep, ItemsOf, LossOf
from snugfit.features.loops.loader import example_of, is_plain, made_like
from snugfit.features.loops.meta_copy import copy_without_data
from snugfit.features.loops.users_optimizer import refuse_optimizer, refuse_schedule
from snugfit.frontends.own import folder_of, options_of
from snugfit.job.batch_layout import BatchDims
from snugfit.job.gpu import capability_of
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.planning.plan import Plan
from snugfit.planning.request import refuse_non_callables
from snugfit.report.watching import Watching
from snugfit.step.applier import change_live, loader_arguments, make_scaler, objections, set_process
from snugfit.step.applier import refuse as refuse_for
from snugfit.step.wishes.handler import LiveTraining
from snugfit.step.wishes.model import dtype_of
from snugfit.step.wishes.optimizer import known_numbers, make_optimizer
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from snugfit.training.checkpoint.state import TrainState, refuse_unpackable
from snugfit.training.journal import Journal
from snugfit.training.ranks import world
from snugfit.training.recovery import cut_warning
from snugfit.training.run.items import samples_in

if TYPE_CHECKING:
    import torch

    from snugfit.techniques.setup import OptimizerWish, Setup
    from snugfit.training.journal import Event


def accelerate(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    plan: Plan | Recipe | str,
    *,
    scheduler: Any = None,
    loss: LossOf | None = None,
    items: ItemsOf | None = None,
    clip: float | None = None,
    batch_dims: BatchDims | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    save_total_limit: int | None = None,
    compare_code: bool = True,
    logging_steps: int = 10,
    watch: Callable[[Event], None] | None = None,
) -> HandRun:
    """Prepare a hand-written loop's model, optimizer and loader for a recipe or a plan's best recipe.

    The model is on its training device. `loader` yields global batches, mappings of the model's arguments to
    tensors (B, ...); `batch_dims` names another dimension, as in `Model.from_module`. `scheduler` steps with
    the optimizer: a torch schedule, or a function that creates one from an optimizer. `loss(model, batch)`
    replaces the model's own loss. It is a mean over as many items as `items(batch)` returns, by default the
    counted labels or the samples. `clip` is the maximum global norm of gradients. Checkpoints and a log are
    written to `output_dir`. A run resumes only with unchanged code unless `compare_code` is False. `watch`
    receives every event; its default prints a line every `logging_steps`.

    Raises `UsageError` for unsupported arguments, `RecipeError` with the name of an unsupported setting, and
    `NothingFits` for a plan without a fitting recipe. Nothing has changed then.
    """
    options_of({"logging_steps": logging_steps, "save_total_limit": save_total_limit})
    refuse_non_callables(loss=loss, items=items, scheduler=getattr(scheduler, "step", scheduler))
    watch = watch or Watching(logging_steps, bar=False)
    device = _device_of(model, optimizer)
    keeps = output_dir is not None
    job = job_of(model, optimizer, loader, device, loss=loss, clip=clip, dims=batch_dims, resumes=keeps)
    recipe = recipe_of(plan, job)
    recipe.check(job, capability_of(device))
    live = live_training(model, recipe, device)
    refuse(live, optimizer, loader, scheduler, keeps=keeps)
    # From here on, the folder is locked. If the rest fails, it is unlocked.
    with contextlib.ExitStack() as unless_it_begins:
        folder = None if output_dir is None else RunFolder(folder_of(output_dir))
        if folder is not None:
            unless_it_begins.callback(folder.close)
        state, notes = _train_state(live, optimizer, scheduler)
        batches = Batches(loader_for(loader, recipe.setup(), device))
        journal = Journal(folder and folder.store.root, watch)
        code = _code(loss, items, loader) if compare_code else None
        checkpoints = folder and RunCheckpoints(
            folder, journal, job=job, recipe=recipe, state=state, batches=batches, code=code,
            save_total_limit=save_total_limit,
        )  # fmt: skip
        unless_it_begins.pop_all()
    step = CustomStep(job, recipe.setup(), device, model=model, loss=loss, items=items)
    return HandRun(
        job=_job_to_train(job, live, step, notes, watch), recipe=recipe, state=state, step=step,
        batches=batches, checkpoints=checkpoints, journal=journal, every=logging_steps,
    )  # fmt: skip


def _device_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.device:
    """Return the model's device. Raises `UsageError` in distributed training.

    The processes would not exchange gradients, and all would write into one folder.
    """
    if (process := world()) is not None and process.size > 1:
        raise UsageError(
            f"This is one of {process.size} processes, and snugfit.accelerate trains a hand-written loop in "
            "one. On several GPUs train with snugfit train --gpus, or with a Trainer and snugfit.fit; else "
            "start the script without torchrun."
        )
    return device_of_model(model, optimizer)


def _job_to_train(
    job: Job, live: LiveTraining, step: CustomStep, notes: list[str], watch: Callable[[Event], None]
) -> Job:
    """Return the job with the result of a test: True if the loss of micro-batches equals that of the whole
    batch.

    Without micro-batches in the recipe, return the job unchanged. The notes and any warning go to `watch`.
    """
    for text in notes:
        watch({"event": "note", "text": text})
    if live.recipe.pieces > 1:
        job = step.job_with_mixing(job, live.model)
    for warning in cut_warning(job, live.recipe):
        watch(warning)
    return job


def _code(loss: LossOf | None, items: ItemsOf | None, loader: Any) -> dict[str, Any]:
    return {"loss": loss, "items": items, "collate_fn": getattr(loader, "collate_fn", None)}


def _train_state(live: LiveTraining, optimizer: Any, scheduler: Any) -> tuple[TrainState, list[str]]:
    """Apply the recipe to the model, optimizer, schedule and gradient scaler. Return the training state, and
    notes on replaced objects.
    """
    setup, notes = live.recipe.setup(), apply(live)
    recipes = optimizer_for(live.model, optimizer, live.recipe)
    # The user's loop may still refer to its own optimizer, so a message announces the replacement.
    if recipes is not optimizer:
        notes.append(f"the optimizer was {_name(optimizer)} and is now {_name(recipes)}: run.optimizer")
    # Gradients from before this call would be added to those of the first step.
    recipes.zero_grad(set_to_none=True)
    set_process(setup, live.device)
    state = TrainState(
        model=live.model,
        optimizer=recipes,
        scheduler=_schedule(scheduler, recipes),
        scaler=make_scaler(setup, live.device),
        device=live.device,
    )
    return state, notes


def _name(optimizer: Any) -> str:
    return f"{type(optimizer).__module__.split('.')[0]}'s {type(optimizer).__name__}"


# ---- the job --------------------------------------------------------------------------------------------


def job_of(
    model: Any,
    optimizer: Any,
    loader: Any,
    device: torch.device,
    *,
    loss: LossOf | None,
    clip: float | None,
    dims: BatchDims | None,
    resumes: bool,
) -> Job:
    """Return the `Job` (model, task and batch size) of a user's loop. It is made from a copy of the model
    without data, and a batch of the loader.
    """
    example = _first_batch(loader, device, resumes)
    # A loader with a batch sampler has no batch size of its own.
    size = getattr(loader, "batch_size", None) or getattr(
        getattr(loader, "batch_sampler", None), "batch_size", None
    )
    # The copy has no data, so that predictions can build the model without its memory.
    copy = copy_without_data(model)
    return Job(
        model=Model.from_module(copy if loss is None else _with_loss(copy, loss), example, batch_dims=dims),
        task=Task.CUSTOM,
        batch_size=int(size or samples_in(example, dims)),
        clip=clip,
        learning_rate=float(optimizer.param_groups[0]["lr"]),
        build_on="host",
    )


def _first_batch(loader: Any, device: torch.device, resumes: bool) -> dict[str, Any]:
    """Return the loader's first batch, on the CPU. Restore all random generators afterwards."""
    if isinstance(loader, Iterator) or not isinstance(loader, Iterable):
        raise UsageError(
            "accelerate needs a loader that yields its batches once per epoch, not a "
            f"{type(loader).__name__}. Give a torch DataLoader."
        )
    return example_of(lambda: loader, device, resumes=resumes)


def _with_loss(model: Any, loss: LossOf) -> Any:
    import torch

    class WithLoss(torch.nn.Module):
        """A wrapper of the user's model whose forward pass returns a loss."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **batch: Any) -> Any:
            """Return the loss of a batch by the user's loss function, a scalar tensor."""
            return loss(self.model, batch)

    return WithLoss()


# ---- the recipe and the schedule ------------------------------------------------------------------------


def recipe_of(plan: Any, job: Job) -> Recipe:
    """Return the recipe that the user names, or the best one of a plan. Raises `UsageError` for a plan with
    another batch size.
    """
    if isinstance(plan, Recipe):
        return plan
    if isinstance(plan, str):
        return Recipe.parse(plan)
    if not isinstance(plan, Plan):
        raise UsageError(
            "The fourth argument of accelerate must be a plan, a recipe or the text of a recipe, not a "
            f"{type(plan).__name__}."
        )
    if plan.best is None:
        raise NothingFits(
            f"This plan found nothing that fits. Its nearest miss is '{plan.nearest.recipe}'. Plan with "
            "a smaller batch or a larger GPU, or give a recipe."
        )
    if plan.job.batch_size != job.batch_size:
        raise UsageError(
            f"The plan is for a global batch of {plan.job.batch_size}, but the loader gives "
            f"{job.batch_size}. Plan for that batch, or change the loader's batch_size."
        )
    return Recipe.parse(plan.best.recipe)


def _schedule(schedule: Any, optimizer: Any) -> Any:
    """Return the user's learning-rate schedule, or a `NoSchedule` if there is none."""
    if schedule is None:
        return NoSchedule()
    return schedule if is_schedule(schedule) else schedule(optimizer)


@final
class NoSchedule:
    """Schedule of a loop that sets the learning rate itself, or leaves it constant."""

    def step(self) -> None:
        """Leave the learning rate unchanged."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, since this schedule stores nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore the saved state of this schedule, which is empty."""


# ---- model, optimizer and loader --------------------------------------------------------------------------


WRAPPED = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
"""Class names of wrappers that train a model on several devices."""


def device_of_model(model: Any, optimizer: Any) -> torch.device:
    """Return the device of the model's weights.

    Raises `UsageError` for a wrapped model, one spread over devices, or an optimizer over other parameters.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"The first argument of accelerate must be a model (nn.Module), not {_kind(model)}.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"The second argument of accelerate must be a torch optimizer, not {_kind(optimizer)}."
        )
    rates = [group.get("lr") for group in optimizer.param_groups]
    if None in rates:
        raise UsageError(
            f"{_kind(optimizer, 'The')} has the learning rate None and computes its own. A run reads the "
            "rate of each step from the optimizer. Create it with a number, as in lr=1e-3 (Adafactor: "
            "relative_step=False too)."
        )
    if any(kind.__name__ in WRAPPED for kind in type(model).__mro__):
        raise UsageError(
            f"The model is wrapped in {type(model).__name__}. accelerate trains one model on one device. "
            "Give the model itself."
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        problem = "has no parameters" if not devices else f"is on {', '.join(devices)}"
        raise UsageError(
            f"The model {problem}. accelerate trains a model on one device. Move it: model.to(...)."
        )
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Parameters are compared by identity, because a changed model's optimizer may have the old ones.
    strange = [parameter for parameter in held if id(parameter) not in own]
    if strange:
        raise UsageError(
            f"The optimizer has {len(strange)} parameters that do not belong to this model. Create it from "
            "model.parameters() after the last change of the model (adapters, tied weights)."
        )
    return torch.device(devices[0])


def _kind(value: Any, article: str = "a") -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"{article} {type(value).__name__}"


def live_training(model: Any, recipe: Recipe, device: torch.device) -> LiveTraining:
    """Return the user's model and the recipe as a `LiveTraining`, to which `step/applier.py` applies the
    recipe.
    """
    return LiveTraining(front_end="custom_loop", recipe=recipe, model=model, device=device)


def user_slots(live: LiveTraining) -> frozenset[Slot]:
    """Return the slots (choices of the recipe, such as the optimizer) that keep the user's own settings:
    those without a technique, and existing adapters.
    """
    unnamed = {slot for slot in (Slot.ATTENTION, Slot.OPTIMIZER) if live.is_plain(slot)}
    return frozenset(unnamed | {Slot.ADAPTERS} if hasattr(live.model, "peft_config") else unnamed)


def is_schedule(value: Any) -> bool:
    """Return True for a learning-rate schedule, False for a class or a function that creates one."""
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "step")


def refuse(live: LiveTraining, optimizer: Any, loader: Any, scheduler: Any, *, keeps: bool) -> None:
    """Raise an error for settings, optimizers and schedules that a user's own training loop cannot use.
    Raises `RecipeError` with the names of unsupported settings. Raises `UsageError` for an optimizer or a
    schedule that cannot step, or that a run with checkpoints (`keeps`) cannot save.
    """
    refuse_optimizer(optimizer, keeps=keeps)
    setup = live.recipe.setup()
    reasons = [*objections(live, setup, user_slots(live)), *_objections(live, setup, optimizer, loader)]
    if not live.is_plain(Slot.OPTIMIZER) and is_schedule(scheduler):
        reasons.append(
            # A schedule refers to its optimizer, and would change the learning rates of the replaced one.
            f"{live.technique(Slot.OPTIMIZER)}: the scheduler belongs to the optimizer that the recipe "
            "replaces. Give a function that creates it: scheduler=lambda optimizer: LambdaLR(optimizer, "
            "...)."
        )
    refuse_for(live, "model", reasons)
    if scheduler is not None:
        of = optimizer if is_schedule(scheduler) else _trial_optimizer(optimizer, live.recipe)
        # The schedule is created on dummy weights, since its constructor changes its optimizer's learning
        # rates.
        schedule = scheduler if is_schedule(scheduler) else scheduler(of)
        refuse_schedule(schedule)
        if keeps:
            refuse_unpackable("scheduler", schedule, schedule.state_dict(), of)


def _trial_optimizer(optimizer: Any, recipe: Recipe) -> Any:
    """Return the run's optimizer over dummy parameters, with which a schedule is created and checked."""
    import torch

    trial = copy(optimizer)
    # A shallow copy shares the states of the user's optimizer, so it gets an empty dict.
    trial.state = defaultdict(dict)
    trial.param_groups = [
        {**group, "params": [torch.nn.Parameter(torch.zeros(1))]} for group in optimizer.param_groups
    ]
    return optimizer_for(None, trial, recipe)


def _objections(live: LiveTraining, setup: Setup, optimizer: Any, loader: Any) -> Iterator[str]:
    """Yield a sentence for each conflict between the recipe and the user's optimizer or loader."""
    has_optimizer = not live.is_plain(Slot.OPTIMIZER)
    is_cast = setup.weights_dtype not in (None, dtype_of(live.model))
    # States of earlier steps would not fit the cast weights or the new optimizer.
    if (has_optimizer or is_cast) and _has_stepped(optimizer):
        yield "The optimizer has already taken steps. Call accelerate before the first step."
    elif is_cast and not has_optimizer and optimizer.state:  # Adagrad creates its states in its constructor
        yield (
            f"{live.technique(Slot.PRECISION)}: {_kind(optimizer, 'the')} has states for "
            f"{dtype_of(live.model)} weights already. Convert the model before the optimizer is created, or "
            "leave the precision out."
        )
    if has_optimizer and (lost := _lost_decay(optimizer, live.technique(Slot.OPTIMIZER).value)):
        name = live.technique(Slot.OPTIMIZER)
        yield (
            f"{name} has no weight decay, but a group of the optimizer has {lost:g}. Set it to 0, or "
            "choose another optimizer."
        )
    if _changed_arguments(loader, setup, live.device) and not is_plain(loader):
        yield (
            f"{live.technique(Slot.LOADING)}: the loader is {_kind(loader)}, which snugfit cannot rebuild. "
            "Set this up in the loader, and leave it out of the recipe."
        )


def _has_stepped(optimizer: Any) -> bool:
    """Return True if an optimizer has taken a step. A state with step 0 comes from its constructor."""
    # Without a step count, any state counts as the result of a step.
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values())


def _lost_decay(optimizer: Any, wish: OptimizerWish) -> float:
    if wish.weight_decay:
        return 0.0
    return max((float(group.get("weight_decay") or 0.0) for group in optimizer.param_groups), default=0.0)


def apply(live: LiveTraining) -> list[str]:
    """Apply the recipe to the user's model in place. Return a line of text for each replaced part, such as
    attention.
    """
    return change_live(live, live.recipe.setup(), user_slots(live))


def optimizer_for(model: Any, optimizer: Any, recipe: Recipe) -> Any:
    """Return the recipe's optimizer over the user's parameter groups, with the hyperparameters that it
    supports.

    Return the user's optimizer if the recipe names none. If `model` is given, it is prepared for the
    optimizer.
    """
    if recipe[Slot.OPTIMIZER] == roster.plain(Slot.OPTIMIZER):
        return optimizer
    wish = recipe.setup().optimizer
    groups = [
        {name: group[name] for name in ("params", "initial_lr") if name in group} | known_numbers(wish, group)
        for group in optimizer.param_groups
    ]
    return make_optimizer(wish, model, groups)


def loader_for(loader: Any, setup: Setup, device: torch.device) -> Any:
    """Return the user's loader, or a new torch `DataLoader` with the recipe's workers or pinned memory."""
    changed = _changed_arguments(loader, setup, device)
    return made_like(loader, **changed) if changed else loader


def _changed_arguments(loader: Any, setup: Setup, device: torch.device) -> dict[str, Any]:
    """Return the recipe's DataLoader arguments whose values differ from this loader's."""
    wanted_arguments = loader_arguments(setup, device)
    # If the recipe has no value, the loader keeps its own.
    return {
        name: value
        for name, value in wanted_arguments.items()
        if value and value != getattr(loader, name, None)
    }
