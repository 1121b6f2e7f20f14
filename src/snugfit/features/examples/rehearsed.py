"""Predictions of a training step that the user's own Python function runs."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError, UsageError

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.results.prediction import Prediction

FUNCTION = "example"
"""Name of the function that an example file defines."""


def rehearse(
    example: Callable[..., Any],
    *,
    batch_size: int = 4,
    gpu: Gpu | str | None = None,
    memory_bytes: int | None = None,
) -> Prediction:
    """Return the prediction of a training step of your own code, computed without a GPU.

    `example(batch_size, device)` builds models, optimizers and data, and returns a function without
    arguments. Each call of that function is one training step. Both parameters may be left out. `device` is
    `cuda`, and the code may name CUDA devices itself. Raises `UsageError` for a function of another form, and
    `RehearsalError` for code that fails on tensors without data.
    """
    from snugfit.prediction.predict import predict

    return predict(job_of(example, batch_size), gpu=gpu, memory_bytes=memory_bytes)


def job_of(example: Callable[..., Any], batch_size: int, name: str = "") -> Job:
    """Return the job of a user's function. Raises `UsageError` if it is not a function."""
    from snugfit.features.examples.step import CONTRACT, ExampleCode
    from snugfit.job.job import Job
    from snugfit.job.model import Model

    if not callable(example):
        raise UsageError(f"{example!r} is not a function. {CONTRACT}")
    name = name or getattr(example, "__name__", FUNCTION)
    code: Any = ExampleCode(example)
    model = Model(name=name, origin="python", module=code)
    return Job(model=model, task="custom", phase="example", batch_size=batch_size)  # type: ignore[arg-type]


def function_in(file: Path) -> Callable[..., Any]:
    """Execute a Python file, and return its function `example`.

    The name of the executed module is not `__main__`, so code for scripts does not run. Raises `UsageError`
    for a file that cannot be read, that fails, or that defines no such function.
    """
    from snugfit.features.examples.step import CONTRACT

    try:
        source = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--example {file}: {error}. Give a Python file.") from error
    module = ModuleType(f"snugfit_example_{file.stem}")
    module.__file__ = str(file)
    # Modules beside the file can be imported, as by `python FILE`.
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, str(file), "exec"), vars(module))
    except SnugfitError:
        raise
    except BaseException as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            f"--example {file}: {type(error).__name__}: {error} ({line.filename}, line {line.lineno}). The "
            "file must run without errors."
        ) from error
    finally:
        sys.path.pop(0)
    example = getattr(module, FUNCTION, None)
    if not callable(example):
        raise UsageError(f"--example {file}: the file defines no function {FUNCTION}. {CONTRACT}")
    function: Callable[..., Any] = example
    return function
