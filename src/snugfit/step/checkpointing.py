"""Activation checkpointing: layers keep their input and compute the rest again in the backward pass.

All checkpoints are non-reentrant (`torch.utils.checkpoint`, `use_reentrant=False`). So hooks, keyword
arguments and unused inputs work, and peft needs no input that requires a gradient.

If a model has transformers' own switch, it recomputes single layers, as for transformers' users. torch's own
checkpoint wrapper wraps all other layers. Among these are layers with a replaced forward pass, since the
switch may be inside of the replacement.

No library recomputes spans of several layers. A model calls its layers one by one, each with arguments of its
own (a sliding layer's mask differs from its neighbour's). So the first layers of a span only record their
call and return their input. The last layer runs all recorded calls inside one checkpoint. That is correct
only if every layer returns one tensor, which the model passes to the next layer unchanged. So each layer of a
span checks that its input is the tensor that the layer before it returned. Any other model is refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError
from snugfit.job.build import instantiate
from snugfit.job.own_checkpointing import NAMES
from snugfit.step.own_forward import forward_of
from snugfit.step.selective import checkpoint_arguments
from snugfit.techniques import roster
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import CheckpointWish

ELSEWHERE = "of_another_stage"
"""Name of an attribute of a placeholder module, which replaces a layer of another pipeline stage."""


def checkpoint_layers(model: torch.nn.Module, wish: CheckpointWish) -> None:
    """Make the chosen layers of `model` keep only their inputs, in place. Raises `RecipeError` if the model
    has no stack of layers, or its layers cannot be recomputed in groups (spans).
    """
    stacks = layer_stacks(model)
    if not stacks:
        raise RecipeError(
            f"{type(model).__name__} has no stack of repeated layers, so nothing can be checkpointed. Try "
            f"{roster.plain(Slot.CHECKPOINTING).name!r}."
        )
    for stack in stacks:
        chosen = [[stack[index] for index in span] for span in wish.cut(len(stack))]
        if all(len(span) == 1 for span in chosen):
            _checkpoint_single(
                model, [span[0] for span in chosen], checkpoint_arguments(wish.keep, wish.keep_drawn)
            )
        else:
            _checkpoint_spans(model, chosen)


def layer_stacks(model: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """Return the model's stacks of layers, outermost only.

    A stack is a list of at least two modules of one class. Layers of transformers may have several classes
    (Jamba's attention and Mamba layers). Stacks with less than a tenth of the largest stack's parameters are
    left out.
    """
    import torch

    stacks: list[tuple[int, list[torch.nn.Module]]] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        layers = [layer for layer in module if not hasattr(layer, ELSEWHERE)]
        # A pipeline stage may have a single layer of a longer stack.
        if len(module) < 2 or not layers or not _are_alike(layers):
            continue
        inside.update(id(child) for layer in layers for child in layer.modules())
        stacks.append((sum(map(_elements, module.parameters())), layers))
    largest = max((size for size, _ in stacks), default=0)
    return [layers for size, layers in stacks if size and size * 10 >= largest]


def _elements(parameter: torch.nn.Parameter) -> int:
    """Count the elements of a weight, also of one that DeepSpeed partitions (`zero.Init`)."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _are_alike(layers: Sequence[torch.nn.Module]) -> bool:
    if len({type(layer) for layer in layers}) == 1:
        return True
    own = _of_transformers("modeling_layers", "GradientCheckpointingLayer")
    return all(isinstance(layer, own) for layer in layers)


def _of_transformers(module: str, name: str) -> Any:
    """Return a class of transformers for `isinstance` checks; an empty tuple if its module is not imported
    yet.
    """
    return getattr(sys.modules.get(f"transformers.{module}"), name, ())


def _checkpoint_single(
    model: torch.nn.Module, layers: list[torch.nn.Module], more: Mapping[str, Any]
) -> None:
    holders = _switch_holders(model, layers)
    replaced = any("forward" in vars(layer) for layer in layers)
    if replaced or not holders or not all(hasattr(layer, "gradient_checkpointing") for layer in layers):
        for layer in layers:
            layer.forward = _recompute(forward_of(layer), more)
        return
    # Layers of an earlier stack are switched on already, and stay so.
    before = {id(module) for module in model.modules() if getattr(module, "gradient_checkpointing", False)}
    for holder in holders:
        try:
            _enable(holder)({"use_reentrant": False, **more})
        except ValueError as error:
            raise RecipeError(
                f"{str(error).rstrip('.')}, says transformers. Try {roster.plain(Slot.CHECKPOINTING).name!r}."
            ) from None
    # The switch also turns on layers that were not chosen, such as the others of every second layer.
    chosen = {id(layer) for layer in layers}
    own = {id(layer) for stack in layer_stacks(model) for layer in stack}
    for module in model.modules():
        if id(module) in own and id(module) not in chosen | before:
            module.gradient_checkpointing = False  # type: ignore[assignment]


def _switch_holders(model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the model, or its outermost submodules, on which transformers' checkpointing of these layers can
    be turned on.

    A user's module around a model of transformers has no switch itself. The list is empty if a layer is in no
    such part.
    """
    holders: list[torch.nn.Module] = []
    outside = {id(layer) for layer in layers}
    for module in model.modules():
        if outside and _enable(module) is not None and outside & (inside := {*map(id, module.modules())}):
            holders.append(module)
            outside -= inside
    return [] if outside else holders


def _enable(module: torch.nn.Module) -> Any:
    """Return the method of a module that turns on transformers' checkpointing; None if it has none."""
    return next(
        (getattr(module, f"{name}_enable") for name in NAMES if hasattr(module, f"{name}_enable")), None
    )


def _recompute(forward: Callable[..., Any], more: Mapping[str, Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **keywords: Any) -> Any:
        import torch
        from torch.utils.checkpoint import checkpoint

        # Without gradients nothing is saved, so there is nothing to recompute.
        if not torch.is_grad_enabled():
            return forward(*arguments, **keywords)
        arguments, keywords = without_cache(arguments, keywords)
        return checkpoint(forward, *arguments, use_reentrant=False, **more, **keywords)

    return run


_CACHES: Mapping[str, Any] = {
    "use_cache": False,
    "past_key_values": None,
    "past_key_value": None,
    "layer_past": None,
}
"""Arguments of a layer that pass a key-value cache, each with the value for no cache."""


def without_cache(
    arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments with None in place of key-value caches, since the recomputation would write
    these again. Some models pass a cache by position (GPT-2) or under another name (XLM).
    """
    cache = _of_transformers("cache_utils", "Cache")
    uncached = tuple(None if isinstance(argument, cache) else argument for argument in arguments)
    named = {name: None if isinstance(value, cache) else value for name, value in keywords.items()}
    return uncached, {name: _CACHES.get(name, value) for name, value in named.items()}


def _checkpoint_spans(model: torch.nn.Module, chosen: Sequence[Sequence[torch.nn.Module]]) -> None:
    spans = []
    for layers in chosen:
        span = _Span([forward_of(layer) for layer in layers], type(layers[0]).__name__)
        for index, layer in enumerate(layers):
            layer.forward = span.member(index)
        spans.append(span)
    model.forward = _blaming(spans, forward_of(model))


def _blaming(spans: Sequence[_Span], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's forward function, wrapped so that an exception between layers that are recomputed
    together becomes a `RecipeError`. Such a model passes more than one tensor from layer to layer.
    """

    @functools.wraps(forward)
    def run(*arguments: Any, **keywords: Any) -> Any:
        try:
            return forward(*arguments, **keywords)
        except RecipeError:
            raise
        except Exception:
            # A span with recorded calls has not reached its last layer, so the model failed between its
            # layers.
            half_done = [span for span in spans if span.noted]
            for span in half_done:
                span.noted.clear()
            if half_done:
                raise half_done[0].refusal() from None
            raise

    return run


class _Span:
    """Consecutive layers that activation checkpointing recomputes together. The call of the last one runs all
    of them inside one checkpoint.
    """

    def __init__(self, forwards: list[Callable[..., Any]], name: str) -> None:
        self.forwards, self.name = forwards, name
        self.noted: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.handed_on = 0  # id of the passed tensor, which is not kept alive

    def refusal(self) -> RecipeError:
        """Return the error for a model whose consecutive layers cannot be recomputed as one checkpoint."""
        return RecipeError(
            f"{self.name} passes on more than its hidden states, or the model changes them between layers. "
            "So its layers cannot be recomputed several at a time. Choose a checkpointing technique that "
            "recomputes each layer on its own: 'every_layer'."
        )

    def member(self, index: int) -> Callable[..., Any]:
        """Return the forward function that replaces that of layer `index` of the span."""

        def run(*given: Any, **keywords: Any) -> Any:
            # A pass that failed midway may have left calls.
            if index == 0:
                self.noted.clear()
            if not given or len(self.noted) != index or (index and id(given[0]) != self.handed_on):
                self.noted.clear()
                raise self.refusal()
            hidden, *arguments = given
            self.handed_on = id(hidden)
            self.noted.append(without_cache(tuple(arguments), keywords))
            if index < len(self.forwards) - 1:
                return hidden
            # The list is copied, because the recomputation needs the calls after it is cleared.
            calls = list(self.noted)
            self.noted.clear()
            return self._run(hidden, calls)

        return run

    def _run(self, hidden: torch.Tensor, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
        import torch
        from torch.utils.checkpoint import checkpoint

        def all_layers(value: torch.Tensor) -> torch.Tensor:
            for forward, (arguments, keywords) in zip(self.forwards, calls, strict=True):
                value = forward(value, *arguments, **keywords)
                if not isinstance(value, torch.Tensor):
                    raise self.refusal()
            return value

        if not torch.is_grad_enabled():
            return all_layers(hidden)
        return checkpoint(all_layers, hidden, use_reentrant=False)


def layer_names(job: Job) -> tuple[str, ...]:
    """Return the class names of the repeated layers of this job's model, sorted."""
    import torch

    with torch.device("meta"):
        model = instantiate(job, dtype="float32", attention="sdpa")
    return tuple(sorted({type(layer).__name__ for layers in layer_stacks(model) for layer in layers}))
