"""Stop a hand-written loop's evaluation between two steps after a signal.

The loop is the user's, so an evaluation is recognized by its forward passes. A module runs without gradients,
or in evaluation mode. After a signal, a checkpoint is saved and the loop ends there. The checkpoint stores
the state and the generators of the last step's end, and marks that step for repetition. A resumed run yields
its batch again, and `run.step` returns the same loss without training. The loop's code after the step, with
the evaluation, then runs again.

An evaluation of other weights, such as an average copied into the model, must not be saved. So samples of the
model's values and the optimizer's settings are compared with those after the step. If they differ, the run
ends before its next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from snugfit.training.interrupt import EXIT_CODES
from snugfit.training.rng import all_rng_states, restore_all_rng_states

if TYPE_CHECKING:
    import torch

    from snugfit.frontends.custom_loop.batches import Batches
    from snugfit.frontends.custom_loop.checkpoints import RunCheckpoints
    from snugfit.training.checkpoint.state import TrainState

TENSORS, NUMBERS = 8, 64
"""Number of compared tensors of a model, and of values in each. A choice.

An average, a merge or other weights change all or most tensors, and so few values take no time.
"""


class Stopped(SystemExit):
    """Exit between two steps after a signal and a saved checkpoint; `code` is 75 or 130."""

    repeats_step = False
    """True if the resumed run yields the last step again, because the code after it was abandoned.

    State that the loop saves itself, such as an average of the weights, must then date from before that step.
    """


@final
class EvaluationWatch:
    """Stops an evaluation between two steps of one run after a signal."""

    def __init__(self, state: TrainState, batches: Batches, checkpoints: RunCheckpoints | None) -> None:
        self._state, self._batches, self._checkpoints = state, batches, checkpoints
        self._tensors = _sampled_tensors(state.model)
        self._loss = 0.0

    def watch(self, loss: float) -> None:
        """Watch modules from the end of a step with this loss."""
        if self._checkpoints is None:
            return
        self._loss = loss
        self._left = self._numbers(), _settings(self._state.optimizer)
        self._generators = all_rng_states(self._state.device)
        self._checkpoints.interrupts.watch_modules(self._look)

    def end(self) -> None:
        """Stop watching, before the next step."""
        if self._checkpoints is not None:
            self._checkpoints.interrupts.watch_modules(None)

    def _look(self, module: Any) -> None:
        checkpoints = self._checkpoints
        if checkpoints is None or not is_evaluation(module):
            return
        self.end()
        stopping = checkpoints.interrupts.stopping
        if stopping is not None and self._batches.can_repeat and self._is_as_the_step_left_it():
            restore_all_rng_states(self._generators, self._state.device)
            checkpoints.save(repeated_loss=self._loss)
            checkpoints.wait()
            stopped = Stopped(EXIT_CODES[stopping])
            stopped.repeats_step = True
            raise stopped
        text = (
            "A signal was received. The run ends before its next step, because its model has changed "
            "meanwhile."
        )
        checkpoints.journal.tell("warning", text=text)

    def _is_as_the_step_left_it(self) -> bool:
        """Return True if the sampled values and the optimizer's settings are unchanged."""
        import torch

        numbers, settings = self._left
        return torch.equal(numbers, self._numbers()) and settings == _settings(self._state.optimizer)

    def _numbers(self) -> torch.Tensor:
        """Return the first values of some tensors, (at most TENSORS x NUMBERS,) of float32."""
        import torch

        rows = [tensor.detach()[(0,) * (tensor.dim() - 1)] for tensor in self._tensors]
        return torch.cat([row.reshape(-1)[:NUMBERS].float() for row in rows])


def is_evaluation(module: Any) -> bool:
    """Return True if this module runs without training."""
    import torch

    return not (torch.is_grad_enabled() and module.training)


def _sampled_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel()]
    count = min(TENSORS, len(tensors))
    return [tensors[index * (len(tensors) - 1) // max(1, count - 1)] for index in range(count)]


def _settings(optimizer: Any) -> str:
    groups = [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    return repr(groups)
