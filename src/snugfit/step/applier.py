"""Applies each field of a `Setup` through its handler, in a fixed order, for every training loop.

A front-end is a loop or an export. It passes its name and its objects: a job and a device, a live model, an
optimizer's groups, arguments. The handler of a field changes these objects (`wishes/`). A feature adds its
fields of `Setup` and their handlers (`techniques/feature.py`).

- `plain`: the plain loop: our own training, simulations, measurements
- `accelerate`: the guide's loop on accelerate, simulated and measured
- `trainer`: transformers' Trainer, simulated and measured
- `fit`: `snugfit.fit`: a user's live Trainer
- `custom_loop`: `snugfit.accelerate`: a user's live model, optimizer and loader
- `script`: an export
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from snugfit.errors import RecipeError, UsageError
from snugfit.step.wishes.batching import ExpandableSegmentsHandler, LoaderHandler, MicroBatchesHandler
from snugfit.step.wishes.handler import Handler, all_of
from snugfit.step.wishes.model import (
    AttentionHandler,
    CheckpointHandler,
    WeightsDtypeHandler,
)
from snugfit.step.wishes.optimizer import OptimizerHandler
from snugfit.step.wishes.precision import AutocastHandler, MatmulHandler, ScaleGradientsHandler
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.registry import features
from snugfit.techniques.setup import Setup

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.step.step import Step, StepEngine, StepPasses
    from snugfit.step.step_runner import StepRunner
    from snugfit.step.wishes.handler import Context, LiveTraining, ScriptContext
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.setup import OptimizerWish
    from snugfit.techniques.technique import Slot

T = TypeVar("T")

FRONT_ENDS = ("plain", "accelerate", "trainer", "fit", "custom_loop", "script")

CORE_HANDLERS: tuple[Handler, ...] = (
    AttentionHandler(),  # before the weights, since it may refuse a live model
    WeightsDtypeHandler(),
    MatmulHandler(),
    CheckpointHandler(),
    OptimizerHandler(),
    AutocastHandler(),
    ScaleGradientsHandler(),
    MicroBatchesHandler(),
    LoaderHandler(),
    ExpandableSegmentsHandler(),
)

HANDLERS: tuple[Handler, ...] = tuple(
    sorted(
        (*CORE_HANDLERS, *(handler for feature in features() for handler in feature.handlers())),
        key=lambda handler: handler.stage,
    )
)
"""Handlers (one for each field of `Setup`), in the order of their stages."""

REFUSED: Mapping[tuple[str, str], str] = {
    (front_end, handler.wish): reason for handler in HANDLERS for front_end, reason in handler.refused.items()
}
"""Reasons why a front-end cannot implement a field of `Setup`, by (front-end, field)."""

_PLAIN = Setup()


def _used(setup: Setup, always: Collection[Handler] = ()) -> list[tuple[Handler, Any]]:
    """Return the handlers in `always`, and those of fields whose values differ from the plain loop's, each
    with the field's value.
    """
    return [
        (handler, value)
        for handler in HANDLERS
        if (value := getattr(setup, handler.wish)) != getattr(_PLAIN, handler.wish) or handler in always
    ]


def _wishes(setup: Setup, skip: Collection[Slot] = ()) -> list[tuple[Handler, Any]]:
    """Return the core's handlers, and those of features whose fields are used, each with the field's value.
    The recipe's slots (choices) in `skip` are left out.
    """
    # The default value of a field of the core can need work too, such as setting `attn_implementation`.
    return [used for used in _used(setup, CORE_HANDLERS) if used[0].slot not in skip]


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def _refusals(front_end: str, setup: Setup, skip: Collection[Slot] = ()) -> Iterator[tuple[Handler, str]]:
    """Yield the fields' handlers that this training loop cannot implement, each with the reason."""
    for handler, value in _used(setup):
        if handler.slot in skip:
            continue
        if reason := REFUSED.get((front_end, handler.wish)) or handler.why_refused(value, front_end):
            yield handler, reason


def refuse_unsupported(front_end: str, setup: Setup) -> None:
    """Raise `UsageError` that lists the fields of the Setup which this training loop cannot implement, with
    the reasons.
    """
    refusals = [
        f"{_wish_in_words(handler, setup)}: {reason}" for handler, reason in _refusals(front_end, setup)
    ]
    if refusals:
        raise UsageError(
            "\n".join([f"The {front_end} loop does not support this part of the recipe:", *refusals])
        )


