"""Gradients of a few samples, together, in another order and in pieces, that leave no trace in the model.

The model trains while they are taken, for what a batch norm, a router or a term of the user's own does is
another thing in evaluation. Only its dropout is off. A mask is drawn for all samples of a call at once, so
those of a piece could not be made those of the whole; and a mask is drawn for each sample by itself, so no
dropout makes a mean over samples something else. All other draws begin from the same state in each run.

Where there is no memory for them, or parameters are shards, losses are compared, under weights with noise.
Gradients come from `torch.autograd.grad`, which adds nothing to `.grad` and calls no hook of a parameter: not
those that update weights within a backward pass, nor those of DDP. Layers that are compiled run as written.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from snugfit.job.batch_layout import BatchLayout, map_leaves
from snugfit.step.wishes.mesh.spread_tensors import mesh
from snugfit.training.rng import all_rng_states, preserve_rng, restore_all_rng_states

if TYPE_CHECKING:
    import torch

MOST_VALUES = 1 << 22
"""Of the gradients that are compared, unless the smallest alone has more: three times 16 MiB in fp32. The
smallest parameters are taken first: norms, biases, routers and heads, of all layers."""

DRAWS = ("Dropout", "DropPath", "StochasticDepth")
"""In the names of layers that drop by chance in training alone."""

RATES = ("drop", "zoneout")
"""In the names of plain numbers by which modules drop: `attention_dropout`, `drop_path_rate`, `layerdrop`."""

NOISE = 0.3
"""Standard deviation of what is added to weights where losses are compared."""

LOSS_SCALE = 1024.0
"""Keeps gradients in fp16 from becoming 0."""

PieceLoss = Callable[[Any, dict[str, Any], dict[str, Any]], "torch.Tensor | None"]
"""Of a model, a piece and the whole batch, on the device: what the front-end adds to the loss for that piece,
(); None for a piece in which nothing counts."""


class Taken(NamedTuple):
    """What some pieces of a batch come to."""

    loss: float
    gradients: Sequence[torch.Tensor]
    """Of the parameters that are compared; none where only losses are taken."""


class CutRuns:
    """Runs of a few samples of one batch."""

    def __init__(
        self, model: torch.nn.Module, batch: Mapping[str, Any], layout: BatchLayout, loss_of: PieceLoss
    ) -> None:
        self._model, self._batch, self._layout, self._loss_of = model, batch, layout, loss_of
        self.device = next(model.parameters()).device
        self.names, self._parameters = _compared_weights(model)
        self.in_16_bit = False
        """True when a run has computed anything with so few digits."""

    @property
    def has_few_digits(self) -> bool:
        """True where a run computed with 16 bits, or products of fp32 matrices with tf32."""
        import torch

        tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        return self.in_16_bit or (self.device.type == "cuda" and tf32)

    @property
    def can_take_gradients(self) -> bool:
        """True where the parameters are whole: shards have hooks that wait for a step's own passes."""
        return bool(self._parameters) and all(mesh(weight) is None for weight in self._model.parameters())

    def take(self, *orders: Sequence[Sequence[int]], gradients: bool = True) -> list[Taken]:
        """Run each of the orders, which are samples by piece; without gradients, where losses have to show
        the same, under other weights. Model, gradients and random generators are afterwards as they were."""
        import torch

        with (
            preserve_rng(self.device),
            torch.set_grad_enabled(gradients),
            torch.compiler.set_stance("force_eager"),
            _as_it_was(self._model),
            contextlib.nullcontext() if gradients else _shaken(self._parameters),
            _without_dropout(self._note_dtype),
        ):
            begin = all_rng_states(self.device)
            taken: list[Taken] = []
            for pieces in orders:
                restore_all_rng_states(begin, self.device)
                taken.append(self._take(pieces, gradients))
            return taken

    def _take(self, pieces: Sequence[Sequence[int]], gradients: bool) -> Taken:
        import torch

        whole = self._samples([index for piece in pieces for index in piece])
        loss, total = 0.0, [torch.zeros_like(weight) for weight in self._parameters if gradients]
        for piece in pieces:
            value = self._loss_of(self._model, self._samples(piece), whole)
            if value is None:
                continue
            loss += float(value.detach())
            if not gradients:
                continue
            gradients_of_piece = torch.autograd.grad(value * LOSS_SCALE, self._parameters, allow_unused=True)
            for held, gradient in zip(total, gradients_of_piece, strict=True):
                if gradient is not None:
                    held.add_(gradient)
        return Taken(loss, total)

    def _note_dtype(self, result: Any) -> None:
        import torch

        if isinstance(result, torch.Tensor) and result.dtype in (torch.float16, torch.bfloat16):
            self.in_16_bit = True

    def _samples(self, indices: Sequence[int]) -> dict[str, Any]:
        import torch

        parts = [self._layout.part(self._batch, index, index + 1) for index in indices]
        return map_leaves(
            self._layout.join(parts),
            lambda _, value: value.to(self.device) if torch.is_tensor(value) else value,
        )


