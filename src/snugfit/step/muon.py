"""An optimizer for the matrices between embeddings and head, AdamW for all else, as one optimizer.

torch's Muon takes matrices alone, and its authors leave embedding tables, the output head, biases and
normalisations to AdamW; so do APOLLO's and GaLore's. Two optimizers beside each other would need loops,
schedules and checkpoints that know of two; so this one keeps the groups that it is given, and lets two step
on their shares of them. Which parameter is whose stands in its group, as positions, so that a checkpoint
keeps it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

BY_ADAMW = "is_left_to_adamw"
"""The attribute by which `leave_to_adamw` marks a parameter."""

MATRICES = "matrices"
"""The key of a group under which the positions of the matrices stand that AdamW does not update."""


class MatricesAndAdamW(torch.optim.Optimizer, ABC):
    """Another optimizer and AdamW, each over its share of every group, with one learning rate and decay."""

    of_matrices: ClassVar[tuple[str, ...]]
    """The numbers of a group that the other optimizer knows."""

    @abstractmethod
    def matrix_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The other one, over its shares."""

    def takes(self, weight: torch.Tensor, group: dict[str, Any]) -> bool:
        """Whether a parameter of this group is the other one's."""
        return weight.dim() == 2 and not getattr(weight, BY_ADAMW, False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As every optimizer does, and notes which of its parameters are the other one's."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        added[MATRICES] = [at for at, weight in enumerate(added["params"]) if self.takes(weight, added)]

    def step(self, closure: Any = None) -> Any:
        """One step of both."""
        if closure is not None:
            raise ValueError(f"{type(self).__name__} takes no closure: it computes no loss")
        for optimizer in self._shares():
            optimizer.state = self.state
            optimizer.step()

    def _shares(self) -> Iterator[torch.optim.Optimizer]:
        matrices, adamws = [], []
        for group in self.param_groups:
            own = set(group[MATRICES])
            matrices.append(_share(group, own, *self.of_matrices))
            rest = set(range(len(group["params"]))) - own
            adamws.append(_share(group, rest, "lr", "weight_decay", "betas", "eps"))
        if matrices := [group for group in matrices if group["params"]]:
            yield self.matrix_optimizer(matrices)
        if adamws := [group for group in adamws if group["params"]]:
            yield torch.optim.AdamW(adamws, foreach=True)


def adamw_direction(gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    """What AdamW would take from a matrix of this gradient, in learning rates; its moments, in the state,
    have the gradient's shape and dtype. `state["step"]` counts this step already."""
    beta1, beta2 = group["betas"]
    if "exp_avg" not in state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    spread = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
    direction: torch.Tensor = state["exp_avg"].div(spread).div_(1 - beta1 ** state["step"])
    return direction


class MuonWithAdamW(MatricesAndAdamW):
    """torch's Muon and AdamW.

    The updates of Muon are as large as AdamW's are on average (`match_rms_adamw`), so that a learning rate
    that suits AdamW suits both (Liu et al., arXiv 2502.16982).
    """

    of_matrices = ("lr", "weight_decay", "momentum")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
    ) -> None:
        """torch's defaults, but for the decay, which is AdamW's for both."""
        numbers = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "momentum": momentum}
        super().__init__(params, numbers)

    def matrix_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Makes torch's Muon, as large as AdamW."""
        return torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw")


def _share(group: dict[str, Any], positions: set[int], *numbers: str) -> dict[str, Any]:
    """The parameters of a group at these positions, with the numbers that their optimizer knows."""
    parameters = [weight for at, weight in enumerate(group["params"]) if at in positions]
    return {"params": parameters, **{name: group[name] for name in numbers}}


def leave_to_adamw(model: torch.nn.Module) -> None:
    """Marks matrices that are none of a hidden layer: embedding tables, what stands outside a transformers
    model's body (its head), and numbers that no layer multiplies with (not called `weight`)."""
    base = _body(model)
    inside = {id(weight) for weight in base.parameters()}
    tables = {
        id(weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
        for weight in module.parameters()
    }
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            named = name.rpartition(".")[2] == "weight"
            setattr(weight, BY_ADAMW, not named or id(weight) in tables or id(weight) not in inside)


def _body(model: torch.nn.Module) -> torch.nn.Module:
    """A transformers model without its head, through the adapters around it; any other module as it is."""
    unwrapped = getattr(model, "get_base_model", lambda: model)()
    prefix = getattr(unwrapped, "base_model_prefix", "")
    body = getattr(unwrapped, prefix, None) if prefix else None
    return body if isinstance(body, torch.nn.Module) else unwrapped
