"""What a signal does to an evaluation of the user's own, between two steps of a hand-written loop.

The loop is not ours, so an evaluation is recognized by what it does: a module computes without gradients, or
is one that does not train. Where a signal has come, a checkpoint is kept and the loop is left there. It is
kept as the last step left it, with its generators, and says that this step is to be repeated: the resumed run
gives its batch once more, `run.step` gives the same loss without training, and what the loop does after it,
the evaluation with it, is done again.

An evaluation of other weights (an average's that was put into the model) must not be kept. So a few numbers
of the model and the settings of the optimizer are compared with those after the step. Where they differ, the
run ends before its next step.
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
"""How many tensors of a model are looked at, and how many numbers of each. A choice: an average, a merge or
other weights change all or most of them, and so few cost no time."""


class Stopped(SystemExit):
    """A signal has stopped the run between two steps, where a checkpoint was kept; `code` is 75 or 130."""

    repeats_step = False
    """Whether the resumed run gives the last step once more, for what follows it was abandoned. What a loop
    keeps of its own (an average of the weights) it then keeps as of before that step."""


@final
class EvaluationWatch:
    """Abandons what evaluates between two steps of one run once a signal has come."""

    def __init__(self, state: TrainState, batches: Batches, checkpoints: RunCheckpoints | None) -> None:
        self._state, self._batches, self._checkpoints = state, batches, checkpoints
        self._tensors = _sampled_tensors(state.model)
        self._loss = 0.0

    def watch(self, loss: float) -> None:
        """From a step's end on, which had this loss."""
        if self._checkpoints is None:
            return
        self._loss = loss
        self._left = self._numbers(), _settings(self._state.optimizer)
        self._generators = all_rng_states(self._state.device)
        self._checkpoints.interrupts.watch_modules(self._look)

    def end(self) -> None:
        """The next step begins."""
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
        """Whether model and optimizer are, as far as one sees."""
        import torch

        numbers, settings = self._left
        return torch.equal(numbers, self._numbers()) and settings == _settings(self._state.optimizer)

    def _numbers(self) -> torch.Tensor:
        """The first numbers of some tensors, (at most TENSORS x NUMBERS,) of float32."""
        import torch

        rows = [tensor.detach()[(0,) * (tensor.dim() - 1)] for tensor in self._tensors]
        return torch.cat([row.reshape(-1)[:NUMBERS].float() for row in rows])


def is_evaluation(module: Any) -> bool:
    """Whether this module computes for no training."""
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