def give_back_unused(model: torch.nn.Module) -> None:
    """Give memory that no tensor holds back to the GPU of this model, for a step may need all of it."""
    import torch

    if next(model.parameters()).device.type == "cuda":
        torch.cuda.empty_cache()


def distances(one: Taken, other: Taken) -> list[tuple[float, float]]:
    """Return the norm of the difference of two gradients, and of the larger one, for each parameter."""
    import torch

    rows = [
        torch.stack([(a.float() - b.float()).norm(), torch.maximum(a.float().norm(), b.float().norm())])
        for a, b in zip(one.gradients, other.gradients, strict=True)
    ]
    return [(apart, size) for apart, size in torch.stack(rows).tolist()]


def is_number(taken: Taken) -> bool:
    """Return True where the loss and all gradients are numbers."""
    return math.isfinite(taken.loss) and all(bool(value.isfinite().all()) for value in taken.gradients)


def _compared_weights(model: torch.nn.Module) -> tuple[list[str], list[torch.nn.Parameter]]:
    """Return the names of the parameters whose gradients are compared, and the parameters."""
    named = sorted(
        ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad),
        key=lambda pair: pair[1].numel(),
    )
    sizes = accumulate(weight.numel() for _, weight in named)
    count = max(1, sum(values <= MOST_VALUES for values in sizes))
    return [name for name, _ in named[:count]], [weight for _, weight in named[:count]]


# ---- the model as it was ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Put the model into training, without dropout. Restore its buffers and the plain attributes of its
    modules, their modes too, at the end."""
    import torch

    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with contextlib.ExitStack() as unchanged:
        for module in model.modules():
            unchanged.enter_context(unchanged_attributes(module))
        if not model.training:  # else what is frozen stays so
            model.train()
        for module in model.modules():
            _drop_nothing(module)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _drop_nothing(module: torch.nn.Module) -> None:
    """Set the rates of a module to 0, which layers that are computed again and kernels of ours read, too."""
    is_layer = any(name in type(module).__name__ for name in DRAWS)
    if is_layer:
        module.training = False
    for name, value in vars(module).items():
        is_rate = any(word in name for word in RATES) or (is_layer and name in ("p", "drop_prob"))
        if is_rate and isinstance(value, float):
            vars(module)[name] = 0.0


@contextlib.contextmanager
def _shaken(weights: Sequence[Any]) -> Iterator[None]:
    """Add noise to the weights, also to those of shards, so that the losses of samples differ in a new model,
    too. Restore their bits at the end."""
    import torch

    parts = [weight.to_local() if mesh(weight) is not None else weight for weight in weights]
    with torch.no_grad():
        before = [part.detach().clone() for part in parts]
        for number, part in enumerate(parts):  # each by itself: ranks have shards of other sizes
            noise = torch.randn(part.shape, generator=torch.Generator().manual_seed(number))
            part.add_(noise.to(part), alpha=NOISE)
        try:
            yield
        finally:
            for part, value in zip(parts, before, strict=True):
                part.copy_(value)


@contextlib.contextmanager
def _without_dropout(note: Callable[[Any], None]) -> Iterator[None]:
    """Make torch's functions drop nothing: models call them with rates of a config, and have no layer. `note`
    takes each result."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Undropped(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            keywords = dict(keywords or {})
            name = getattr(function, "__name__", "")
            if "dropout" in name and "native" not in name:
                return arguments[0] if arguments else keywords["input"]
            if function is torch.nn.functional.scaled_dot_product_attention and len(arguments) > 4:
                arguments = (*arguments[:4], 0.0, *arguments[5:])
            elif keywords.get("dropout_p"):
                keywords["dropout_p"] = 0.0
            result = function(*arguments, **keywords)
            note(result)
            return result

    with Undropped():
        yield


@contextlib.contextmanager
def unchanged_attributes(holder: Any) -> Iterator[None]:
    """What an object counts and collects within it is afterwards forgotten: a Trainer's own loss may gather
    figures for its log."""
    containers = [
        (value, _copy_containers(value))
        for name, value in vars(holder).items()
        if isinstance(value, dict | list) and not name.endswith("dataset")
    ]
    with patch.dict(vars(holder)):
        try:
            yield
        finally:
            for value, content in containers:  # others may hold it too
                value.clear()
                (value.update if isinstance(value, dict) else value.extend)(content)


def _copy_containers(value: Any) -> Any:
    """Dicts and lists once more, of the same classes; what they hold stays what it is."""
    if isinstance(value, dict | list):
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        value = copy(value)
        for key, item in pairs:
            value[key] = _copy_containers(item)
    return value
