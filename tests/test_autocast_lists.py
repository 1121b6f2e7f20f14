"""The lists of autocast's operators equal those of the installed torch, read from the header in its wheel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from snugfit.rehearsal.device.autocast_lists import CUDA

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def macro(name: str) -> set[str]:
    """Return the operators under one of the header's macros, with their overloads."""
    body = re.search(rf"#define {name}\(_\)((?:.*\\\n)*.*)", HEADER.read_text())
    assert body, f"torch {torch.__version__} has no {name} in {HEADER.name}"
    found = re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
    return {f"{operator}.{overload}" if overload else operator for operator, overload in found}


@pytest.mark.parametrize(
    ("ours", "name"),
    [
        (CUDA.lower, "AT_FORALL_LOWER_PRECISION_FP"),
        (CUDA.fp32, "AT_FORALL_FP32"),
        (CUDA.fp32_result, "AT_FORALL_FP32_SET_OPT_DTYPE"),
        (CUDA.promote, "AT_FORALL_PROMOTE"),
    ],
)
def test_cuda_s_lists_are_torch_s(ours: tuple[str, ...], name: str) -> None:
    assert set(CUDA.of_installed_torch(ours)) == macro(name)


def test_what_the_installed_torch_does_not_cast_is_left_out() -> None:
    """Unknown operators are left out too: lists of a newer torch do not apply to an older one."""
    assert list(CUDA.of_installed_torch(["mm", "relu", "no_such_operator"])) == ["mm"]
