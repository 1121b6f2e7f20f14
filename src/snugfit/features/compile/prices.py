"""Constants for the seconds of compiling, and the accuracy of predicted seconds of compiled steps."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from snugfit.prediction.startup import operator_of
from snugfit.rehearsal.trace.trace import GENERATED

STARTUP_SECONDS = 4.5
"""Seconds until torch.compile compiles the first kernel: imports, start of its worker processes, tracing."""

GENERATED_KERNEL = 0.115
"""Seconds to compile one kernel that torch.compile generates, with a share of the code around the kernels."""

WHOLE_MODEL_KERNEL = 0.027
"""Seconds to compile one kernel of a model that is compiled as a whole, in which equal layers share nothing.

`STARTUP_SECONDS` and `GENERATED_KERNEL`: seven models whose layers were compiled one by one on the host of
one H200, torch 2.11 (results/h200-2026-11-23/compiled). Without a cache first steps took 6.0 to 8.4 s, with
one 1.3 to 1.7 s. One, Qwen3 with adapters, took 14.9 s, which is not explained. Compiled whole, 24 layers of
BERT-large took 66 s, and 4 layers 16 s. A Llama's 4 layers took 19 s (2026-11-22,
`tests/data/compiled-h200.json`). `WHOLE_MODEL_KERNEL` predicts these within 30 %.
"""

COMPILED_SECONDS = (
    "Seconds of compiled layers rest on eleven runs on one H200. Steps that the GPU bounds were within 3 % "
    "of their predictions, and others took up to 25 % longer. First steps without a cache took 6 to 15 s. "
    "snugfit measure shows yours."
)


WHOLE_SECONDS = (
    "Seconds of a model that is compiled whole rest on four runs on H200s. Two that the GPU bounds took 11 "
    "and 12 % longer than predicted. The launches are fitted to two that the host bounds. First steps "
    "took 16 to 66 s. snugfit measure shows yours."
)


def compile_seconds(kernels: Collection[Any], in_programs: int) -> float:
    """Return the seconds of compiling in a first step, without a cache of an earlier run."""
    generated = {kernel for kernel in kernels if operator_of(kernel).startswith(GENERATED)}
    # Equal layers share their kernels if compiled one by one. In a whole model's program each is compiled.
    return WHOLE_MODEL_KERNEL * in_programs + (STARTUP_SECONDS + GENERATED_KERNEL * len(generated))
