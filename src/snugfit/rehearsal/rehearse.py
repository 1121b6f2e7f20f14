"""Simulate the steps of a training loop on tensors without data, and record their trace.

A simulation must not depend on the state of its process. So the garbage collector is off, nothing is
downloaded, and sets in the model's code are iterated in one order.

**Missing gradients.** Find trainable parameters that get no gradient from the batch.

A warning lists them, because a wrong batch has no other symptom. Examples are a vision tower with a batch of
text alone, and a pooler whose output no loss uses. Such parameters have weights, and neither gradients nor
optimizer states. With real batches that use them, a step takes more memory than predicted.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from snugfit.errors import RehearsalError, SnugfitError, UsageError, some_of
from snugfit.hub_kernels import import_peft, no_hub_kernels
from snugfit.job.architectures import class_of
from snugfit.job.build import Construction
from snugfit.rehearsal.deep_stack import DEEP_LAYERS, is_deep, run_on_deep_stack
from snugfit.rehearsal.refusal import refusal
from snugfit.rehearsal.trace.relative import RelativeTrace
from snugfit.rehearsal.trace.repeat import ShortRun, repeat, short_run, whole_run
from snugfit.step.applier import import_code, model_arguments, refuse_rehearsal, rehearsal_context
from snugfit.step.loss import AssumedLoss
from snugfit.step.open_step import open_step
from snugfit.techniques.registry import features, hooks

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.rehearsal.device.notes import PolicyNotes
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.rehearsal.record.recorder import Recorder
    from snugfit.rehearsal.trace.trace import Recording, Trace
    from snugfit.step.step import Step
    from snugfit.techniques.setup import Setup


STEPS = 3
"""Number of optimizer steps of a simulation.

The first step creates the optimizer states at its end, so the second is the first with all of them. The third
equals all later ones, and all predicted numbers describe it.
"""

STEPS_TO_SETTLE = 3
"""Largest number of additional steps until the last two steps replay every CUDA graph."""

LEAST_LEFT = 1 << 16
"""Size in bytes from which a model's buffers on the host cause a warning."""


def rehearse(
    job: Job,
    setup: Setup,
    policy: Policy,
    *,
    loop: str = "plain",
    steps: int = STEPS,
    keep_gradients: bool = False,
    always_mask: bool = False,
    trainer_class: type[Any] | None = None,
    steady: bool = False,
    rank: int | None = 0,
) -> Trace:
    """Return the trace of `steps` optimizer steps of this job, as they would run on the simulated device.

    With `steady`, all steps from the second on are equal, so only two are recorded.

    `keep_gradients` and `always_mask` imitate older software (`Step`). `trainer_class` replaces
    `transformers.Trainer`. `rank` is the simulated process of several; `job` is the job of one process. With
    `rank` None, the process with the highest memory use is simulated, if the processes differ only in that.

    Raise `RehearsalError` if an operator's output shape depends on data or is unknown. Raise it too if the
    model's own code fails, or if this torch version does not accept the overrides. Raise `ModelError` if the
    config lacks a key that the model's code reads.
    """
    import torch

    refuse_rehearsal(setup, job)

    def open_it(job: Job, setup: Setup) -> Step:
        step = open_step(job, setup, loop, torch.device("meta"))
        step.keep_gradients, step.always_mask = keep_gradients, always_mask
        step.trainer_class, step.rank = trainer_class, rank
        return step

    if loop != "plain":
        import_peft()
    if trainer_class is not None:
        _refuse_no_trainer(trainer_class, loop)
    if (added := job.added_phase) is not None:
        whole_trace: Trace = added.rehearse(
            job, lambda new: open_it(new, setup), lambda step, count: record_step(step, policy, count), steps
        )
        return whole_trace
    # A user's own Trainer may have counters, so its steps are recorded in full.
    short = _short_run(job, setup, loop, steps, steady=steady) if trainer_class is None else None
    if short is not None:
        step = open_it(short.job, short.setup)
        step.skips_micro_batches = short.skips
        trace, marks, varies, _ = record_step(step, policy, short.steps)
        # A run that depends on values, or has no steady state, is recorded again in full.
        relative = RelativeTrace.of(trace, marks)
        whole = repeat(relative, steps=steps, micro_batches=short.micro_batches) if not varies else None
        if whole is not None:
            return whole.trace()
    if setup.records_graphs:
        return _record_until_played(lambda: open_it(job, setup), policy, steps)
    return record_step(open_it(job, setup), policy, steps).trace


def record_steps(job: Job, setup: Setup, policy: Policy, loop: str) -> Recording:
    """Simulate the steps of this training loop from which `repeat` builds `STEPS` steps with all
    micro-batches. Return their recording.
    """
    import torch

    import_peft()
    short = _short_run(job, setup, loop, STEPS) or whole_run(job, setup, STEPS)
    step = open_step(short.job, short.setup, loop, torch.device("meta"))
    step.skips_micro_batches = short.skips
    return record_step(step, policy, short.steps)