def _wish_in_words(handler: Handler, setup: Setup) -> str:
    """Return the value of a training setting for a message, if it is text or a number. Otherwise return the
    slot (such as precision) of the technique that sets it.
    """
    value = getattr(setup, handler.wish)
    is_plain = isinstance(value, str | int | float | None)
    return f"{handler.wish} = {value!r}" if is_plain else f"the technique for '{handler.slot}'"


# ---- a model, its optimizer, its batches -----------------------------------------------------------------


def import_code(setup: Setup) -> None:
    """Import the libraries of this Setup's model and optimizer that must be imported before a step is
    simulated or measured.
    """
    for handler, value in _used(setup):
        handler.import_code(value)


def model_arguments(setup: Setup) -> dict[str, Any]:
    """Return the keyword arguments of the model's constructor that this Setup sets, as a dict."""
    return _merge(handler.model_arguments(value) for handler, value in _wishes(setup))


def adapt_model(setup: Setup, model: torch.nn.Module) -> torch.nn.Module:
    """Return the model to train: `model`, or one that settings replace it by, such as a model
    with adapters.
    """
    for handler, value in _used(setup):
        model = handler.replace_model(value, model)
    return model


def is_adapted(setup: Setup) -> bool:
    """Return True if these training settings replace the model that is built, for example by one with
    adapters.
    """
    return any(
        handler.stage < InstallStage.DISTRIBUTE  # a part of the model has the whole model's weights
        # A handler that inherits the method replaces no model.
        and type(handler).replace_model is not Handler.replace_model
        for handler, _ in _used(setup)
    )


def built_on(setup: Setup, job: Job) -> Collection[str]:
    """Return the places where the settings require the model to be built: `host`, `stays`, or both
    (`Handler.built_on`). Empty for its training device.
    """
    return {handler.built_on(value, job) for handler, value in _used(setup)} - {""}


def wrap_model(setup: Setup, model: torch.nn.Module) -> None:
    """Change modules of a model on its device as the training settings require. Examples are other kernels,
    checkpointing and compilation.
    """
    for handler, value in _wishes(setup):
        handler.wrap(value, model)


