"""A decoder divided into pipeline stages: each process keeps its layers of the model, and the modules that
only they need.

The model stays transformers' own, with its own forward pass. A layer of another stage is replaced by a module
that returns its input. So layers keep their numbers, by which some models look up a layer's mask, and weights
their names, which checkpoints use. The first stage keeps the embedding. The others begin with the previous
stage's results, which transformers calls `inputs_embeds`. The last one keeps the final norm and the head, and
returns the loss.

If the head is tied to the embedding, the first and the last stage have the matrix. Megatron does the same
(Shoeybi et al., arXiv 1909.08053). The first has it under the head's name too, the last under the
embedding's. So it has all its names of the whole model. Both add up its gradients (`pipeline.py`), and so
their copies stay the same.

A process may have several stages, between which others have theirs. Each is then a shallow copy of the model
with the same layer objects, of which it runs its own.

Every process builds the whole model on the host, from the same seed. So all stages together have the weights
that one process would have; the device holds only its own part.
"""

from __future__ import annotations

import copy
import functools
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from snugfit.errors import RecipeError
from snugfit.step.checkpointing import ELSEWHERE
from snugfit.step.loss import loss_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from snugfit.features.distributed.fields import ParallelWish

EMBEDDING, HEAD = "embed_tokens", "lm_head"

PARTS = (EMBEDDING, "layers", "norm")
"""Names of a decoder's parts that are divided over pipeline stages, as in transformers' Llama and most other
models.
"""

_TIED = "shares_its_embedding"


@functools.cache
def _elsewhere() -> Any:
    """Return the class of modules that replace a layer of another stage."""
    from torch import nn

    class Elsewhere(nn.Module):
        """Module in place of a layer of another pipeline stage: it returns its input. Its `weight`, if any,
        is shared with a module of this stage (tied head).
        """

        def __init__(self, weight: Any = None) -> None:
            super().__init__()
            setattr(self, ELSEWHERE, True)
            if weight is not None:
                self.weight = weight

        def forward(self, hidden_states: Any, *arguments: Any, **keywords: Any) -> Any:
            """Return the hidden states unchanged, in place of a layer of another pipeline stage."""
            return hidden_states

    return Elsewhere


def is_elsewhere(module: Any) -> bool:
    """Return True if this module replaces a layer of another stage."""
    return bool(getattr(module, ELSEWHERE, False))


def is_stage(model: Any) -> bool:
    """Return True if the model is a pipeline stage: it has only some of the layers, and other processes have
    the rest.
    """
    return any(map(is_elsewhere, model.modules()))


def position_of(wish: ParallelWish, rank: int) -> int:
    """Return the position of a rank, from 0, among the pipeline ranks of its copy of the model."""
    # Stages are the first axis of the device mesh.
    return rank // (wish.ranks // wish.stages)


def stages_at(position: int, wish: ParallelWish) -> range:
    """Return the indices of the pipeline stages that run in the process at this position of the pipeline."""
    return range(position, wish.all_stages, wish.stages)


def layers_at(position: int, wish: ParallelWish, layers: int) -> list[int]:
    """Return the indices of the layers, of `layers` in all, that the process at this pipeline
    position has.
    """
    return [one for stage in stages_at(position, wish) for one in layers_of(stage, wish.all_stages, layers)]


def layers_of(stage: int, stages: int, layers: int) -> range:
    """Return the layers of a stage, when `layers` are divided as evenly as possible. The first stages have
    the extra layers.
    """
    short, longer = divmod(layers, stages)
    starts = [index * short + min(index, longer) for index in range(stages + 1)]
    return range(*list(pairwise(starts))[stage])


def keep_stage(wish: ParallelWish, model: Any) -> Any:
    """Return the whole model with only this process's stages left. Raises `RecipeError` for a model whose
    structure cannot be cut.
    """
    import torch.distributed as dist

    position = position_of(wish, dist.get_rank())
    decoder = _decoder_of(model)
    own = layers_at(position, wish, len(decoder.layers))
    for number in range(len(decoder.layers)):
        if number in own:
            decoder.layers[number].register_forward_hook(_one_tensor)
        else:
            decoder.layers[number] = _elsewhere()()
    is_first, is_last = position == 0, position == wish.stages - 1
    embedding, head = decoder.embed_tokens.weight, getattr(model, HEAD).weight
    tied = embedding if embedding is head else None
    if not is_first:
        # The first and the last stage both have a tied matrix under both of its names.
        decoder.embed_tokens = _elsewhere()(tied if is_last else None)
    if not is_last:
        decoder.norm = _elsewhere()()
        setattr(model, HEAD, _elsewhere()(tied if is_first else None))
    setattr(model, _TIED, tied is not None)
    if wish.chunks == 1:
        model.forward = _Stage(model, decoder, is_first=is_first, is_last=is_last)
    return model


