"""Forward and backward passes of a step in pipeline stages, by torch's own pipelining
(`torch.distributed.pipelining`).

torch's schedule orders this stage's forward and backward passes of the micro-batches, and sends and receives
between them. It gets the shapes of the tensors between stages, so it need not find them by a trial run. Its
buffers, one for each micro-batch and direction, stay from step to step.

- `first stage`: token ids in, hidden states out
- `last stage`: hidden states in, loss out: each micro-batch's, times its share of the counted items

The first and the last stage both have the matrix of a tied head. The two add up its gradients after their
passes; in the norm of all gradients it counts once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError
from snugfit.features.distributed.apply.rank_mesh import device_of, mesh_of
from snugfit.features.distributed.apply.stages import is_tied, parts_of, position_of, shared_weight
from snugfit.features.distributed.apply.tensor import sum_parts_of_gradients
from snugfit.job.batch import FILL
from snugfit.step.batches import place
from snugfit.step.clipping import scale, tensor_parts

if TYPE_CHECKING:
    import torch
    from torch.distributed.pipelining import PipelineStage

    from snugfit.features.distributed.fields import ParallelWish
    from snugfit.step.step import Observer

EACH = ("attention_mask", "position_ids")
"""Names of model inputs that every stage receives. The first stage also gets token ids, the last one labels.
"""


class StagePasses:
    """Runs the forward and backward passes of this process's pipeline stages."""

    def __init__(
        self, wish: ParallelWish, runs: Any, model: Any, around: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        import torch
        import torch.distributed as dist

        self._wish, self._around = wish, around
        self.model = model
        """The pipeline stage of this process, a part of the model's layers."""
        position = position_of(wish, dist.get_rank())
        self._parts = {position: runs} if wish.chunks == 1 else parts_of(wish, model)
        self.group = mesh_of(wish, device_of(model)).get_group("stage")
        """The process group of all stages of one copy of the model."""
        meeting = torch.zeros(1, device=next(model.parameters()).device)
        dist.all_reduce(meeting, group=self.group)  # NCCL wants all of a group before two of them exchange
        self._ends = _group_of_ends(wish, self.group) if is_tied(model) else None
        self._made_for: tuple[int, ...] = ()
        self._schedule: Any = None
        self._stages: list[Any] = []

    @property
    def is_first(self) -> bool:
        """Return True if this process has the first pipeline stage, which takes token ids."""
        return 0 in self._parts

    @property
    def is_last(self) -> bool:
        """Return True if this process has the last pipeline stage, which computes the loss of the batch."""
        return self._wish.all_stages - 1 in self._parts

    def accumulate(
        self, loop: Any, built: Any, pieces: Sequence[Mapping[str, Any]], weights: Sequence[float | None]
    ) -> torch.Tensor | None:
        """Run all micro-batches of a step in the schedule's order, and leave gradients in the parameters.
        Return the loss if this process has the last stage and the loop keeps losses.
        """
        count = loop.pieces
        whole = join(pieces, count)
        inputs = place(self.inputs(whole), loop.device)
        # Micro-batches that this rank does not have count as 0 in the loss.
        shares = [1.0 if weight is None else weight for weight in weights] + [0.0] * (count - len(pieces))
        built.observer.phase("forward")
        losses = self.run(inputs, tuple(whole["input_ids"].shape), shares, built.observer)
        if not loop.keep_losses or not losses:
            return None
        # Losses are added in fp32, as in the plain loop.
        total = losses[0].detach().float()
        for loss in losses[1:]:
            total = total + loss.detach()
        loop.computed(total)
        return total

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors of a batch that this process's pipeline stages need: token ids in the first
        stage, labels in the last.
        """
        named = (*EACH, *(["input_ids"] if self.is_first else []), *(["labels"] if self.is_last else []))
        return {name: value for name, value in batch.items() if name in named}

    def run(
        self, inputs: Mapping[str, Any], shape: tuple[int, int], shares: Sequence[float], observer: Observer
    ) -> list[torch.Tensor]:
        """Run a step's forward and backward passes, which leave gradients in the parameters. Return each
        micro-batch's part of the loss.

        The list is empty unless this process computes the loss. `inputs` are on the device, of a batch of
        this `shape` (B, S). The batch is cut into one micro-batch for each of the `shares`, its weights in
        the loss.
        """
        import torch

        if self._made_for != (*shape, len(shares)):
            self._make(shape, len(shares))
            self._made_for = (*shape, len(shares))
        for stage in self._stages:
            stage.observer = observer
        losses: list[torch.Tensor] = []
        given = dict(inputs)
        ids = [given.pop("input_ids")] if self.is_first else []
        # The tensor is on the host, so that reading a share does not wait for the device.
        target = torch.tensor(shares, dtype=torch.float64, device="cpu") if self.is_last else None
        more: dict[str, Any] = {"return_outputs": False} if self._may_drop_outputs else {}
        self._schedule.step(*ids, target=target, losses=losses, **more, **given)
        if self._wish.tensor > 1 and self._wish.weights == "alone":
            sum_parts_of_gradients(self.model)
        self._sum_shared_gradient(observer)
        return losses

    def _sum_shared_gradient(self, observer: Observer) -> None:
        """Sum the gradients of a tied embedding and head, which the first and the last stage share."""
        import torch.distributed as dist

        shared = shared_weight(self.model)
        if shared is None or shared.grad is None:
            return
        observer.phase("update")
        gradient: Any = shared.grad
        # A sharded gradient is a DTensor; each rank sums its own part.
        dist.all_reduce(getattr(gradient, "_local_tensor", gradient), group=self._ends)

    def clip(self, weights: Iterable[torch.nn.Parameter], largest: float) -> None:
        """Scale the gradients of all stages so that their total L2 norm is at most `largest`."""
        trained = [weight for weight in weights if weight.grad is not None]
        scale(trained, largest, self.norm_of_all(trained))

    def norm_of_all(self, trained: Iterable[torch.nn.Parameter]) -> torch.Tensor:
        """Return the L2 norm of the gradients of all stages; `trained` are this stage's weights."""
        import torch.distributed as dist

        elsewhere = shared_weight(self.model) if self.is_last else None  # counted by the first stage
        own = [weight.grad for weight in trained if weight is not elsewhere and weight.grad is not None]
        square: torch.Tensor = tensor_parts().whole(tensor_parts().total_norm(own)) ** 2
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def in_turn(self) -> StagesInTurn:
        """Return a model for evaluation that runs the pipeline stages one after the other, without a
        schedule.
        """
        return StagesInTurn(self)

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the loss of a batch (B, S) on the device, in the process with the last pipeline stage; 0 in
        the others. All processes call it.
        """
        import torch
        import torch.distributed as dist

        ids = batch["input_ids"]
        inputs = self.inputs(batch)
        inputs.pop("input_ids", None)
        loss = torch.zeros((), device=ids.device)
        for number, part in self._parts.items():
            given = ids if number == 0 else self._receive(ids, number)
            out: torch.Tensor = part(given, **inputs)
            if number == self._wish.all_stages - 1:
                loss = out
            else:
                dist.send(out, self._rank_of(number + 1), group=self.group)
        return loss

    def _receive(self, ids: torch.Tensor, stage: int) -> torch.Tensor:
        """Receive the hidden states that the previous pipeline stage computed for these token ids."""
        import torch
        import torch.distributed as dist

        shape = (*ids.shape, self.model.config.hidden_size)
        given = torch.empty(shape, dtype=self._dtype, device=ids.device)
        dist.recv(given, self._rank_of(stage - 1), group=self.group)
        return given

    def _rank_of(self, stage: int) -> int:
        """Return the rank of the process that runs a pipeline stage, within the stages of this copy of the
        model.
        """
        import torch.distributed as dist

        return dist.get_process_group_ranks(self.group)[stage % self._wish.stages]

    @property
    def _dtype(self) -> torch.dtype:
        """Return the dtype of the hidden states that stages exchange."""
        import torch

        dtype: torch.dtype = (
            getattr(torch, self._wish.dtype) if self._wish.dtype else next(self.model.parameters()).dtype
        )
        return dtype

    def tell_losses(self, losses: Sequence[torch.Tensor], steps: int) -> list[float]:
        """Send the losses of the last `steps` steps from the last pipeline stage to all, and return them."""
        import torch
        import torch.distributed as dist

        weight = next(self.model.parameters())
        # Only the last stage has losses, so a sum spreads them to all.
        values = torch.zeros(steps, dtype=torch.float32, device=weight.device)
        if losses:
            values.copy_(torch.stack([loss.float() for loss in losses]))
        dist.all_reduce(values, group=self.group)
        return [float(value) for value in values]

    def _make(self, shape: tuple[int, int], micro_batches: int) -> None:
        """Create torch's pipeline schedule for batches of this shape (B, S), split into several
        micro-batches.
        """
        import torch
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
        from torch.utils._python_dispatch import _disable_current_modes

        weight = next(self.model.parameters())
        piece = (shape[0] // micro_batches, shape[1])
        self._schedule, self._stages = None, []  # free the buffers for the previous batch shape
        with _disable_current_modes(), torch.device("meta"):  # a simulation would count these tensors
            ids = torch.empty(piece, dtype=torch.long)
            hidden = torch.empty(*piece, self.model.config.hidden_size, dtype=self._dtype, requires_grad=True)
            loss = torch.empty((), requires_grad=True)
            last = self._wish.all_stages - 1
            for number, part in self._parts.items():
                stage: Any = _stage_class()(
                    part,
                    number,
                    self._wish.all_stages,
                    weight.device,
                    input_args=(ids if number == 0 else hidden,),
                    output_args=(loss if number == last else hidden,),
                    group=self.group,
                )
                stage.around, stage.hidden = self._around, None if number == last else hidden
                self._stages.append(stage)
        kind: Any = get_schedule_class(self._wish.schedule)
        stages = self._stages if issubclass(kind, PipelineScheduleMulti) else self._stages[0]
        # The shares already sum to the whole loss, so torch must not divide gradients.
        self._schedule = kind(stages, micro_batches, loss_fn=_times_share, scale_grads=False)
        # Only newer versions of torch have this argument.
        self._may_drop_outputs = "return_outputs" in inspect.signature(self._schedule.step).parameters


class StagesInTurn:
    """A callable that evaluates a model in pipeline stages: the stages run one after the other, without a
    backward pass.
    """

    def __init__(self, passes: StagePasses) -> None:
        self._passes = passes

    @property
    def training(self) -> bool:
        """Return True if the pipeline's stages are in training mode."""
        return bool(self._passes.model.training)

    def train(self, mode: bool = True) -> None:
        """Set the pipeline's stages to training or evaluation mode."""
        self._passes.model.train(mode)

    def eval(self) -> None:
        """Set the pipeline's stages to evaluation mode, in which dropout is off."""
        self.train(False)

    def __call__(self, **batch: Any) -> torch.Tensor:
        """Return the loss of a batch on the device in the last stage, and 0 in the others."""
        return self._passes.forward(batch)


def _group_of_ends(wish: ParallelWish, all_stages: Any) -> Any:
    """Return the process group of the first and the last stage of this copy of the model. All processes
    create the groups of all copies, in one order."""
    import torch.distributed as dist

    if wish.stages == 2:
        return all_stages
    width = wish.ranks // wish.stages
    last = wish.ranks - width
    groups = [dist.new_group([first, first + last]) for first in range(width)]
    return groups[dist.get_rank() % width]


def _times_share(loss: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return a micro-batch's mean loss times its fraction of the batch's labels that count."""
    return loss * share.item()


def _stage_class() -> type[PipelineStage]:
    from torch.distributed.pipelining import PipelineStage

    class ObservedStage(PipelineStage):
        """Subclass of torch's `PipelineStage` that notifies an observer of forward and backward phases, and
        runs under the Setup's autocast.
        """

        observer: Any
        around: Any
        hidden: Any

        def forward_one_chunk(self, *given: Any, **more: Any) -> Any:
            """Run the forward pass of one micro-batch in this pipeline stage."""
            self.observer.phase("forward")
            try:
                with self.around():
                    out = super().forward_one_chunk(*given, **more)
            except RuntimeError as error:  # torch wraps errors of the model in a RuntimeError
                if isinstance(error.__cause__, RecipeError):
                    raise error.__cause__ from None
                raise
            expected = self.hidden
            if expected is not None and (out.shape, out.dtype) != (expected.shape, expected.dtype):
                raise RecipeError(
                    f"A stage passes on {tuple(out.shape)} numbers of {out.dtype}, and the next one expects "
                    f"{tuple(expected.shape)} of {expected.dtype}. Try 'fsdp' in place of stages."
                )
            return out

        def backward_one_chunk(self, *given: Any, **more: Any) -> Any:
            """Run the backward pass of one micro-batch in this pipeline stage, either the whole pass or only
            the gradient of the inputs.
            """
            self.observer.phase("backward")
            return super().backward_one_chunk(*given, **more)

        def backward_weight_one_chunk(self, *given: Any, **more: Any) -> Any:
            """Run the part of one micro-batch's backward pass that computes the gradients of weights."""
            self.observer.phase("backward")
            return super().backward_weight_one_chunk(*given, **more)

    return ObservedStage


def join(pieces: Sequence[Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Join `count` micro-batches of equal length and sample count into one host batch, as pipeline stages
    need it.

    At the end of an epoch samples or micro-batches may be missing. Missing samples are replaced by rows
    without labels in the loss. A missing micro-batch is replaced by one with a loss that is multiplied by 0.
    """
    import torch

    if len(pieces) == count == 1:
        return dict(pieces[0])
    shapes = [tuple(piece["input_ids"].shape) for piece in pieces]
    samples, length = (max(sizes) for sizes in zip(*shapes, strict=True))
    masked = any("attention_mask" in piece for piece in pieces) or any(size < length for _, size in shapes)
    full: list[dict[str, Any]] = []
    for piece in pieces:
        more = {"attention_mask": torch.ones_like(piece["input_ids"])} if masked else {}
        full.append(
            {name: _fill_up(name, value, samples, length) for name, value in {**more, **piece}.items()}
        )
    idle = {**full[0], "labels": full[0]["labels"].clamp(min=0)}  # a mean over no labels would be NaN
    full += [idle] * (count - len(full))
    return {
        name: torch.cat([piece[name] for piece in full]) if torch.is_tensor(value) else value
        for name, value in full[0].items()
    }


def _fill_up(name: str, value: Any, samples: int, length: int) -> Any:
    """Pad a (B, S) tensor to this number of samples and this length; return other values unchanged."""
    import torch

    if not torch.is_tensor(value):
        return value
    if value.dim() > 1 and name in FILL and value.shape[1] < length:
        value = torch.nn.functional.pad(value, (0, length - value.shape[1]), value=FILL[name])
    if len(value) < samples:
        again = value[:1].expand(samples - len(value), *value.shape[1:])
        value = torch.cat([value, torch.full_like(again, FILL[name]) if name == "labels" else again])
    return value
