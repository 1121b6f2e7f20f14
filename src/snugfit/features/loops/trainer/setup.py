"""Application of a Setup (a recipe's settings) to a user's trainer, by `step/applier.py`.

Settings with a counterpart in `TrainingArguments` are written there, and changes of a model are applied to
the trainer's. The trainer becomes a subclass (`trainer_class.py`), which reads the settings for a step or a
run. All errors are raised before the first change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.features.loops.trainer.live_trainer import made_by_accelerate, replace_model, set_arguments
from snugfit.features.loops.trainer.parts import refusals_of
from snugfit.features.loops.trainer.passes import code_in_passes
from snugfit.features.loops.trainer.ranks import refuse_in_several_processes
from snugfit.features.loops.trainer.trainer_hooks import overrides
from snugfit.features.loops.users_optimizer import refuse_optimizer
from snugfit.job.kv_prefix import dropped_prefix
from snugfit.job.own_checkpointing import NAMES
from snugfit.step.applier import change_live, objections, refuse, training_arguments
from snugfit.step.wishes.handler import LiveTraining
from snugfit.step.wishes.optimizer import known_numbers, make_optimizer
from snugfit.techniques import roster
from snugfit.techniques.registry import features
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import OptimizerWish


def refuse_other_objects(trainer: Any) -> None:
    """Raise `UsageError` for an object that `fit` cannot train.

    These are objects other than Trainers, models spread over devices, and settings that a checkpoint cannot
    store.
    """
    import transformers

    if not isinstance(trainer, transformers.Trainer):
        type_name = (
            f"the class {trainer.__name__}" if isinstance(trainer, type) else f"a {type(trainer).__name__}"
        )
        raise UsageError(f"fit needs an instance of transformers.Trainer, not {type_name}.")
    args = trainer.args
    unset = {
        "deepspeed": trainer.is_deepspeed_enabled,
        f"{args.n_gpu} GPUs in one process": args.n_gpu > 1,
        "a model that is split over devices": trainer.is_model_parallel,
        "model_init": trainer.model_init is not None,
        "auto_find_batch_size, which changes the global batch": args.auto_find_batch_size,
        **dict.fromkeys(_switched_on(args), True),
        "dataloader_in_order=False": args.dataloader_num_workers > 1 and not args.dataloader_in_order,
    }
    if used := [name for name, is_used in unset.items() if is_used]:
        raise UsageError(
            f"The trainer uses {', '.join(used)}. fit trains one model, on one device in each process, with "
            "a fixed batch. Remove it, or train without fit. (With CUDA_VISIBLE_DEVICES=0 a process sees one "
            "GPU.)"
        )
    refusals_of(trainer).refuse_settings()
    refuse_in_several_processes(trainer)


def _switched_on(args: Any) -> Iterator[str]:
    """Yield each argument in `TrainingArguments` that turns on other kernels or a compiler, with the
    equivalent technique of snugfit.
    """
    for slot in (Slot.KERNELS, Slot.ENGINE):
        for name in roster.plain(slot).counterparts[0].arguments:
            same = (
                f", which fit is given in a recipe ({kind(**counterpart.settings)})"
                for kind in roster.techniques()
                for counterpart in kind.counterparts
                if kind.slot is slot and counterpart.arguments.get(name) is True
            )
            if getattr(args, name):
                yield name + next(same, "")


def apply(trainer: Any, job: Job, recipe: Recipe, user_slots: frozenset[Slot] = frozenset()) -> list[str]:
    """Apply the recipe, except for the slots (choices of the recipe) that keep the user's settings; return
    one line for each changed argument.

    Raises `RecipeError` for settings that this trainer does not support.
    """
    args, live, brings = trainer.args, live_training(trainer, recipe), brings_optimizer(trainer)
    setup = recipe.setup()
    unchanged = user_slots | {Slot.OPTIMIZER} if brings else user_slots
    if Slot.OPTIMIZER in unchanged:
        _refuse_users_optimizer(trainer, brings)
    own = _value_of(args, "optim") if Slot.OPTIMIZER in user_slots else None
    refusals_of(trainer).refuse_recipe(setup, optimizer="" if brings else own)
    reasons = [text for slot, text in _objections(trainer, live, brings) if slot not in user_slots]
    if any(getattr(args, name, False) for name in NAMES):  # applies even if no recipe has it
        reasons += dropped_prefix(job) if Slot.CHECKPOINTING in user_slots else ()
    refuse(live, "trainer", [*reasons, *objections(live, setup, user_slots)])
    changes = training_arguments(setup, job, args.device, unchanged)
    if Slot.CHECKPOINTING not in user_slots:
        changes |= _own_switch_off(args)
    before = {name: _value_of(args, name) for name in changes}
    set_arguments(trainer, changes)
    live.model = trainer.model
    change_live(live, setup, user_slots)
    replace_model(trainer, live.model)
    trainer.snugfit_own_forwards = live.own_forwards
    after = {name: _value_of(args, name) for name in changes}
    return [
        f"{name} was {before[name]} and is now {after[name]}"
        for name in changes
        if before[name] != after[name]
    ]


def live_training(trainer: Any, recipe: Recipe) -> LiveTraining:
    """Return the trainer's model and the recipe as a `LiveTraining`, to which `step/applier.py` applies the
    recipe.
    """
    return LiveTraining(
        front_end="fit",
        recipe=recipe,
        model=trainer.model,
        device=trainer.args.device,
        own_forwards=getattr(trainer, "snugfit_own_forwards", []),
        code_in_passes=list(code_in_passes(trainer)),
    )


def change_recipe(trainer: Any, recipe: Recipe) -> None:
    """Switch the trainer's model, and the micro-batches that remain in the step, to this recipe."""
    if recipe[Slot.CHECKPOINTING] != trainer.snugfit.recipe[Slot.CHECKPOINTING]:
        rewrap(trainer, recipe)
    trainer.snugfit = trainer.snugfit.cut_finer(recipe)