def _short_run(job: Job, setup: Setup, loop: str, steps: int, *, steady: bool = False) -> ShortRun | None:
    late = _recorder_class(setup).micro_batches_to_settle(setup)
    return short_run(job, setup, steps, loop=loop, steady=steady, late=late)


def _record_until_played(open_it: Callable[[], Step], policy: Policy, steps: int) -> Trace:
    """Simulate a run with CUDA graphs, and return its trace.

    The run has at least one more step than `steps`, so that the last two replay every graph. The first replay
    allocates workspaces again, because the recording released them. So free blocks of the allocator differ in
    the next step (gpt2 on an H100). Some models change in their first step: transformers' classifiers set
    `problem_type`. Such a model is compiled again in the second step, and replays its graphs one step later.
    """
    for more in range(1, STEPS_TO_SETTLE + 1):
        recording = record_step(open_it(), policy, steps + more)
        if recording.settled:
            return recording.trace
    raise RehearsalError(
        f"After {steps + STEPS_TO_SETTLE} steps a CUDA graph is still recorded again. Leave the mode out "
        "of 'compiled'."
    )


def record_step(step: Step, policy: Policy, steps: int) -> Recording:
    """Run `steps` optimizer steps on `meta` tensors, and return their recording."""
    record = partial(_record_step, step, policy, steps)
    return run_on_deep_stack(record) if is_deep(step.job, DEEP_LAYERS) else record()


def _overrides(
    setup: Setup, policy: Policy, recorder: Recorder, notes: PolicyNotes
) -> Iterator[AbstractContextManager[Any]]:
    """Yield the contexts in which a simulation runs, the outermost first: some features' own, the simulated
    device's, those of all other features.
    """
    from snugfit.rehearsal.device.overrides import in_force

    for surrounds in (True, False):
        for feature in features():
            if feature.surrounds_policy is surrounds:
                yield feature.simulation_overrides(setup, policy, recorder, notes)
        if surrounds:
            yield in_force(policy, notes)


def _record_step(step: Step, policy: Policy, steps: int) -> Recording:
    from snugfit.rehearsal.device.notes import PolicyNotes
    from snugfit.rehearsal.device.other_programs import COMPILED, is_compiled
    from snugfit.rehearsal.device.policy import CudaPolicy
    from snugfit.rehearsal.record.cuda_names import CudaNames, cuda_names, makes_on_the_host

    import_code(step.setup)  # before the overrides are active
    kind = _recorder_class(step.setup)
    recorder = kind(policy, steps, routing=step.job.routing, hides_masks=step.always_mask)
    recorder.rank, recorder.memory.kind_of = step.rank, step.kind_of
    model = step.job.model
    construct = model_arguments(step.setup).get("construct", Construction)
    of_weights = construct(dtype=step.job.dtype, autocast=None).doubts(model.config)
    for sentence in (*model.doubts, *of_weights, *step.job.added_task.doubts):
        recorder.warn(sentence)
    gradients = MissingGradients()
    with _without_collector(), contextlib.ExitStack() as stack:
        stack.enter_context(no_hub_kernels())  # a late import (Adafactor) may load some
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("ignore")
        # Only this warning of the model's code belongs in the prediction.
        warnings.simplefilter("always", AssumedLoss)
        notes = PolicyNotes(recorder.claim, recorder.warn, recorder.current_phase)
        stack.enter_context(
            rehearsal_context(step.setup, on_gpu=isinstance(policy, CudaPolicy))
        )  # the package's code may compile itself at import
        for overrides in _overrides(step.setup, policy, recorder, notes):
            stack.enter_context(overrides)
        # A copy of the module does not show that it was compiled, so the user's own object is examined.
        if step.job.model.module is not None and is_compiled(step.job.model.module):
            recorder.warn(COMPILED)
        if step.job.model.module is not None and isinstance(policy, CudaPolicy):
            stack.enter_context(cuda_names(policy, notes, recorder.wait))
        if (code := _code_of(step.job)) is not None and makes_on_the_host(code):
            stack.enter_context(CudaNames(recorder.current_phase, only=code.__name__))
        try:
            with recorder, sets_in_order(step.job), gradients.inspect_first_step():
                step.run(steps, recorder)
        except SnugfitError:
            raise
        except Exception as error:  # the model's own code fails on shapes, or snugfit has a bug
            raise refusal(step.job, error) from error
        for warning in caught:
            recorder.warn(str(warning.message))
        if step.model is not None and (sentence := gradients.sentence(step.model)):
            recorder.warn(sentence)
        if step.model is not None and (sentence := _left_on_the_host(step.model)):
            recorder.warn(sentence)
        for doubts in hooks("optimizer_doubts"):
            for sentence in doubts(getattr(step, "optimizer", None)):
                recorder.warn(sentence)
        recording = recorder.recording(notes.attention)
        # Model and recorder reference each other until the collector runs, so the large lists are cleared
        # now.
        recorder.clear()
        return recording


