"""Matrices split over several ranks, which compute each layer together: torch's `parallelize_module`.

The model's own plan lists the cut of each matrix. transformers has one for most language models
(`base_model_tp_plan` of its config, and `_tp_plan` of its head). Here its words are mapped to torch's styles
of the same meaning. transformers has styles of its own behind these words too. They changed with almost every
release from 5.17 to 5.23, while torch's did not. One of them sums a gradient again for each micro-batch.

Each rank builds the model whole, with the same numbers, and keeps its part of each matrix (a `DTensor`). All
ranks hold, compute and update the modules outside of the plan alike. A matrix with a cut output ("colwise")
is followed by one with a cut input ("rowwise"), after which the parts are summed. That is an exchange in the
forward pass, and one in the backward pass for each matrix with a whole input. Between the two, activations
are a part.

Ranks of such a group draw the same random numbers. So dropout of shared activations is alike on all ranks. In
attention each drops the same weights of other heads.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from snugfit.features.distributed.apply.stages import is_elsewhere
from snugfit.features.distributed.techniques.tensor_plans import is_of_experts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

EMBEDDING = "embedding_rowwise"

HEADS = 2
"""Dimension of the heads in a tensor that is normed head by head: (B, S, heads, head size)."""


def in_tensor_parts(model: torch.nn.Module, mesh: DeviceMesh, *, experts: bool) -> None:
    """Replace each matrix of the tensor-parallel plan by this rank's shard. With `experts`, keep only this
    rank's experts, each unsplit. `mesh` has the ranks that share one copy of the model.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    tied = _tied(model)
    plan = {name: style for name, word in plan_of(model).items() if (style := _style(word)) is not None}
    parallelize_module(model, mesh, dict(plan), src_data_rank=None)  # each rank keeps its part
    # torch replaces each split weight by a new parameter, which breaks ties.
    for module, source in tied:
        module.weight = source.weight
    if experts:
        spread_experts(model, mesh)


def plan_of(model: torch.nn.Module) -> dict[str, str]:
    """Return the tensor-parallel split of each module by its name ("colwise", "rowwise", ... of transformers'
    plan), without experts.
    """
    rules: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    of_experts: Mapping[str, str] = getattr(model, "_ep_plan", None) or {}
    names = {name: module for name, module in model.named_modules() if name and not is_elsewhere(module)}
    plan = _expand({r: word for r, word in rules.items() if not is_of_experts(r, of_experts)}, names)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    known = next((name for name, module in names.items() if module is embedding), None)
    # Most models tie the embedding to the head, which the plan splits; torchtitan splits both too.
    return {known: EMBEDDING, **plan} if known is not None and plan else plan


def spread_experts(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Keep only this rank's experts in the model, by transformers' own code. All ranks of the mesh hold the
    same tokens and sum their experts' results.
    """
    names = dict([*model.named_parameters(), *model.named_modules()])
    rules: Mapping[str, str] = getattr(model, "_ep_plan", None) or {}
    plan = _expand(rules, names)
    plan = dict(sorted(plan.items(), key=lambda rule: rule[1] != "grouped_gemm"))  # split weights first
    try:
        from transformers.distributed.expert_parallel import apply_expert_parallelism
    except ImportError:  # transformers before 5.21
        _spread_as_before(model, mesh, plan)
    else:
        apply_expert_parallelism(model, mesh, mesh, plan, ep_implementation="all_reduce")


def _spread_as_before(model: torch.nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Keep this rank's experts by the styles of transformers 5.17, which lists them among those of tensor
    parallelism."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    weights, modules = dict(model.named_parameters()), dict(model.named_modules())
    for name, word in plan.items():
        style: Any = ALL_PARALLEL_STYLES[word]
        if name in weights:
            owner, _, own = name.rpartition(".")
            style.shard_param(modules[owner], own, mesh)
        else:
            style.install_forward(modules[name], mesh)


def _expand(rules: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the tensor-parallel plan in which each name pattern (`layers.*.q_proj`) is replaced by the
    matching module names.
    """
    return {
        name: word
        for rule, word in rules.items()
        for name in names
        if re.fullmatch(re.escape(rule).replace(r"\*", r"\d+"), name)
    }


def _style(word: str) -> ParallelStyle | None:
    """Return torch's `ParallelStyle` for a word of transformers' plan ("colwise"); None if the module is not
    split.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    match word:
        case "colwise":
            return ColwiseParallel()
        case "colwise_gather_output" | "colwise_rep":
            return ColwiseParallel(output_layouts=Replicate())
        case "rowwise":
            return RowwiseParallel()
        case "rowwise_split_input" | "rowwise_rep" | "embedding_rowwise":
            return RowwiseParallel(input_layouts=Replicate())
        case "replicated_with_grad_allreduce":  # norms of single heads, of which a rank has some
            return SequenceParallel(sequence_dim=HEADS, use_local_output=True)
        case "replicate":
            return None
    raise ValueError(f"tensor parallelism knows no style {word!r}")


def _tied(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Return pairs of modules that share one weight, also if one of the two is in another stage."""
    first: dict[int, Any] = {}
    tied = []
    # Modules that replace other stages' layers come last, so that names refer to a real one.
    for module in sorted(model.modules(), key=is_elsewhere):
        weight = module._parameters.get("weight")
        if weight is not None and (source := first.setdefault(id(weight), module)) is not module:
            tied.append((module, source))
    return tied


def sum_parts_of_gradients(model: torch.nn.Module) -> None:
    """Register hooks that sum the gradients over ranks for weights that all ranks hold, such as norms of
    heads.

    Without them, each rank has only a part of such a gradient.
    """
    from torch.distributed.tensor import DTensor

    for weight in model.parameters():
        gradient: Any = weight.grad
        if not isinstance(gradient, DTensor) or not isinstance(weight, DTensor):
            continue
        if gradient.placements != weight.placements:
            weight.grad = gradient.redistribute(placements=weight.placements)
