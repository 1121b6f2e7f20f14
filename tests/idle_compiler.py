"""Inductor in processes of tests, with kernels that compute nothing, so that no C++ is compiled.

Callers allocate and free the same bytes with any kernels (`features/compile/tests/compiled_on_cpu.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch


def _nothing(*_: Any) -> None:
    """Do nothing, in place of a compiled kernel."""


@contextlib.contextmanager
def idle_kernels() -> Iterator[None]:
    """Context in which this process runs Inductor without g++ and without vectors."""
    import torch._inductor.config
    from torch._inductor.async_compile import AsyncCompile

    settings = torch._inductor.config.patch({"compile_threads": 1, "cpp.simdlen": 1})
    with settings, patch.object(AsyncCompile, "cpp_pybinding", lambda *_: _nothing):
        yield
