"""Forward passes stored on a module: freed with it, and separate for a copy."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import weakref
from typing import Any

import pytest
import torch

from snugfit.errors import SnugfitError
from snugfit.step.own_forward import OwnForward, forward_of


def doubled(module: torch.nn.Linear, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
    return 2 * torch.nn.Linear.forward(module, x) + shift


def test_it_is_called_as_a_method_is() -> None:
    module = torch.nn.Linear(2, 2)
    module.forward = OwnForward(doubled, module)
    x = torch.ones(1, 2)
    assert torch.equal(
        module(x, shift=1.0), 2 * torch.nn.functional.linear(x, module.weight, module.bias) + 1
    )
    assert list(inspect.signature(module.forward).parameters) == ["x", "shift"]


def test_it_does_not_keep_its_module() -> None:
    module = torch.nn.Linear(2, 2)
    module.forward = kept = OwnForward(doubled, module)
    gone = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(SnugfitError, match="Keep the model"):
        kept(torch.ones(1, 2))


def test_what_another_has_put_there_is_left() -> None:
    module = torch.nn.Linear(2, 2)
    assert isinstance(forward_of(module), OwnForward)
    module.forward = other = lambda x: x
    assert forward_of(module) is other


def hold_copy(model: Any, way: str) -> None:
    """Assert that a copy with zeroed weights returns zeros, in training and in evaluation mode. The
    original model must return its former outputs."""
    if way == "deepcopy":
        other = copy.deepcopy(model)
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        other = torch.load(file, weights_only=False)
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    given = {"input_ids": torch.ones(1, 8, dtype=torch.long), "attention_mask": torch.ones(1, 8)}
    for training in (True, False):
        assert model.train(training)(**given).logits.abs().sum() > 0
        assert other.train(training)(**given).logits.abs().sum() == 0
