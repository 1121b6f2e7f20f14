"""Gradients of a few samples, computed as one batch, in another order and in micro-batches. The model is
unchanged.

The model is in training mode, because a batch norm, a router or a custom term behaves differently in
evaluation. Only dropout is off. A mask is drawn for all samples of a call at once, so pieces could not
reproduce the whole's masks. Each sample has its own mask, so dropout never changes whether a loss is a mean
over samples. All other random draws start from the same state in each run.

Without enough memory, or for sharded parameters, losses are compared under noisy weights. Gradients come from
`torch.autograd.grad`, which adds nothing to `.grad` and calls no hooks of parameters. This excludes hooks
that update weights within a backward pass, and those of DDP. Compiled layers run eagerly.
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
from snugfit.step.clipping import tensor_parts
from snugfit.training.rng import all_rng_states, preserve_rng, restore_all_rng_states

if TYPE_CHECKING:
    import torch

MOST_VALUES = 1 << 22
"""Largest number of compared gradient values, unless the smallest parameter alone has more.

Three copies take 16 MiB each in fp32. The smallest parameters are taken first: norms, biases, routers and
heads, of all layers.
"""

DRAWS = ("Dropout", "DropPath", "StochasticDepth")
"""Parts of class names of layers that drop values at random in training."""

RATES = ("drop", "zoneout")
"""Parts of attribute names of drop rates: `attention_dropout`, `drop_path_rate`, `layerdrop`."""

NOISE = 0.3
"""Standard deviation of the noise added to weights when losses are compared."""

LOSS_SCALE = 1024.0
"""Factor that protects fp16 gradients from underflow."""

PieceLoss = Callable[[Any, dict[str, Any], dict[str, Any]], "torch.Tensor | None"]
"""The type of a function of a model, a piece and the whole batch on the device. It returns the piece's term
of the loss, a scalar tensor; None for a piece without counted items."""


class Taken(NamedTuple):
    """Loss and gradients, each summed over several micro-batches of a batch."""

    loss: float
    gradients: Sequence[torch.Tensor]
    """Gradients of the compared parameters; empty when only losses are computed."""


class CutRuns:
    """Computes losses and gradients of a few samples of one batch, in several orders and with several
    splits.
    """

    def __init__(
        self, model: torch.nn.Module, batch: Mapping[str, Any], layout: BatchLayout, loss_of: PieceLoss
    ) -> None:
        self._model, self._batch, self._layout, self._loss_of = model, batch, layout, loss_of
        self.device = next(model.parameters()).device
        self.names, self._parameters = _compared_weights(model)
        self.in_16_bit = False
        """True after any 16-bit result in a run."""

    @property
    def has_few_digits(self) -> bool:
        """True if a run computed in 16 bits, or multiplied fp32 matrices with tf32."""
        import torch

        tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        return self.in_16_bit or (self.device.type == "cuda" and tf32)

    @property
    def can_take_gradients(self) -> bool:
        """Return True for parameters without sharding; the hooks of shards expect the forward and backward
        passes of a full step.
        """
        return bool(self._parameters) and not any(map(tensor_parts().is_part, self._model.parameters()))

    def take(self, *orders: Sequence[Sequence[int]], gradients: bool = True) -> list[Taken]:
        """Return loss and gradients of the samples for each split into micro-batches. Without `gradients`,
        only losses are computed, under other weights. Model, gradients and random generators are restored
        afterwards.
        """
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

        # The weights of pieces refer to these samples, and not to the whole batch.
        whole = self._samples([index for piece in pieces for index in piece])
        loss, total = 0.0, [torch.zeros_like(weight) for weight in self._parameters if gradients]
        for piece in pieces:
            value = self._loss_of(self._model, self._samples(piece), whole)
            if value is None:
                continue
            loss += float(value.detach())
            if not gradients:
                continue
            # An expert, for example, may have no part in these samples.
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
    """Free the allocator's unused cached memory on this model's GPU, because a step may need it."""
    import torch

    if next(model.parameters()).device.type == "cuda":
        torch.cuda.empty_cache()


def distances(one: Taken, other: Taken) -> list[tuple[float, float]]:
    """For each parameter, return the norm of the difference of two gradients, and the norm of the larger
    one."""
    import torch

    rows = [
        torch.stack([(a.float() - b.float()).norm(), torch.maximum(a.float().norm(), b.float().norm())])
        for a, b in zip(one.gradients, other.gradients, strict=True)
    ]
    # One transfer for all parameters, since each would wait for the device.
    return [(apart, size) for apart, size in torch.stack(rows).tolist()]


def is_number(taken: Taken) -> bool:
    """Return True if the loss and all gradients are finite numbers."""
    return math.isfinite(taken.loss) and all(bool(value.isfinite().all()) for value in taken.gradients)


def _compared_weights(model: torch.nn.Module) -> tuple[list[str], list[torch.nn.Parameter]]:
    """Return the parameters whose gradients are compared: their names and the parameters themselves."""
    named = sorted(
        ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad),
        key=lambda pair: pair[1].numel(),
    )
    sizes = accumulate(weight.numel() for _, weight in named)
    count = max(1, sum(values <= MOST_VALUES for values in sizes))
    return [name for name, _ in named[:count]], [weight for _, weight in named[:count]]


# ---- restoring the model ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the model is in training mode without dropout, and is restored at the end.

    Its buffers and the plain attributes of its modules, including their modes, are restored.
    """
    import torch

    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with contextlib.ExitStack() as unchanged:
        for module in model.modules():
            unchanged.enter_context(unchanged_attributes(module))
        if not model.training:  # otherwise frozen modules stay in evaluation mode
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
    """Set the dropout rates of a module to 0, through the attributes that recomputed layers and snugfit's
    kernels also read.
    """
    is_layer = any(name in type(module).__name__ for name in DRAWS)
    if is_layer:
        module.training = False
    for name, value in vars(module).items():
        is_rate = any(word in name for word in RATES) or (is_layer and name in ("p", "drop_prob"))
        if is_rate and isinstance(value, float):
            vars(module)[name] = 0.0