def rewrap(trainer: Any, recipe: Recipe) -> None:
    """Change the activation checkpointing of the trainer's model as this recipe requires, and nothing
    else.
    """
    live = live_training(trainer, recipe)
    set_arguments(trainer, _own_switch_off(trainer.args))
    change_live(live, recipe.setup(), set(Slot) - {Slot.CHECKPOINTING})
    trainer.snugfit_own_forwards = live.own_forwards


def _own_switch_off(args: Any) -> dict[str, Any]:
    """Return arguments that turn off the Trainer's checkpointing, which cannot select layers. snugfit wraps
    the layers instead.
    """
    return {name: False for name in NAMES if hasattr(args, name)}


def brings_optimizer(trainer: Any) -> bool:
    """Return True if the user provides the optimizer: an instance, a class with its arguments, or an
    overridden method."""
    written = overrides(trainer, "create_optimizer", "get_optimizer_cls_and_kwargs")
    # after train(), the optimizer may be the Trainer's own
    is_made = trainer.optimizer is not None and not made_by_accelerate(trainer.optimizer)
    return is_made or trainer.optimizer_cls_and_kwargs is not None or written


def _objections(trainer: Any, live: LiveTraining, brings: bool) -> Iterator[tuple[Slot, str]]:
    """Yield the slot and a sentence for each conflict between the recipe and this trainer's optimizer or
    adapters.
    """
    if not live.is_plain(Slot.OPTIMIZER) and brings:
        optimizer = live.technique(Slot.OPTIMIZER)
        message = "the trainer has its own optimizer. Leave one of them out."
        yield Slot.OPTIMIZER, f"{optimizer}: {message}"
    if not live.is_plain(Slot.ADAPTERS) and (
        hasattr(trainer.model, "peft_config") or trainer.optimizer is not None
    ):
        message = "the model already has adapters, or the trainer an optimizer."
        yield Slot.ADAPTERS, f"{live.technique(Slot.ADAPTERS)}: {message}"


def _refuse_users_optimizer(trainer: Any, brings: bool) -> None:
    """Raise `UsageError` for an optimizer with which a run cannot be checked, saved or resumed.

    The optimizer is given by its name in `TrainingArguments`, or as an instance.
    """
    name = _value_of(trainer.args, "optim")
    if trainer.optimizer is not None:
        refuse_optimizer(getattr(trainer.optimizer, "optimizer", trainer.optimizer), keeps=True)
        return
    if not brings and (fault := _reason_against(name)):
        raise UsageError(
            f"optim is {name!r}, which {fault}. Choose another optim, give fit a recipe with an optimizer, "
            "or train without fit."
        )


def _reason_against(name: str) -> str:
    """Return the reason why `fit` does not support this optimizer of transformers; empty if it does."""
    refused = {part: reason for feature in features() for part, reason in feature.refused_optimizers.items()}
    return next((reason for part, reason in refused.items() if part in name), "")


def refuse_optim_without_package(trainer: Any) -> None:
    """Raise `UsageError` if the package for the optimizer in `TrainingArguments` is missing.

    The Trainer would import the package only in `train()`, after reading the data.
    """
    name = _value_of(trainer.args, "optim")
    # A refused optimizer has an error of its own.
    if brings_optimizer(trainer) or trainer.optimizer is not None or _reason_against(name):
        return
    try:
        trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    except (ImportError, ValueError) as error:
        cause = " ".join(str(error).split()).rstrip(".")
        raise UsageError(
            f"optim is {name!r}, and transformers cannot create it here: {cause}. Install its package, "
            "choose another optim, or give fit a recipe with an optimizer."
        ) from None


def _value_of(args: Any, name: str) -> Any:
    value = getattr(args, name)
    return getattr(value, "value", value)


def optimizer_for(trainer: Any, wish: OptimizerWish) -> Any:
    """Return the recipe's optimizer over the Trainer's two parameter groups, with and without weight decay.

    The hyperparameters that it supports come from the user's `TrainingArguments`.
    """
    args, model = trainer.args, trainer.model
    groups: list[dict[str, Any]] = [
        {"params": [], **known_numbers(wish, {"weight_decay": decay})} for decay in (args.weight_decay, 0.0)
    ]
    decaying = set(trainer.get_decay_parameter_names(model))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # Used as an index, True is the second group, which has no weight decay.
            groups[name not in decaying]["params"].append(parameter)
    betas = (args.adam_beta1, args.adam_beta2)
    numbers = known_numbers(wish, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon})
    return make_optimizer(wish, model, groups, **numbers)
