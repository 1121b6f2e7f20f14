"""Passes of a user's loop as CUDA graphs, while its own code clips, updates and drops the gradients.

One graph has forward and backward pass of a micro-batch. It adds to gradients at fixed addresses, which are
set to zero before a step's first micro-batch. So one graph serves every micro-batch of a layout, also after
one that was not replayed. The gradients stay allocated between steps, unlike those of an eager loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from snugfit.features.engine.replay.batch import fill_up, is_packed, layout_of, masks_by_shape
from snugfit.features.engine.replay.step import GraphRunner
from snugfit.job.batch_layout import map_leaves

if TYPE_CHECKING:
    import torch

    from snugfit.features.engine.replay.graphs import Graphs
    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup


class PassesLoop(Protocol):
    """A user's loop whose passes are recorded."""

    job: Job
    setup: Setup
    device: torch.device

    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """Return all parameters of the model."""

    def begin_replay(self) -> None:
        """Set the modes that the loop's code sets before a pass, such as `model.train()`."""

    def run_passes(
        self, built: Any, pieces: Sequence[Mapping[str, Any]], weights: Sequence[Any]
    ) -> torch.Tensor:
        """Run the loop's own passes of one micro-batch, its loss times the weight, and return this loss."""


@dataclass(eq=False)
class PassGraph:
    """The CUDA graph for micro-batches of one layout, with the tensors that it reads and writes."""

    batch: dict[str, Any]
    share: torch.Tensor | None
    """Factor of the loss, a scalar on the device. None leaves the loss unscaled."""
    loss: torch.Tensor | None = None
    replay: Callable[[], None] | None = None


class CapturedPasses(GraphRunner):
    """Records the forward and backward passes of a user's loop as CUDA graphs, and replays them."""

    _loop: PassesLoop

    def __init__(self, loop: PassesLoop, graphs: Graphs, multiple: int) -> None:
        super().__init__(loop, graphs, multiple)
        self._trained: dict[Hashable, list[torch.nn.Parameter]] = {}
        """Weights that got a gradient in the first pass of each layout. All others keep none."""
        self._gradients: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._addresses: Hashable = None

    def run_passes(
        self, built: Any, pieces: Sequence[Mapping[str, Any]], weights: Sequence[Any]
    ) -> torch.Tensor:
        """Add the gradients of one micro-batch to those of the step, by a replayed CUDA graph from the
        layout's second occurrence on. Return its loss times its weight.
        """
        [piece], [weight] = fill_up(pieces, self._multiple, self._most), weights
        self._drop_if_moved()
        key = (layout_of(piece), weight is None)
        if key in self._trained and self._may_record(key):
            self._record_pass(key, built, piece, weight)
        recording: PassGraph | None = self._recordings.get(key)
        if recording is None:
            # The first pass also uses the graphs' memory pool; otherwise its memory would be needed twice.
            with self._graphs.own_memory(), masks_by_shape(packed=is_packed([piece])):
                loss = self._loop.run_passes(built, [piece], [weight])
            self._trained[key] = [one for one in self._loop.parameters() if one.grad is not None]
            return loss
        self._place_gradients(key)
        self._loop.begin_replay()
        recording.batch = self._graphs.refill(recording.batch, piece, self._loop.device)
        if recording.share is not None:
            recording.share.fill_(weight)
        assert recording.replay is not None
        recording.replay()
        assert recording.loss is not None
        return recording.loss

    def update(self, built: Any, norm: torch.Tensor | None = None) -> None:
        """Do nothing, as the user's loop clips and updates."""

    def _drop_if_moved(self) -> None:
        """Drop all CUDA graphs if a weight has moved in memory, or has begun or ceased to be trained."""
        addresses = tuple((one.data_ptr(), one.requires_grad) for one in self._loop.parameters())
        if self._addresses != addresses:
            self._addresses = addresses
            self.drop_graphs()
            self._trained.clear()
            self._gradients.clear()

    def _place_gradients(self, key: Hashable) -> None:
        """Let the weights have their gradients at the addresses to which a graph adds."""
        import torch

        empty = []
        for weight in self._trained[key]:
            gradient = self._gradients.get(weight)
            if gradient is None:
                gradient = self._gradients[weight] = torch.empty_like(weight)
            if weight.grad is None:
                empty.append(gradient)
            elif weight.grad is not gradient:  # the gradient of a micro-batch that was not replayed
                gradient.copy_(weight.grad)
            weight.grad = gradient
        if empty:
            torch._foreach_zero_(empty)

    def _record_pass(self, key: Hashable, built: Any, piece: Mapping[str, Any], weight: Any) -> None:
        """Record the passes for one layout."""
        import torch

        self._place_gradients(key)
        device = self._loop.device
        share = None if weight is None else torch.ones((), device=device)

        def own_copy(_: str, value: Any) -> Any:
            # The loop's batch may be on the device already, and is freed after its step.
            return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value

        recording = PassGraph(map_leaves(piece, own_copy), share)

        def work() -> None:
            with masks_by_shape(packed=is_packed([piece])), self._recomputing():
                # A Trainer may remove labels from a batch.
                recording.loss = self._loop.run_passes(built, [dict(recording.batch)], [share])

        with self._adding(key, recording):
            recording.replay = self._graphs.record(work)
