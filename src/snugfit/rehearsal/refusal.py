"""Translate exceptions in a simulation into messages with a cause and a remedy.

Exceptions come from the model's code, torch, a library, or snugfit itself. The type of the error and its
stack frames give the cause.
"""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING

from snugfit.errors import ModelError, RehearsalError, SnugfitError, missing_package_message
from snugfit.rehearsal.record.asker import CodeLine, module_of

if TYPE_CHECKING:
    from types import FrameType

    from snugfit.job.job import Job

_RUNS_OPERATORS = "snugfit.rehearsal.record.shape_cache"
_RUNS_MODULES = "snugfit.step."

_NO_GPU_HINT = (
    "This fails because this machine has no such device. On a GPU the step may work: measure it there, "
    "with {measurement}."
)
_KNOWN = {
    "not compiled with CUDA|NVIDIA driver|No CUDA GPUs|no CUDA-capable device": _NO_GPU_HINT,
    "requires CUDA support|without ATen_cuda": _NO_GPU_HINT,
    "on meta device|INTERNAL ASSERT": _NO_GPU_HINT,
    "not on the expected device|same device|device mismatch": (
        "Its code mixes tensors on the CPU with tensors on the GPU, which fails on a GPU too. Create them "
        "with device=x.device, or register them as buffers of the module that uses them."
    ),
    "SparseTensorImpl": (
        "The size of sparse gradients depends on the data. Use nn.Embedding(sparse=False). Only torch's "
        "optimizers SGD, Adagrad and SparseAdam support sparse gradients."
    ),
    "same dtype|dtype mismatch|expected m1 and m2|Expected query, key, and value to have": (
        "Its code mixes dtypes, which fails on a GPU too. If the recipe casts the model to 16 bits, try "
        "autocast instead: it casts them."
    ),
    "cached during selective activation checkpoint": (
        "A layer writes in place into a result that the recipe keeps, which fails on a GPU too. Choose a "
        "checkpointing technique that keeps none, such as 'every_layer'."
    ),
}
"""Advice to the user, by regular expressions of torch's error messages. `{measurement}` is that of the job's
phase (`PhaseWords`).
"""


def refusal(job: Job, error: Exception) -> SnugfitError:
    """Return a `RehearsalError` with a cause and a remedy for an exception that the simulation of this job
    raised.
    """
    name = job.model.name
    # The architecture's code reads a key that the config does not have, so the config is wrong.
    if key := _lacking_key(error):
        return ModelError(
            f'{name}: its config has no "{key}", which {job.task} needs{_place(error)}. Add it to '
            "config.json, or choose another task."
        )
    if lacking := missing_package_message(name, error):
        return ModelError(lacking)
    return RehearsalError(f"{name} could not be simulated{_reason(job, error)}")


def _reason(job: Job, error: Exception) -> str:
    """Return the rest of the error message: the cause, its meaning for a real step, and a remedy."""
    cause, module, last = _first_line(error), _place(error), _frames(error)[-1]
    measurement = job.words.measurement
    # Code for a missing device raises the same types as code whose shapes depend on data. The message
    # distinguishes them.
    if hint := next((text for pattern, text in _KNOWN.items() if re.search(pattern, cause)), ""):
        return f": {cause}{module}. {hint.format(measurement=measurement)}"
    # torch raises this on `meta` for a shape or number that depends on data. A real step may still work.
    if isinstance(error, NotImplementedError):
        return (
            f": {_what_depends(error)}{module}. A prediction knows shapes but no data, so it cannot follow "
            f"this step. Measure it instead, with {measurement}."
        )
    # the loop that takes the loss from a user's module fails at the module's output
    if job.model.module is not None and module_of(last.frame).startswith(_RUNS_MODULES):
        return (
            f": its output has no loss ({cause}). Return the loss as a tensor of one number, as `.loss`, "
            'as "loss" in a dict, or as the first of a tuple.'
        )
    if _is_ours(error, last.frame):
        from snugfit.versions import __version__

        return (
            f". This is a bug in snugfit {__version__}, not a mistake in your job: {cause}{last}. Please "
            "report it with the job, the recipe and the output of snugfit env."
        )
    # The model's own code fails on these shapes.
    return (
        f": {cause}{module}. A real step most likely fails there too. Check that the sizes in the config "
        f"match, and that the task suits the model. If a real step works, measure it, with {measurement}."
    )


def _lacking_key(error: Exception) -> str | None:
    """Return the key that a transformers config lacks, if the error is about a missing key; None
    otherwise.
    """
    from transformers import PretrainedConfig

    asks_config = isinstance(error, AttributeError) and isinstance(error.obj, PretrainedConfig)
    return getattr(error, "name", None) if asks_config else None


def _what_depends(error: Exception) -> str:
    """Return a sentence on an operator whose output shape depends on data, with its name as in torch's error,
    such as `aten::nonzero`.
    """
    operator = re.search(r"\b(aten::|torch\.)(\w+)", str(error).partition("\n")[0])
    return f"the shape of the output of {operator[2]} depends on its data" if operator else _first_line(error)


def _is_ours(error: Exception, last: FrameType) -> bool:
    module = module_of(last)
    if not module.startswith("snugfit."):
        return False
    # An operator fails in C++, so the last frame is its caller. For a model's operators, the caller is the
    # shape cache.
    return module != _RUNS_OPERATORS and not isinstance(error, RuntimeError)


def _place(error: Exception) -> str:
    """Return the failing line of the model's code: the last stack frame outside of torch and snugfit. It is
    empty if there is none.
    """
    # The last such frame is the innermost line that the user can change.
    own = [stop for stop in _frames(error) if not _passes_on(module_of(stop.frame))]
    return str(own[-1]) if own else ""


def _passes_on(module: str) -> bool:
    """Return True for modules that call a model's code: torch, snugfit, and the attribute access of a
    config.
    """
    return module.partition(".")[0] in ("torch", "snugfit") or "configuration_" in module


def _frames(error: Exception) -> list[CodeLine]:
    """Return the stack frames of a simulation's error, the outermost first."""
    return [CodeLine(*stop) for stop in traceback.walk_tb(error.__traceback__)]


def _first_line(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{first} ({type(error).__name__})" if first else type(error).__name__