def parts_of(wish: ParallelWish, model: Any) -> dict[int, Any]:
    """Return the model's pipeline stages in this process by stage number, if it has several. A stage in DDP
    or FSDP2 is returned as its wrapper.
    """
    import torch.distributed as dist

    if model not in _PARTS_OF:
        numbers = stages_at(position_of(wish, dist.get_rank()), wish)
        _PARTS_OF[model] = {number: _part_of(wish, model, number) for number in numbers}
    return _PARTS_OF[model]


_PARTS_OF: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()


def _part_of(wish: ParallelWish, model: Any, stage: int) -> Any:
    """Return one pipeline stage of a model as a shallow copy, which shares the model's modules."""
    from torch import nn

    whole = _decoder_of(model)
    own = layers_of(stage, wish.all_stages, len(whole.layers))
    is_first, is_last = stage == 0, stage == wish.all_stages - 1
    part, decoder = _shallow_copy(model), _shallow_copy(whole)
    setattr(part, model.base_model_prefix, decoder)
    decoder.layers = nn.ModuleList(
        layer if number in own else _elsewhere()() for number, layer in enumerate(whole.layers)
    )
    if not is_first and not (is_last and is_tied(model)):  # its embedding has the head's name
        decoder.embed_tokens = _elsewhere()()
    if not is_last:
        decoder.norm = _elsewhere()()
        if not (is_first and is_tied(model)):
            setattr(part, HEAD, _elsewhere()())
    part.forward = _Stage(part, decoder, is_first=is_first, is_last=is_last)
    return part


def _shallow_copy(module: Any) -> Any:
    """Return a copy of a module that shares its submodules, each of which may be replaced."""
    same = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):  # dicts of its submodules, parameters and hooks
            same.__dict__[name] = copy.copy(value)
    return same


def is_tied(model: Any) -> bool:
    """Return True if the embedding in the first stage and the head in the last one share one weight."""
    return bool(getattr(model, _TIED))


def shared_weight(model: Any) -> torch.nn.Parameter | None:
    """Return the matrix of a tied embedding and head, if another stage has it too; else None."""
    copies = (getattr(module, "weight", None) for module in model.modules() if is_elsewhere(module))
    return next((weight for weight in copies if weight is not None), None)


class _Stage:
    """Replacement of a model's forward pass by that of one pipeline stage. It is not an `nn.Module`, so the
    model gets no additional submodule.
    """

    def __init__(self, model: Any, decoder: Any, *, is_first: bool, is_last: bool) -> None:
        self._decoder, self._is_first, self._is_last = decoder, is_first, is_last
        self._whole, self._name = model.forward, type(model).__name__
        self._given: Any = None
        if not is_first:
            decoder.layers[0].register_forward_pre_hook(self._check_given, with_kwargs=True)

    def __call__(self, given: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Return hidden states for the next stage, or the loss, from token ids or the previous stage's hidden
        states."""
        inputs["input_ids" if self._is_first else "inputs_embeds"] = self._given = given
        if self._is_last:
            return loss_of(self._whole(**inputs))
        # Only the last stage computes a loss.
        inputs.pop("labels", None)
        hidden: torch.Tensor = self._decoder(**inputs).last_hidden_state
        return hidden

    def _check_given(self, layer: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Raise `RecipeError` for a model that changes token embeddings before its first layer, because every
        stage would repeat the change.
        """
        given, self._given = self._given, None
        if (positional[0] if positional else named.get("hidden_states")) is not given:
            raise RecipeError(
                f"{self._name} cannot be cut into stages: it changes the embedded tokens before its first "
                "layer, and each stage would. Try 'fsdp'."
            )


def _decoder_of(model: Any) -> Any:
    from torch import nn

    decoder: Any = getattr(model, getattr(model, "base_model_prefix", ""), None)
    stack = getattr(decoder, "layers", None)
    can_be_cut = (
        decoder is not None
        and all(isinstance(getattr(decoder, part, None), nn.Module) for part in PARTS)
        and isinstance(stack, nn.ModuleList)
        and isinstance(getattr(model, HEAD, None), nn.Module)
    )
    if not can_be_cut:
        raise RecipeError(
            f"{type(model).__name__} cannot be cut into stages: only decoders are that have "
            f"{', '.join(PARTS)} and {HEAD}, as Llama, Mistral and Qwen do. Try 'fsdp'."
        )
    # Several stages would need other submodules with weights.
    more_parts = {name for name, child in decoder.named_children() if any(True for _ in child.parameters())}
    if more_parts - {*PARTS}:
        named = ", ".join(sorted(more_parts - {*PARTS}))
        raise RecipeError(
            f"{type(model).__name__} cannot be cut into stages: several would need {named}. Try 'fsdp'."
        )
    return decoder


def _one_tensor(layer: Any, given: Any, out: Any) -> None:
    """Forward hook that raises `RecipeError` if a layer returns more than one tensor."""
    import torch

    if not isinstance(out, torch.Tensor):
        raise RecipeError(
            f"{type(layer).__name__} passes on several values, and stages pass on one tensor. Try 'fsdp'."
        )
