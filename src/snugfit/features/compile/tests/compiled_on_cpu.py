"""Inductor programs on the CPU whose kernels compute nothing, so that no C++ is compiled.

A compiled step allocates and frees the same bytes with any kernels, because their caller does it. g++ takes
15 to 80 seconds for a step, and the rest of torch's compiler about three. Vectors are off for the same
reason: choosing their loads takes Inductor a third of its time and moves no byte. `SNUGFIT_ALL_TRUTH=1`
compiles kernels, with vectors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch._dynamo
import torch._inductor.config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache


def _nothing(*_: Any) -> None:
    """Do nothing, in place of a compiled kernel: outputs keep their bytes."""


ALL_TRUTH = os.environ.get("SNUGFIT_ALL_TRUTH") == "1"


@pytest.fixture(autouse=True)
def no_vectors() -> Iterator[None]:
    """Generate Inductor's C++ without vectors in each test of a file that imports this fixture."""
    with torch._inductor.config.patch({} if ALL_TRUTH else {"cpp.simdlen": 1}):
        yield


@pytest.fixture
def idle_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Run Inductor without g++. Yield a list to which the C++ of each kernel is appended."""
    made: list[str] = []

    def idle(_self: AsyncCompile, _types: list[str], source: str) -> Any:
        made.append(source)
        return _nothing

    _forget()
    if not ALL_TRUTH:
        monkeypatch.setattr(AsyncCompile, "cpp_pybinding", idle)
    with torch._inductor.config.patch(compile_threads=1):
        yield made
    _forget()


def _forget() -> None:
    """Clear Inductor's cache of loaded programs, which reference their kernels."""
    torch._dynamo.reset()
    PyCodeCache.cache_clear()