def _recorder_class(setup: Setup) -> type[Recorder]:
    """Return the recorder class that writes the trace: a feature's own for this Setup, or `Recorder`."""
    from snugfit.rehearsal.record.recorder import Recorder

    own = (class_for(setup) for class_for in hooks("recorder_class"))
    return next((kind for kind in own if kind is not None), Recorder)


def _left_on_the_host(model: Any) -> str:
    """Return a warning about buffers that a model's code creates on the host regardless of its device; empty
    if there are none.
    """
    left = {name: buffer.nbytes for name, buffer in model.named_buffers() if buffer.device.type == "cpu"}
    if (nbytes := sum(left.values())) < LEAST_LEFT:
        return ""
    return (
        f"{nbytes:,} bytes of buffers are made on the host and are not counted: {next(iter(left))} ... "
        "Create them on the device of the model's weights."
    )


def _refuse_no_trainer(trainer_class: type[Any], loop: str) -> None:
    import transformers

    if loop != "trainer":
        raise UsageError(
            f"trainer_class works only with the loop 'trainer', not with {loop!r}. Add loop='trainer'."
        )
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, transformers.Trainer)):
        raise UsageError(
            f"trainer_class is {trainer_class!r}; it must be a subclass of transformers.Trainer."
        )


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Context in which the garbage collector is off: the time at which it frees cycles must not change a
    trace.

    No collection runs at the end, since it takes longer than a small simulation. The collector frees the
    cycles later. The Trainer, accelerate and Dynamo call the collector themselves: it then traverses the
    objects of the simulation alone.
    """
    enabled, thaws = gc.isenabled(), not gc.get_freeze_count()
    gc.disable()
    # The heap of torch and transformers takes about a second to traverse, and has no tensor of the step.
    if thaws:
        gc.freeze()
    try:
        yield
    finally:
        if thaws:
            gc.unfreeze()
        if enabled:
            gc.enable()


class SortedSet(set[Any]):
    """A set that is iterated in the order of its members' names."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=str))


@contextlib.contextmanager
def sets_in_order(job: Job) -> Iterator[None]:
    """Context that replaces `set` by `SortedSet` in the code of a model of transformers."""
    code = _code_of(job)
    if code is None or "set" in vars(code):  # the code defines this name itself
        yield
        return
    # A global of the model's file hides the builtin for this file alone.
    vars(code)["set"] = SortedSet
    try:
        yield
    finally:
        del vars(code)["set"]


def _code_of(job: Job) -> ModuleType | None:
    """Return the Python module of transformers that defines the job's model.

    Return None for a user's model, and if transformers has no class for it. Building the model reports the
    second case.
    """
    if job.model.module is not None:
        return None
    try:
        return sys.modules[class_of(job.task, job.config_to_read()).__module__]
    except KeyError:
        return None


# ---- missing gradients -------------------------------------------------------------------------------------


class MissingGradients:
    """A detector of trainable parameters that have no gradient in the optimizer's first step."""

    def __init__(self) -> None:
        self._missing: set[torch.Tensor] | None = None

    @contextlib.contextmanager
    def inspect_first_step(self) -> Iterator[None]:
        """Context in which the first optimizer step is inspected."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        handle = register_optimizer_step_pre_hook(self._find_missing)
        try:
            yield
        finally:
            handle.remove()

    def _find_missing(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._missing is None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._missing = {
                parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None
            }

    def sentence(self, model: torch.nn.Module) -> str:
        """Return a warning with the number of parameters without gradients and their modules; empty if all
        have gradients.
        """
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        missing = [parameter for parameter in trained if parameter in (self._missing or ())]
        if not missing:
            return ""
        names = list(self._modules(model, ""))
        count, of = (sum(parameter.numel() for parameter in some) for some in (missing, trained))
        return (
            f"{count:,} of {of:,} trainable parameters get no gradient from this batch: {some_of(names)}. "
            "Batches that use them need more memory and time. To exclude that, freeze these parameters."
        )

    def _modules(self, module: torch.nn.Module, name: str) -> Iterator[str]:
        """Yield the names of the largest submodules without any gradient, and otherwise of single
        parameters."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        missing = [parameter for parameter in trained if parameter in (self._missing or ())]
        if missing and len(missing) == len(trained):
            yield name
            return
        # A module with some gradients is split, so that the sentence names the smallest complete parts.
        for inner, child in module.named_children() if missing else ():
            yield from self._modules(child, f"{name}.{inner}" if name else inner)
        for inner, parameter in module.named_parameters(recurse=False):
            if any(parameter is weight for weight in missing):
                yield f"{name}.{inner}" if name else inner
