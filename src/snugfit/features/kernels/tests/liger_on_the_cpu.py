"""A step with Liger's kernels on the CPU, in Triton's interpreter, against its simulation and the plain
model.

Run as a process with `TRITON_INTERPRET=1`, which Triton reads when kernels are defined. The interpreter of
Triton 3.7 lacks two things: floats stay Python's, and functions of CUDA's library return nothing. It also
holds its arguments in cycles of references, which are collected here.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import numpy
import torch
import triton.language as tl
from triton.runtime import interpreter

from reported import foreseen, reports
from small_models import small_job
from snugfit.features.kernels.liger_model import import_code, use_liger
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe

CLOSE = 1e-6
"""Largest allowed difference of two fp32 gradients, for numbers up to 1."""


def complete_the_interpreter() -> None:
    """Add the missing conversions and functions to the interpreter."""
    as_it_is = interpreter._implicit_cvt

    def with_numbers(argument: Any) -> Any:
        if not isinstance(argument, float):
            return as_it_is(argument)
        value = numpy.array([argument], dtype=numpy.float32)
        return tl.tensor(interpreter.TensorHandle(value, tl.float32), tl.float32)

    run = interpreter.InterpretedFunction.run

    def run_and_let_go(*arguments: Any, **keywords: Any) -> Any:
        run(*arguments, **keywords)
        gc.collect(0)

    interpreter._implicit_cvt = with_numbers
    interpreter.InterpretedFunction.run = run_and_let_go
    from liger_kernel.ops import rms_norm

    rms_norm.rsqrt = lambda value: tl.rsqrt(value)  # noqa: PLW0108 - another one while a kernel runs


def compare_gradients() -> None:
    """Check that the gradients of a small Llama are the plain model's, and that none is zero."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    plain = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).train()
    fused = copy.deepcopy(plain)
    use_liger(fused)
    ids = torch.randint(0, 64, (2, 8))
    for model in (plain, fused):
        model(input_ids=ids, labels=ids).loss.backward()
    for (name, one), other in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert one.grad is not None, name
        assert other.grad is not None, name
        assert other.grad.abs().max() > 0, name
        assert (one.grad - other.grad).abs().max() < CLOSE, name
    print("gradients agree")


def compare_allocations() -> None:
    """Check that allocations of a real third step are the simulation's, in order."""
    from aligned import compare, peak
    from cpu_scratch import compared

    job = small_job("llama", 2, batch_size=2, sequence_length=8)
    setup = Recipe.parse("liger + every_layer").setup()
    real, trace = compared(reports(job, setup)), compared(foreseen(rehearse(job, setup, CpuPolicy())))
    third = [[event for event in events if event.step == 2] for events in (real, trace)]
    assert all(third)
    comparison = compare(*third)
    assert comparison.similarity == 1.0, comparison
    assert peak(real) == peak(trace), (peak(real), peak(trace))
    print("allocations agree")


if __name__ == "__main__":
    import_code()
    complete_the_interpreter()
    compare_gradients()
    compare_allocations()