def distribute_model(setup: Setup, model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that a loop calls for a wrapped model, such as DDP; the model itself if one process
    trains it."""
    for handler, value in _used(setup):
        model = handler.distribute(value, model)
    return model


def optimizer_of_part(
    setup: Setup, wish: OptimizerWish, model: torch.nn.Module, groups: Any, **numbers: Any
) -> torch.optim.Optimizer | None:
    """Return the optimizer over this process's shard of the weights, or None if the usual
    optimizer is used.
    """
    return _first(
        handler.make_optimizer(value, wish, model, groups, **numbers) for handler, value in _used(setup)
    )


def step_passes(
    setup: Setup,
    model: torch.nn.Module,
    runs: torch.nn.Module,
    around: Callable[[], AbstractContextManager[Any]],
) -> StepPasses | None:
    """Return the object that runs a pipeline's forward and backward passes; None if each process has all
    layers.
    """
    return _first(handler.step_passes(value, model, runs, around) for handler, value in _used(setup))


def engine_of(setup: Setup) -> StepEngine | None:
    """Return another library's engine that runs the optimizer steps in place of the training loop; None
    without one.
    """
    return _first(handler.engine(value) for handler, value in _used(setup))


def engine_context(
    setup: Setup, device: torch.device, tell: Callable[[str], None]
) -> AbstractContextManager[Any]:
    """Return the context in which another library's engine runs the steps; an empty context without an
    engine."""
    engine = engine_of(setup)
    return contextlib.nullcontext() if engine is None else engine.context(device, tell)


def group_bytes(setup: Setup, loop: str = "plain") -> int:
    """Return NVML bytes of the process group that an engine makes in this loop; 0 without one."""
    engine = engine_of(setup)
    return 0 if engine is None else engine.group_bytes(loop)


def evaluated_model(loop: Step, build: Callable[[], torch.nn.Module]) -> Any:
    """Return the model whose forward pass an evaluation runs. It is another library's, a compiled one, or
    else the one that `build` returns.
    """
    model = _first(handler.evaluated_model(value, loop, build) for handler, value in _used(loop.setup))
    return build() if model is None else model


def refuse_rehearsal(setup: Setup, job: Job) -> None:
    """Raise `UsageError` for a Setup that can be measured in this job, but not simulated."""
    for handler, value in _used(setup):
        handler.refuse_rehearsal(value, job)


def refuse_training(recipe: Recipe, setup: Setup) -> None:
    """Raise `UsageError` for a Setup that can be predicted and measured, but cannot train on data."""
    for handler, value in _used(setup):
        handler.refuse_training(value, recipe)


def make_scaler(setup: Setup, device: torch.device) -> torch.amp.GradScaler | None:
    """Return the gradient scaler of the training loop, or None without one."""
    return _first(handler.make_scaler(value, device) for handler, value in _wishes(setup))


def loader_arguments(setup: Setup, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of torch's `DataLoader` under this Setup, as a dict."""
    return _merge(handler.loader_arguments(value, device) for handler, value in _wishes(setup))


# ---- a step of the plain loop ----------------------------------------------------------------------------


def fill_multiple(loop: Step) -> int:
    """Return the number whose multiples are the padded lengths of batches, in tokens; 0 adds no padding."""
    return max(handler.fill_multiple(value, loop) for handler, value in _wishes(loop.setup))


def prepare_pieces(
    loop: Step, model: torch.nn.Module, pieces: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the host micro-batches of a step after the settings' changes, for example without padding."""
    for handler, value in _wishes(loop.setup):
        pieces = handler.prepare_pieces(value, loop, model, pieces)
    return pieces


def step_runner(loop: Step) -> StepRunner | None:
    """Return the object that runs the loop's steps, for example as CUDA graphs; None if the loop runs them
    itself."""
    runner: StepRunner | None = None
    for handler, value in _wishes(loop.setup):
        runner = handler.step_runner(value, loop, runner)
    return runner


# ---- a step, a process -----------------------------------------------------------------------------------


def set_process(setup: Setup, device: torch.device) -> None:
    """Set process-wide options of the training settings, such as the allocator's, before the
    model is built.
    """
    for handler, value in _wishes(setup):
        handler.set_process(value, device)


def process_environment(setup: Setup, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a new process: `inherited`, with the variables that have the effect of
    `set_process`."""
    wished = _merge(handler.environment(value) for handler, value in _wishes(setup))
    variables = {**inherited, **wished}
    # None removes an inherited variable.
    return {name: value for name, value in variables.items() if value is not None}


def forward_context(
    setup: Setup, device: torch.device, *, in_accelerate: bool = False
) -> AbstractContextManager[Any]:
    """Return the context of a forward pass and its loss, such as autocast. `in_accelerate` leaves out the
    parts that accelerate adds.
    """
    return _join(
        handler.around_forward(value, device)
        for handler, value in _wishes(setup)
        if not (in_accelerate and handler.accelerate_does_it)
    )


def pass_context(
    setup: Setup, model: torch.nn.Module, batch: dict[str, Any], *, is_last: bool
) -> AbstractContextManager[Any]:
    """Return the context of a micro-batch's forward and backward passes on the device. `is_last` marks the
    last micro-batch of its step. `model` is the result of `distribute_model`.
    """
    used = _used(setup)
    return _join(handler.around_pass(value, model, batch, is_last=is_last) for handler, value in used)


def evaluation_context(
    setup: Setup, model: torch.nn.Module, batch: dict[str, Any]
) -> AbstractContextManager[Any]:
    """Return the context of a forward pass without a backward pass, over a batch on the device. `model` is
    the wrapped model or the result of `distribute_model`.
    """
    return _join(handler.around_evaluation(value, model, batch) for handler, value in _used(setup))


def after_update(setup: Setup, model: torch.nn.Module, step: int) -> None:
    """Run the work that the settings require after an optimizer step; `step` counts from 0."""
    for handler, value in _used(setup):
        handler.after_update(value, model, step)


def after_evaluation(setup: Setup, model: torch.nn.Module) -> None:
    """Run the work that the settings require after an evaluation's forward passes."""
    for handler, value in _used(setup):
        handler.after_evaluation(value, model)


def run_context(setup: Setup, skip: Collection[Slot] = ()) -> AbstractContextManager[Any]:
    """Return the context around all steps of a run, such as TF32 for matrix products."""
    return _join(handler.around_run(value) for handler, value in _wishes(setup, skip))


def rehearsal_context(setup: Setup, *, on_gpu: bool) -> AbstractContextManager[Any]:
    """Return the additional context of a simulated step, in which compiled code computes shapes instead of
    data.
    """
    return _join(handler.around_rehearsal(value, on_gpu=on_gpu) for handler, value in _wishes(setup))


def _join(contexts: Iterable[Context | None]) -> AbstractContextManager[Any]:
    """Return several context managers as one, the first outermost; None entries are skipped."""
    present = [context for context in contexts if context is not None]
    if len(present) == 1:
        return present[0]()
    return all_of(present) if present else contextlib.nullcontext()


# ---- a live model ----------------------------------------------------------------------------------------


def objections(live: LiveTraining, setup: Setup, skip: Collection[Slot] = ()) -> Iterator[str]:
    """Yield the reasons why this model, already in training, cannot train with these settings."""
    for handler, reason in _refusals(live.front_end, setup, skip):
        yield f"{live.technique(handler.slot)}: {reason}"
    for handler, value in _wishes(setup, skip):
        yield from handler.objections(value, live)


def refuse(live: LiveTraining, target: str, reasons: Iterable[str]) -> None:
    """Raise `RecipeError` that lists these reasons against a recipe, if there are any. `target` names the
    object that cannot be trained with it, for the message.
    """
    lines = list(reasons)
    if lines:
        raise RecipeError("\n".join([f"{live.recipe} cannot be given to this {target}:", *lines]))


def change_live(live: LiveTraining, setup: Setup, skip: Collection[Slot] = ()) -> list[str]:
    """Apply these settings to a model that is already in training, after undoing those of another recipe.
    Return a line of text for each change.
    """
    # The code of a later stage encloses that of an earlier one.
    for handler in reversed(HANDLERS):
        if handler.slot not in skip:
            handler.undo(live)
    return [line for handler, value in _wishes(setup, skip) for line in handler.change(value, live)]


# ---- other libraries -------------------------------------------------------------------------------------


def training_arguments(
    setup: Setup, job: Job, device: torch.device, skip: Collection[Slot] = ()
) -> dict[str, Any]:
    """Return the keyword arguments of `TrainingArguments` under this Setup, as a dict."""
    return _merge(handler.training_arguments(value, job, device) for handler, value in _wishes(setup, skip))


def accelerator_arguments(setup: Setup) -> dict[str, Any]:
    """Return the keyword arguments of accelerate's `Accelerator` under this Setup, as a dict."""
    return _merge(handler.accelerator_arguments(value) for handler, value in _wishes(setup))


def setup_for_accelerate(setup: Setup) -> Setup:
    """Return the Setup without the fields that accelerate implements by its own settings."""
    for handler, value in _used(setup):
        setup = handler.setup_for_accelerate(value, setup)
    return setup


def accelerate_context(setup: Setup, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context around all of accelerate's work on this device; enter it within `placed_on`."""
    return _join(handler.around_accelerate(value, device) for handler, value in _used(setup))


def build_for_accelerate(setup: Setup, build: Callable[..., torch.nn.Module]) -> torch.nn.Module:
    """Build and return the model that is passed to accelerate; `build` takes further arguments of
    `build_model`.
    """
    model = _first(handler.build_for_accelerate(value, setup, build) for handler, value in _used(setup))
    return build() if model is None else model


def set_accelerator(setup: Setup, accelerator: Any, model: torch.nn.Module) -> None:
    """Set options of a new `Accelerator` for this model."""
    for handler, value in _used(setup):
        handler.set_accelerator(value, accelerator, model)


def script_fields(context: ScriptContext) -> dict[str, Any]:
    """Return the values for the template of an exported script, for these training settings, as a dict.
    Raises `RecipeError` for a field that a script cannot express.
    """
    for handler, reason in _refusals("script", context.setup):
        raise context.refusal(handler.slot, reason)
    return _merge(handler.script(value, context) for handler, value in _wishes(context.setup))


def _merge(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge these dictionaries into one; dictionaries under the same key are merged too."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            known = merged.get(name)
            merged[name] = {**known, **value} if isinstance(known, dict) else value
    return merged
