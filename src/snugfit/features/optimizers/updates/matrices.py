"""One optimizer with two updates: a special one for the matrices of hidden layers, and AdamW for all other
parameters.

torch's Muon accepts matrices alone, and its authors leave embedding tables, the output head, biases and
normalisations to AdamW. APOLLO and GaLore do the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from snugfit.features.optimizers.updates.pieces import refuse_closure
from snugfit.step.wishes.own_adamw import OwnAdamW, move_moments

ADAMW_ATTRIBUTE = "is_left_to_adamw"
"""Name of a parameter's attribute that assigns it to AdamW."""

MATRICES = "matrices"
"""Key of a parameter group with the indices of the matrices that AdamW does not update."""


class MatricesAndAdamW(OwnAdamW, ABC):
    """Base class of optimizers with another update for some matrices of each group, and AdamW for the rest,
    with one learning rate and decay."""

    @abstractmethod
    def update_matrices(self, groups: list[dict[str, Any]]) -> None:
        """Update the matrices in these parameter groups by the algorithm of the subclass, such as Muon."""

    def takes(self, weight: torch.Tensor, group: dict[str, Any]) -> bool:
        """Return True if this parameter is updated as a matrix; AdamW updates the other parameters."""
        return weight.dim() == 2 and not getattr(weight, ADAMW_ATTRIBUTE, False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, with the indices of the parameters that are updated as matrices."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        # Indices are stored in the parameter group, so that a checkpoint contains them.
        added[MATRICES] = [at for at, weight in enumerate(added["params"]) if self.takes(weight, added)]

    def step(self, closure: Any = None) -> Any:
        """Run one optimizer step on all parameters that have a gradient."""
        refuse_closure(self, closure)
        if matrices := self._shares(of_matrices=True):
            self.update_matrices(matrices)
        if rest := self._shares(of_matrices=False):
            # With two separate optimizers, loops, schedules and checkpoints would have to support two.
            self.run(torch.optim.AdamW(rest, foreach=True))

    def run(self, optimizer: torch.optim.Optimizer) -> None:
        """Run a step of the inner `optimizer` on the states of this optimizer."""
        # The outer optimizer keeps the state, because the inner one exists for one step only.
        optimizer.state = self.state
        optimizer.step()

    def _shares(self, *, of_matrices: bool) -> list[dict[str, Any]]:
        """Return the parameter groups with only their matrices, or with only their other parameters. Empty
        groups are left out.
        """
        shares = []
        for group in self.param_groups:
            own = set(group[MATRICES])
            weights = [w for at, w in enumerate(group["params"]) if (at in own) is of_matrices]
            shares.append({**group, "params": weights})
        return [share for share in shares if share["params"]]


class ProjectedAndAdamW(MatricesAndAdamW):
    """Base class of optimizers that project gradients of larger matrices to `rank` dimensions, and use AdamW
    for the rest.
    """

    @abstractmethod
    def update_matrix(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> torch.Tensor | None:
        """Return the update of one matrix, to be multiplied by the learning rate; None if the weight is
        updated already. `state["step"]` counts this step."""

    @torch.no_grad()
    def update_matrices(self, groups: list[dict[str, Any]]) -> None:
        """Update the matrices of these groups, one after the other."""
        # a profile shows this part under its own name, like those of AdamW and Muon
        with torch.autograd.profiler.record_function(f"{type(self).__name__}.update_matrices"):
            for group in groups:
                for weight in group["params"]:
                    if weight.grad is not None:
                        state = self.state[weight]
                        state["step"] = state.get("step", 0) + 1
                        update = self.update_matrix(weight, weight.grad, state, group)
                        if update is not None:
                            decay = 1 - group["lr"] * group["weight_decay"]
                            weight.mul_(decay).add_(update, alpha=-group["lr"])

    def takes(self, weight: torch.Tensor, group: dict[str, Any]) -> bool:
        """Return True if a projection makes the matrix smaller; otherwise AdamW updates it."""
        # Otherwise the projection would be as large as the matrix.
        return super().takes(weight, group) and min(weight.shape) > group["rank"]


def adamw_direction(gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    """Return AdamW's update of a matrix with this gradient, in units of the learning rate.

    The moments, in the state, have the gradient's shape and dtype. `state["step"]` already includes this
    step.
    """
    beta1, beta2 = group["betas"]
    if "exp_avg" not in state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
    first, step = state["exp_avg"], state["step"]
    # Bias corrections of both moments. `step` already includes this step.
    shares = 1 - beta1, beta2, 1 - beta2, math.sqrt(1 - beta2**step)
    spread = move_moments(first, state["exp_avg_sq"], gradient, *shares, group["eps"])
    direction: torch.Tensor = first.div(spread).div_(1 - beta1**step)
    return direction


class MuonWithAdamW(MatricesAndAdamW):
    """torch's Muon and AdamW as one optimizer.

    Muon's updates are scaled to AdamW's average size (`match_rms_adamw`; Liu et al., arXiv 2502.16982). So a
    learning rate that suits AdamW suits both.
    """

    further: ClassVar = {"momentum": 0.95}

    def update_matrices(self, groups: list[dict[str, Any]]) -> None:
        """Run a step of torch's Muon, with updates as large as AdamW's."""
        keys = ("params", "lr", "weight_decay", "momentum")  # without AdamW's eps
        shares = [{key: group[key] for key in keys} for group in groups]
        # Updates get the average size of AdamW's, so that its learning rate suits both (Liu et al., arXiv
        # 2502.16982).
        self.run(torch.optim.Muon(shares, adjust_lr_fn="match_rms_adamw"))


def leave_to_adamw(model: torch.nn.Module) -> None:
    """Mark the matrices that AdamW updates because they are not in a hidden layer.

    These are embedding tables, and matrices outside a transformers model's body (its head). Parameters not
    called `weight` are marked too, because no layer multiplies with them.
    """
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
            # A matrix with another name (a position table, a token) is not used in a product.
            named = name.rpartition(".")[2] == "weight"
            setattr(weight, ADAMW_ATTRIBUTE, not named or id(weight) in tables or id(weight) not in inside)


def _body(model: torch.nn.Module) -> torch.nn.Module:
    """Return a transformers model without its head, also inside of adapters; any other module unchanged."""
    unwrapped = getattr(model, "get_base_model", lambda: model)()
    prefix = getattr(unwrapped, "base_model_prefix", "")
    body = getattr(unwrapped, prefix, None) if prefix else None
    return body if isinstance(body, torch.nn.Module) else unwrapped
