"""The step of a user's own code: one call of the function that the user's `example` returns.

The code runs unchanged. Its phases follow from torch's own calls. `torch.autograd.backward` and `grad` are
the backward pass, and an optimizer's `step` is the update. All other code is the forward pass.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

from snugfit.errors import UsageError
from snugfit.step.step import Observer, Step

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.techniques.setup import Setup

CONTRACT = (
    "Define example(batch_size, device), which builds models, optimizers and data, and returns a function "
    "without arguments that runs one training step."
)


class ExampleCode:
    """A holder of the user's function `example`, in the place of a job's module."""

    def __init__(self, example: Callable[..., Any]) -> None:
        self.example = example
        self.built: Any = None
        """Module that contains the modules of the user's code, in a simulation; None before it."""

    def modules(self) -> Sequence[Any]:
        """Return no modules: those of the user's code do not exist yet."""
        return ()

    def parameters(self) -> Sequence[Any]:
        """Return the parameters of the user's modules, after a simulation has built them."""
        return [*self.built.parameters()] if self.built is not None else []

    def open(self, batch_size: int, device: torch.device) -> Callable[[], Any]:
        """Return the user's training step for this batch size on this device. Raises `UsageError` for a
        function of another form.
        """
        given = {"batch_size": batch_size, "device": device}
        taken = inspect.signature(self.example).parameters
        if unknown := [name for name in taken if name not in given]:
            raise UsageError(f"example has the parameter {unknown[0]!r}. {CONTRACT}")
        step = self.example(**{name: given[name] for name in taken})
        if not callable(step):
            raise UsageError(f"example returned {type(step).__name__}, which is not a function. {CONTRACT}")
        run: Callable[[], Any] = step
        return run


class ExampleStep(Step):
    """The loop over a user's own training steps."""

    simulated: ClassVar[Policy | None] = None
    """Policy of the simulated device; None in a real run."""

    def __init__(self, job: Job, setup: Setup, device: torch.device, *, keep_losses: bool = False) -> None:
        """Create the step. Raises `UsageError` for any recipe, because the code decides all of it."""
        from snugfit.techniques.recipe import Recipe

        super().__init__(job, setup, device, keep_losses=keep_losses)
        if setup != Recipe.parse("plain").setup():
            raise UsageError(
                "An example runs as its code is written, with the installed software. So its only recipe is "
                "'plain'. Change the code of the example, and predict it again."
            )

    def run(self, steps: int, observer: Observer) -> list[float]:
        """Call the user's function, run the training step that it returns `steps` times, return no losses."""
        from snugfit.features.examples.host_model import models_without_data

        code: Any = self.job.model.module
        observer.phase("build")
        with contextlib.ExitStack() as contexts:
            if self.device.type == "meta":
                contexts.enter_context(models_without_data())
            if _simulates_cuda(self.simulated):
                contexts.enter_context(_grad_scalers())
            step = code.open(self.job.batch_size, self._device_of_code())
            modules, optimizers = _modules_and_optimizers() if self.device.type == "meta" else ([], [])
            root = code.built = _root_of(modules)
            observer.build_ends(root, OptimizerGroup(optimizers) if optimizers else None)  # type: ignore[arg-type]
            contexts.enter_context(_phases_of_torch(observer))
            for index in range(steps):
                observer.step_begins(index)
                observer.phase("forward")
                step()
                observer.step_ends(index)
        # One optimizer has one model, whose weights without gradients are a finding.
        if len(optimizers) == 1:
            self.model = root
        return []

    def _device_of_code(self) -> torch.device:
        """Return the device that the user's code gets: `cuda` for a simulated GPU."""
        import torch

        # The simulation runs names of CUDA devices on `meta` (`cuda_names`).
        return torch.device("cuda") if _simulates_cuda(self.simulated) else self.device


class OptimizerGroup:
    """All optimizers of a user's code, with the states of all of them."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    @property
    def state(self) -> dict[Any, Any]:
        """States of all optimizers, by parameter."""
        return {weight: state for one in self._optimizers for weight, state in one.state.items()}


def _simulates_cuda(policy: Policy | None) -> bool:
    from snugfit.rehearsal.device.policy import CudaPolicy

    return isinstance(policy, CudaPolicy)


def _modules_and_optimizers() -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
    """Return the modules that no other module contains, and the optimizers, that exist since the simulation
    began. Older objects are frozen (`gc.freeze`), so the collector does not list them.
    """
    import torch

    objects = gc.get_objects()
    # `type` reads no attribute, which some libraries compute on demand.
    modules = [one for one in objects if issubclass(type(one), torch.nn.Module)]
    optimizers = [one for one in objects if issubclass(type(one), torch.optim.Optimizer)]
    inner = {id(child) for module in modules for child in module.children()}
    return [one for one in modules if id(one) not in inner], optimizers


def _root_of(modules: Sequence[torch.nn.Module]) -> torch.nn.Module:
    """Return a module that contains these, by the names of their classes; a single one with weights is
    returned itself.
    """
    import torch

    with_weights = [module for module in modules if any(True for _ in module.parameters())]
    if len(with_weights) == 1:
        return with_weights[0]
    root, count_by_name = torch.nn.Module(), Counter[str]()
    for module in with_weights:
        name = type(module).__name__
        count_by_name[name] += 1
        number = count_by_name[name]
        root.add_module(name if number == 1 else f"{name}_{number}", module)
    return root


@contextlib.contextmanager
def _grad_scalers() -> Iterator[None]:
    """Context in which a `GradScaler` is enabled, as on a GPU. Without CUDA, torch disables it."""
    from torch.cuda.amp import common

    with patch.object(common, "amp_definitely_not_available", lambda: False):
        yield


@contextlib.contextmanager
def _phases_of_torch(observer: Observer) -> Iterator[None]:
    """Context in which the observer is notified of backward passes and updates, from torch's own calls."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def in_backward(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            observer.phase("backward")
            try:
                return function(*arguments, **keywords)
            finally:
                observer.phase("forward")

        return run

    hooks = (
        register_optimizer_step_pre_hook(lambda *_: observer.phase("update")),
        register_optimizer_step_post_hook(lambda *_: observer.phase("forward")),
    )
    autograd = torch.autograd
    try:
        with (
            patch.object(autograd, "backward", in_backward(autograd.backward)),
            patch.object(autograd, "grad", in_backward(autograd.grad)),
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()
