"""Muon and AdamW as one optimizer: their shares of the parameters, each with the updates of torch's own."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from fitted import model_of
from snugfit.features.optimizers.updates.matrices import MATRICES, MuonWithAdamW, leave_to_adamw

ADAMWS = ("embeddings", "classifier", "LayerNorm", "bias")


def with_gradients(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)
    return model


def muons(model: torch.nn.Module) -> set[str]:
    """Return the names of the parameters that Muon updates."""
    leave_to_adamw(model)
    names = {weight: name for name, weight in model.named_parameters()}
    [group] = MuonWithAdamW(model.parameters()).param_groups
    return {names[group["params"][at]] for at in group[MATRICES]}


def test_matrices_of_hidden_layers_are_muons_and_all_else_is_adamws() -> None:
    model = model_of("bert")
    own = muons(model)
    assert own == {name for name, _ in model.named_parameters() if not any(part in name for part in ADAMWS)}
    assert any("attention" in name for name in own)
    assert any("intermediate" in name for name in own)


def test_a_head_that_shares_the_table_is_left_with_it() -> None:
    model = model_of("gpt2")
    assert not any("wte" in name or "wpe" in name or "lm_head" in name for name in muons(model))


@pytest.mark.whole
def test_each_share_moves_as_torch_s_own_optimizer_moves_it() -> None:
    """The test takes three steps with two parameter groups, with and without decay, as training loops create
    them.
    """
    ours, theirs = model_of("bert"), model_of("bert")
    theirs.load_state_dict(ours.state_dict())
    leave_to_adamw(ours)
    groups = [(True, 0.1), (False, 0.0)]
    optimizer = MuonWithAdamW(
        [{"params": matrices(ours, wide), "weight_decay": decay} for wide, decay in groups], lr=1e-2
    )
    assert len(optimizer.param_groups) == 2
    own = muons(deepcopy(theirs))
    named = dict(theirs.named_parameters())
    numbers: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    alone = [
        torch.optim.Muon([named[name] for name in sorted(own)], adjust_lr_fn="match_rms_adamw", **numbers),
        torch.optim.AdamW([w for name, w in named.items() if name not in own and w.dim() > 1], **numbers),
        torch.optim.AdamW([w for w in named.values() if w.dim() < 2], lr=1e-2, weight_decay=0.0),
    ]
    for _ in range(3):
        with_gradients(ours)
        with_gradients(theirs)
        optimizer.step()
        for one in alone:
            one.step()
    for (name, left), right in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7, msg=name)


def matrices(model: torch.nn.Module, wide: bool) -> list[torch.nn.Parameter]:
    return [weight for weight in model.parameters() if (weight.dim() > 1) is wide]
