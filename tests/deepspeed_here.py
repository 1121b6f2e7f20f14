"""Marks of tests that need DeepSpeed."""

from __future__ import annotations

import shutil

import pytest

from snugfit.versions import version_of

HAS_DEEPSPEED = version_of("deepspeed") is not None
with_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="needs deepspeed, an optional package")
compiles = pytest.mark.skipif(
    shutil.which("c++") is None or shutil.which("ninja") is None,
    reason="needs c++ and ninja, with which DeepSpeed compiles its CPU Adam",
)
