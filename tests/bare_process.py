"""The process that tests are forked from which no optional package may have been imported in: no compiler, no
library of optimizers, no engine. The functions are their work."""

from __future__ import annotations

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
    """Forks of this process."""
    return forks_of(__name__, bare=True)


def said_by(work: Callable[..., int], told: Path, *arguments: str) -> str:
    """What some work writes to both standard streams, in which it succeeds."""
    with told.open("wb") as file:
        both = {1: file.fileno(), 2: file.fileno()}
        code = bare_forks().ended(bare_forks().start(work, *arguments, streams=both), within=600)
    assert code == 0, told.read_text()
    return told.read_text()


def command(*words: str, stdout: Path) -> str:
    """What a command writes to standard output, in which it succeeds."""
    with stdout.open("wb") as file:
        process = bare_forks().start(run, [*words], streams={1: file.fileno()})
        assert bare_forks().ended(process) == 0
    return stdout.read_text()


def script_in_triton(script: Path, device: str, stdout: Path) -> str:
    """What a script writes that compares kernels: in Triton's interpreter, or on a GPU."""
    return said_by(_run_in_triton, stdout, str(script), device)


def _run_in_triton(script: str, device: str) -> int:
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when kernels are defined
        _prepare_language_once()
    sys.argv = [script, device]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
    return 0


def _prepare_language_once() -> None:
    """The interpreter changes Triton's language for each function that a program calls, and back. Change it
    for the program alone: that took half of the time."""
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
        if outermost:  # of another part of the language: the outermost takes it back
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


def products_of_few_rows() -> int:
    """The exit code of a worker that simulates them, and again without garbage."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as in a worker
    job, setup = small_job("bert", 2), Recipe.parse("qlora").setup()
    first = rehearse(job, setup, CudaPolicy()).events
    gc.collect()
    return int(first != rehearse(job, setup, CudaPolicy()).events)


def import_torchao() -> int:
    """Import what a model's class imports."""
    from transformers import BertConfig

    from snugfit.job.architectures import class_of

    class_of("masked-lm", BertConfig())
    assert "torchao" in sys.modules
    return 0
