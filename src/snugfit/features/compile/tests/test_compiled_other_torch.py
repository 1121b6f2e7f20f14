"""Imitations of other versions of torch, whose compilers differ."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._functorch import config as functorch
from torch._guards import CompileContext
from torch._prims import rng_prims

from snugfit.features.compile.simulation.layers import FirstSizes, _where_numbers_are_drawn
from snugfit.features.compile.simulation.program import _namespace


@pytest.fixture
def compiled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every compilation the same function number in Dynamo."""
    monkeypatch.setattr(CompileContext, "current_compile_id", lambda: SimpleNamespace(frame_id=7))


@pytest.mark.parametrize("as_outputs", [True, False])
def test_gradients_lie_as_torch_asks_for_them(as_outputs: bool, compiled_twice: None) -> None:
    """torch 2.11 requires contiguous gradients by default. torch 2.13 requires the strides of the outputs,
    except in a function with dynamic shapes."""
    weight = torch.ones(2, 3, requires_grad=True)
    short, long = weight[:, :2] * 1, weight * 1
    sizes = FirstSizes()
    with functorch.patch(guess_tangent_strides_as_outputs=as_outputs):
        for inputs, expected in (([weight, long], False), ([weight, short], True), ([weight, long], False)):
            with sizes.switch_to_dynamic(inputs) as any_sizes:
                assert any_sizes == expected
                assert functorch.guess_tangent_strides_as_outputs == (as_outputs and not expected)
        assert functorch.guess_tangent_strides_as_outputs == as_outputs


@pytest.mark.parametrize(
    ("says", "is_drawn_on"), [("meta", "cpu"), (None, "cpu"), ("cuda", "cpu"), ("xpu", "xpu")]
)
def test_tensors_without_data_draw_on_the_host(says: str | None, is_drawn_on: str) -> None:
    """torch 2.11 does not report the device of such tensors."""
    assert _where_numbers_are_drawn(lambda args, kwargs: says)((), {}) == is_drawn_on
    assert _where_numbers_are_drawn(rng_prims.get_device)((torch.ones(2, device="meta"),), {}) == "cpu"


def test_a_program_finds_every_check_that_inductor_writes() -> None:
    """torch 2.14 generates checks (assertions on tensors) that 2.13 does not."""
    checks = {name for name in dir(torch._C._dynamo.guards) if name.startswith("assert_")}
    assert checks <= _namespace().keys()