@contextlib.contextmanager
def _shaken(weights: Sequence[Any]) -> Iterator[None]:
    """Context in which noise is added to the weights, including shards; their bits are restored at the end.

    The noise makes the losses of samples differ in a new model, too.
    """
    import torch

    parts = [tensor_parts().own(weight) for weight in weights]
    with torch.no_grad():
        before = [part.detach().clone() for part in parts]
        for number, part in enumerate(parts):  # one generator each: ranks have shards of different sizes
            noise = torch.randn(part.shape, generator=torch.Generator().manual_seed(number))
            part.add_(noise.to(part), alpha=NOISE)
        try:
            yield
        finally:
            for part, value in zip(parts, before, strict=True):
                part.copy_(value)


@contextlib.contextmanager
def _without_dropout(note: Callable[[Any], None]) -> Iterator[None]:
    """Context that disables dropout in torch's functions, which models also call with rates of a config and
    no layer.

    `note` is called with each result.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class Undropped(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            keywords = dict(keywords or {})
            name = getattr(function, "__name__", "")
            # `native_dropout` returns its mask as well.
            if "dropout" in name and "native" not in name:
                return arguments[0] if arguments else keywords["input"]
            # The fifth positional argument is `dropout_p`.
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
    """Context that restores the attributes of an object at the end, with the content of its dicts and lists.

    A Trainer's own loss may collect figures for its log, for example.
    """
    containers = [
        (value, _copy_containers(value))
        for name, value in vars(holder).items()
        # A list with a dataset may be long, and no loss changes it.
        if isinstance(value, dict | list) and not name.endswith("dataset")
    ]
    with patch.dict(vars(holder)):
        try:
            yield
        finally:
            for value, content in containers:  # other objects may share the container
                value.clear()
                (value.update if isinstance(value, dict) else value.extend)(content)


def _copy_containers(value: Any) -> Any:
    """Copy dicts and lists recursively, in the same classes; their other values are shared."""
    if isinstance(value, dict | list):
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        value = copy(value)
        for key, item in pairs:
            value[key] = _copy_containers(item)
    return value
