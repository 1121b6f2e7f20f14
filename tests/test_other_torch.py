"""Supported versions of torch that behave differently from 2.13, the version under test.

Each test changes the installed torch at one point to the behaviour of another version. With 2.11 three
predictions failed or were wrong there. With 2.14 all of them were.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.autograd import Function

from small_models import small_job
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe


class WrittenInC:
    """A method of a class without a Python function."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def __get__(self, instance: Any, owner: type) -> Any:
        return self.method.__get__(instance, owner)


def test_functions_that_autograd_applies_in_c_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Function.apply` is written in C in torch 2.14. Functions that a library applies still cost host
    time."""
    job, setup = small_job("llama", 2), Recipe.parse("bf16_master + adamw_fused + fused").setup()
    expected = rehearse(job, setup, CudaPolicy())
    monkeypatch.setattr(Function, "apply", WrittenInC(vars(Function)["apply"]))
    assert rehearse(job, setup, CudaPolicy()) == expected
