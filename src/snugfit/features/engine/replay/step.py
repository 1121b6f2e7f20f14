"""One optimizer step as CUDA graphs: the host launches a few graphs instead of thousands of kernels.

- `forward`: a micro-batch's forward pass and its loss
- `backward`: its backward pass, which makes the gradients, or adds to them
- `norm`: the gradients' norm, where the job clips
- `update`: clipping, and the optimizer

There are four graphs instead of one, because the host checks results between them. It reads the loss while
the device runs the backward pass, and rejects a wrong step before the update (`training/run/loop.py`).

If gradients are freed within the backward pass (`updates/passes.py`), the graphs of the passes contain the
norm or the update.

**The update.** An optimizer's update that a CUDA graph can record, because its scalars are on the device.

torch's optimizers accept a tensor as learning rate. With the option `capturable` they count steps on the
device. snugfit's own optimizers have methods for this purpose (`masters/adamw.py`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from snugfit.features.engine.replay.batch import (
    fill_up,
    is_packed,
    layout_of,
    longest_sequence,
    masks_by_shape,
)
from snugfit.features.engine.replay.graphs import NotRecorded
from snugfit.step.batches import place
from snugfit.step.clipping import gradient_norm, scale
from snugfit.step.step_runner import StepRunner

if TYPE_CHECKING:
    import torch

    from snugfit.features.engine.replay.graphs import Graphs
    from snugfit.features.engine.updates.hooked_pass import HookedPass
    from snugfit.step.plain_loop import Built, PlainStep


MOST_LAYOUTS = 24
"""Largest number of batch layouts (sets of tensor shapes) that are recorded (chosen). A graph of a thousand
kernels takes some MiB outside of the allocator."""

Play = Callable[[], None]


class GraphRunner(StepRunner):
    """Base class of runners that record the passes of a loop as CUDA graphs, once for each batch layout."""

    def __init__(self, loop: Any, graphs: Graphs, multiple: int) -> None:
        # The loop refers to this object. A weak reference back lets the graphs be freed with the loop.
        self._loop: Any = weakref.proxy(loop)
        self._graphs, self._multiple = graphs, multiple
        self._recordings: dict[Hashable, Any] = {}
        self._most = longest_sequence(loop.job)

    def drop_graphs(self) -> None:
        """Drop all recorded CUDA graphs, after tensors have moved to other addresses."""
        self._recordings.clear()

    def _may_record(self, key: Hashable) -> bool:
        """Return True if this layout has no recording yet, and may get one."""
        return key not in self._recordings and not self.why_not and len(self._recordings) < MOST_LAYOUTS

    @contextlib.contextmanager
    def _adding(self, key: Hashable, recording: Any) -> Iterator[None]:
        """Context in which the graphs of a layout are recorded. If one cannot be recorded, all later steps
        run without graphs.
        """
        try:
            yield
        except NotRecorded as fault:
            self.why_not = str(fault)
            self.drop_graphs()
        else:
            self._recordings[key] = recording

    def _recomputing(self) -> AbstractContextManager[None]:
        """Return a context in which `torch.utils.checkpoint` does not touch the GPU's random state, which a
        CUDA graph cannot reset.
        """
        from snugfit.features.engine.replay.recomputed import generators_left_alone

        wish = self._loop.setup.checkpoint
        return generators_left_alone(attention_is_kept=wish is not None and wish.keep_drawn)


@dataclass(eq=False)
class LayoutGraphs:
    """The CUDA graphs for batches of one layout, with the tensors that they read and write."""

    batch: dict[str, Any]
    """The device micro-batch (B, ...) whose addresses the CUDA graphs read."""
    share: torch.Tensor | None
    """Factor of the micro-batch's loss, a scalar on the device. None leaves the loss unscaled."""
    loss: torch.Tensor | None = None
    """Loss of the micro-batch, until its backward pass is recorded; then None."""
    total: torch.Tensor | None = None
    """Sum of the losses of the step's micro-batches so far, a scalar."""
    norm: torch.Tensor | None = None
    gradients: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Weights with their gradients, for an update that is not recorded or reads the gradients' addresses.
    Otherwise empty."""
    passes: list[tuple[Play, Play]] = field(default_factory=list)
    """Functions that replay the forward and backward graph, for the first micro-batch and for all others."""
    plays_norm: Play | None = None
    plays_update: Play | None = None
    hooked_tensors: Sequence[torch.Tensor] = ()
    """Weights whose gradients are consumed by hooks within the recorded backward pass."""


class CapturedStep(GraphRunner):
    """Records the optimizer steps of a loop as CUDA graphs, and replays them."""

    _loop: PlainStep

    def __init__(self, loop: PlainStep, graphs: Graphs, multiple: int) -> None:
        super().__init__(loop, graphs, multiple)
        self._met: set[Hashable] = set()
        self._played: LayoutGraphs | None = None
        self._update: RecordableUpdate | None = None

    # ---- passes ----------------------------------------------------------------------------------------

    def run_passes(
        self,
        built: Built,
        pieces: Sequence[Mapping[str, Any]],
        weights: Sequence[float | None],
        hooked: HookedPass | None = None,
    ) -> torch.Tensor | None:
        """Compute the gradients of these host micro-batches by replayed CUDA graphs, and return the sum of
        their losses; None if losses are not kept. With `hooked`, run a pass whose hooks take the gradients.
        """
        self._played = self.norm = None
        # If the host must read gradients in the step, forward and backward cannot be replayed graphs.
        if self._loop.reads_gradients():
            return self._loop.run_passes(built, pieces, weights, again=_is_again(hooked))
        pieces = fill_up(pieces, self._multiple, self._most)
        layouts = {layout_of(piece) for piece in pieces}
        key = (*layouts, len(pieces) > 1, hooked and hooked.name)
        # With equal layouts and no micro-batch of weight 0, one pair of graphs serves all micro-batches.
        same_layout = len(layouts) == 1 and 0 not in weights
        # If tensors have moved, every recorded graph reads old addresses.
        if self._update is not None and self._update.has_moved():
            self.drop_graphs()
        # A layout is recorded when it occurs for the second time. The first run loads kernels and allocates
        # workspaces.
        if same_layout and key in self._met and self._may_record(key):
            self._record_layout(key, built, pieces[0], weights, hooked)
        if hooked is not None:
            hooked.weights.clear()
        if not same_layout or key not in self._recordings:
            self._met.add(key)
            # The first run of a layout also uses the graphs' memory pool; otherwise its memory would be
            # needed twice.
            with self._graphs.own_memory(), masks_by_shape(packed=is_packed(pieces)):
                return self._loop.run_passes(built, pieces, weights, again=_is_again(hooked))
        recording: LayoutGraphs = self._recordings[key]
        total = self._play(recording, built, pieces, weights, is_again=_is_again(hooked))
        if hooked is not None and not hooked.weights:
            # Replays run no hooks, so the weights come from the hooks during the recording.
            hooked.weights = dict.fromkeys(recording.hooked_tensors)
        return total

    def _play(
        self,
        recording: LayoutGraphs,
        built: Built,
        pieces: Sequence[Mapping[str, Any]],
        shares: Sequence[float | None],
        *,
        is_again: bool,
    ) -> torch.Tensor | None:
        observer = built.observer
        for number, (piece, share) in enumerate(zip(pieces, shares, strict=True)):
            observer.phase("load")
            recording.batch = self._graphs.refill(recording.batch, piece, self._loop.device)
            if recording.share is not None and share is not None:
                # The loss factor is a device tensor, because a recorded Python number would never change.
                recording.share.fill_(share)
            # All micro-batches after the first use the same graph, which adds to the gradients.
            forward, backward = recording.passes[min(number, len(recording.passes) - 1)]
            observer.phase("forward")
            forward()
            if recording.total is not None and not is_again:
                self._loop.computed(recording.total)
            observer.phase("backward")
            backward()
        # An update without a graph reads gradients at the addresses that the graphs write.
        for weight, gradient in recording.gradients:
            weight.grad = gradient
        if recording.plays_norm is not None and self._update is not None:
            observer.phase("clip")
            self._update.locate()
            recording.plays_norm()
        self._played, self.norm = recording, recording.norm
        return recording.total

    def _record_layout(
        self,
        key: Hashable,
        built: Built,
        piece: Mapping[str, Any],
        shares: Sequence[float | None],
        hooked: HookedPass | None,
    ) -> None:
        """Record all CUDA graphs for one layout of batches."""
        import torch

        share = None if shares[0] is None else torch.ones((), device=self._loop.device)
        recording = LayoutGraphs(place(piece, self._loop.device), share)
        with self._adding(key, recording):
            if hooked is None:
                self._record_passes(recording, built, len(shares))
                self._record_update(recording, built)
            else:
                self._record_hooked(recording, built, hooked)
        # Gradients have undefined values between the recording and the first replay.
        built.optimizer.zero_grad(set_to_none=True)

    def _record_passes(self, recording: LayoutGraphs, built: Built, count: int) -> None:
        observer, record = built.observer, self._graphs.record
        # All later micro-batches use the graph of the second.
        for number in range(min(count, 2)):
            observer.phase("forward")
            forward = record(partial(self._forward, recording, built, is_first=number == 0))
            observer.phase("backward")
            recording.passes.append((forward, record(partial(self._backward, recording), may_draw=False)))

    def _record_hooked(self, recording: LayoutGraphs, built: Built, hooked: HookedPass) -> None:
        hooked.weights.clear()
        hooked.is_recorded = True
        try:
            self._record_passes(recording, built, 1)
        finally:
            hooked.is_recorded = False
        recording.hooked_tensors = list(hooked.weights)

    def _record_update(self, recording: LayoutGraphs, built: Built) -> None:
        observer, record = built.observer, self._graphs.record
        self._update = self._update or RecordableUpdate(built.optimizer, self._loop.device)
        self._update.locate()
        if self._loop.job.clip:
            observer.phase("clip")
            recording.plays_norm = record(lambda: self._take_norm(recording, built))
        # A CUDA graph cannot read scalars on the host, so an update with such scalars runs without a graph.
        if self._update.can_be_recorded:
            observer.phase("update")
            recording.plays_update = record(lambda: self._clip_and_update(recording, built))
        # In all other cases, the next layout's passes reuse the memory of the gradients.
        if not self._update.can_be_recorded or self._update.finds_gradients:
            recording.gradients = [
                (weight, weight.grad) for weight in built.model.parameters() if weight.grad is not None
            ]

    def _forward(self, recording: LayoutGraphs, built: Built, *, is_first: bool) -> None:
        loop = self._loop
        packed = is_packed([recording.batch])
        with loop.forward_context(), masks_by_shape(packed=packed), self._recomputing():
            loss = loop.loss_of(built.runs, recording.batch)
        if recording.share is not None:
            loss = loss * recording.share.to(loss.dtype)
        recording.loss = loss
        if not loop.keep_losses:
            return
        # The first micro-batch overwrites the sum, so that it does not contain losses of earlier steps.
        if is_first or recording.total is None:
            recording.total = loss.detach().float()
        else:
            recording.total.add_(loss.detach())

    def _backward(self, recording: LayoutGraphs) -> None:
        loss, recording.loss = recording.loss, None
        assert loss is not None
        with self._recomputing():
            loss.backward()

    def _take_norm(self, recording: LayoutGraphs, built: Built) -> None:
        recording.norm = gradient_norm(built.optimizer, built.model.parameters())

    # ---- update ----------------------------------------------------------------------------------------

    def update(self, built: Built, norm: torch.Tensor | None = None) -> None:
        """Clip the gradients of the last backward pass, by their norm if it is known, and
        update the weights.
        """
        if self._loop.reads_gradients():  # gradients of passes without graphs, and no clipping
            built.observer.phase("update")
            built.optimizer.step()
            return
        self._update = self._update or RecordableUpdate(built.optimizer, self._loop.device)
        recording = self._played
        if recording is not None and recording.plays_update is not None:
            built.observer.phase("update")
            self._update.prepare()
            recording.plays_update()
            return
        built.observer.phase("clip")
        self._clip(built, norm if recording is None else recording.norm)
        built.observer.phase("update")
        self._update.run()

    def _clip(self, built: Built, norm: torch.Tensor | None) -> None:
        if most := self._loop.job.clip:
            weights = [weight for weight in built.model.parameters() if weight.grad is not None]
            norm = gradient_norm(built.optimizer, weights) if norm is None else norm
            scale(weights, most, norm, built.optimizer)

    def _clip_and_update(self, recording: LayoutGraphs, built: Built) -> None:
        assert self._update is not None
        self._clip(built, recording.norm)
        self._update.launch()


def _is_again(hooked: HookedPass | None) -> bool:
    return hooked is not None and hooked.again


# ---- the update --------------------------------------------------------------------------------------------


RECORDABLE = "capturable"
"""Key of torch's option for updates that CUDA graphs can contain, in each of an optimizer's groups."""


class RecordableUpdate:
    """One optimizer's update, in a form that a CUDA graph can contain. Its learning rates are copied to the
    device before each run or replay.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        import torch

        self._optimizer: Any = optimizer
        groups = optimizer.param_groups
        self._is_ours = hasattr(optimizer, "prepare") and hasattr(optimizer, "launch")
        self._is_torchs = not self._is_ours and all(RECORDABLE in group for group in groups)
        self._is_on_host = device.type == "cpu"
        self._generation = getattr(optimizer, "generation", 0)
        self._rates: list[torch.Tensor] = []
        if self._is_torchs:
            self._rates = [torch.zeros((), dtype=torch.float32, device=device) for _ in groups]

    @property
    def finds_gradients(self) -> bool:
        """Return True if the update reads a table of gradient addresses, which must be current before each
        update.
        """
        return self._is_ours

    def locate(self) -> None:
        """Copy the current memory addresses of the gradients to the device, where the update's kernels read
        them.
        """
        if self._is_ours:
            self._optimizer.find_gradients()

    def has_moved(self) -> bool:
        """Return True if the optimizer's tensors have moved in memory since the last call, so that recorded
        CUDA graphs are invalid.
        """
        before, self._generation = self._generation, getattr(self._optimizer, "generation", 0)
        return before != self._generation

    @property
    def can_be_recorded(self) -> bool:
        """Return True if a CUDA graph can contain this optimizer's update: its states exist, and nothing is
        computed on the host.
        """
        # Without existing optimizer states, the update would allocate them within the graph's memory.
        return (self._is_ours or self._is_torchs) and bool(self._optimizer.state)

    def prepare(self) -> None:
        """Copy the next update's scalars, such as learning rates, to the device."""
        if self._is_ours:
            self._optimizer.prepare()
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=False):
            # A recorded Python number would never change, so the learning rate is a tensor.
            rate.fill_(float(group["lr"]))

    def launch(self) -> None:
        """Run the update with the scalars on the device."""
        if self._is_ours:
            self._optimizer.launch()
            return
        with self._rates_on_device():
            self._optimizer.step()

    def run(self) -> None:
        """Run the optimizer's update once, without a CUDA graph."""
        if self._is_torchs:
            self._count_on_device()
            self.prepare()
            self.launch()
        else:
            self._optimizer.step()

    def _count_on_device(self) -> None:
        """Move the optimizer's step counts to the device, if they are on the host as after loading a
        checkpoint.
        """
        for weight, state in self._optimizer.state.items():
            step = state.get("step")
            # A restored checkpoint has step counts on the host.
            if hasattr(step, "device") and step.device != weight.device:
                state["step"] = step.to(weight.device)

    @contextlib.contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        groups = self._optimizer.param_groups
        # These options are set only during the update, since schedules and checkpoints expect Python numbers.
        before = [(group["lr"], group[RECORDABLE]) for group in groups if self._is_torchs]
        # This attribute suppresses torch's warning about a capturable optimizer outside of a recording.
        self._optimizer._warned_capturable_if_run_uncaptured = True
        for group, rate in zip(groups, self._rates, strict=False):
            # On the host there are no graphs.
            group[RECORDABLE] = not self._is_on_host
            # torch has no shape function for a learning rate tensor on `meta` (`_fused_adamw_.tensor_lr`).
            if rate.is_cuda:
                group["lr"] = rate
        try:
            yield
        finally:
            for group, (rate, recordable) in zip(groups, before, strict=False):
                group["lr"], group[RECORDABLE] = rate, recordable
