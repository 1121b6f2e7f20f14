"""The process for tests that must start without optional packages: no compiler, no optimizer library, no
engine. Tests fork from it, and the functions here run in the forks."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from clean_forks import Forks, forks_of
from small_models import small_job
from snugfit.cli.main import run
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe

OPTIONAL = ("triton", "bitsandbytes", "deepspeed", "torchao", "peft", "liger_kernel")


def warm() -> None:
    """Import torch alone."""
    torch.ones(1)
    assert not [name for name in OPTIONAL if name in sys.modules]


def bare_forks() -> Forks:
    """Return forks of the bare process."""
    return forks_of(__name__, bare=True)


def said_by(work: Callable[..., int], told: Path, *arguments: str) -> str:
    """Run `work` successfully and return its output on both standard streams."""
    with told.open("wb") as file:
        both = {1: file.fileno(), 2: file.fileno()}
        code = bare_forks().ended(bare_forks().start(work, *arguments, streams=both), within=600)
    assert code == 0, told.read_text()
    return told.read_text()


def command(*words: str, stdout: Path) -> str:
    """Run a command successfully and return its standard output."""
    with stdout.open("wb") as file:
        process = bare_forks().start(run, [*words], streams={1: file.fileno()})
        assert bare_forks().ended(process) == 0
    return stdout.read_text()


def script_in_triton(script: Path, device: str, stdout: Path) -> str:
    """Run a script that compares kernels, in Triton's interpreter or on a GPU, and return its output."""
    return said_by(_run_in_triton, stdout, str(script), device)


def _run_in_triton(script: str, device: str) -> int:
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when kernels are defined
        _prepare_language_once()
        _prepare_types_once()
    sys.argv = [script, device]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
    return 0


def _prepare_language_once() -> None:
    """Patch Triton's language once for the whole program. The interpreter patches it for each function call
    and restores it, which took half of the time."""
    from triton.runtime import interpreter

    prepare = interpreter._patch_lang
    outermost: list[Any] = []
    ready: set[Any] = set()

    def prepare_once(function: Any) -> Any:
        parts = frozenset(one for one in (tl, tl.core) if one in function.__globals__.values())
        if outermost and parts in ready:
            return interpreter._LangPatchScope()
        scope = prepare(function)
        ready.add(parts)
        if outermost:  # of another part of the language: the outermost call restores it
            outermost[0]._changes += scope._changes
            return interpreter._LangPatchScope()
        outermost.append(scope)
        restore = scope.restore

        def restore_all() -> None:
            outermost.clear()
            ready.clear()
            restore()

        scope.restore = restore_all
        return scope

    tl = interpreter.tl
    interpreter._patch_lang = prepare_once


def _prepare_types_once() -> None:
    """Cache the NumPy dtype of each Triton dtype. The interpreter makes a table of all for each operation.
    It also repeats each addition and product of integers in 64 bits, which is left out: no case has so large
    numbers."""
    from triton.runtime import interpreter

    tl = interpreter.tl
    convert = functools.cache(interpreter._get_np_dtype)

    def numpy_dtype(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return convert(tl.uint64 if isinstance(element, tl.pointer_type) else element)

    interpreter._get_np_dtype = numpy_dtype
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def products_of_few_rows() -> int:
    """Rehearse products of few rows twice as a worker does, with a garbage collection between. Return 1 if
    events differ."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the mode of a worker
    job, setup = small_job("bert", 2), Recipe.parse("qlora").setup()
    first = rehearse(job, setup, CudaPolicy()).events
    gc.collect()
    return int(first != rehearse(job, setup, CudaPolicy()).events)


def import_torchao() -> int:
    """Import the class of a model, which imports torchao."""
    from transformers import BertConfig

    from snugfit.job.architectures import class_of

    class_of("masked-lm", BertConfig())
    assert "torchao" in sys.modules
    return 0
