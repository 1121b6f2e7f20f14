"""Whose kernels draw dropout from seeds of their own, and not from torch's generators: our own."""

from __future__ import annotations

from snugfit.techniques.setup import Call, Setup

FUSED = Call(path="snugfit.step.wishes.kernels.fused:use_fused")
"""What a Setup wishes with our kernels."""

ALL_SEEDED = ("bert", "distilbert", "electra", "roberta")
"""Model types of transformers whose dropout beside attention is all drawn by these kernels."""


def seeds_dropout(setup: Setup) -> bool:
    """Whether dropout beside attention has seeds under this Setup, so that a layer drops the same when it is
    computed again."""
    return setup.kernels is not None and setup.kernels.path == FUSED.path
