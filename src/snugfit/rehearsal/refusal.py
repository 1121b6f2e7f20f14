"""Why a step could not be rehearsed, in words that someone can act on.

Whatever a model's code, torch or a library raises on tensors without data ends here, and so do our own
mistakes. The causes are distinguished by the type of the error and by the frames it passed:

1. a shape or a number that depends on data: torch refuses it on `meta` with a `NotImplementedError`. Such a
   step has no trace; measuring it works;
2. a key that the architecture's code asks its config for, and that is not there: the config's fault;
3. an error that begins in snugfit's own code: ours. An operator's refusal comes out of C++, so its last frame
   is the line that ran it, which for a model's operators is the shape cache's; that counts as the model's;
4. anything else: the model's own code fails on these shapes, and a real step most likely does too.
"""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING

from snugfit.errors import ModelError, RehearsalError, SnugfitError, lacks_package
from snugfit.rehearsal.record.asker import CodeLine, module_of

if TYPE_CHECKING:
    from types import FrameType

    from snugfit.job.job import Job

_RUNS_OPERATORS = "snugfit.rehearsal.record.shape_cache"
_RUNS_MODULES = "snugfit.step."


def refusal(job: Job, error: Exception) -> SnugfitError:
    """The one clear error for what a rehearsal of this job raised."""
    name = job.model.name
    if key := _lacking_key(error):
        return ModelError(f'{name}: its config has no "{key}", which {job.task} needs{_where(error)}.')
    if lacking := lacks_package(name, error):
        return ModelError(lacking)
    if isinstance(error, NotImplementedError):
        return RehearsalError(
            f"{name} could not be rehearsed: {_what_depends(error)}{_where(error)}. A rehearsal has "
            "shapes and no data, so this step has no trace; measure it instead, with snugfit measure."
        )
    cause = _first_line(error)
    last = _frames(error)[-1].frame
    # the loop that takes the loss out of a user's module fails at what the module gave
    if job.model.module is not None and module_of(last).startswith(_RUNS_MODULES):
        return RehearsalError(
            f"{name} could not be rehearsed: its output holds no loss ({cause}). A module gives its loss as "
            'a tensor of one number, as `.loss`, as "loss" of a dict, or first of a tuple.'
        )
    if _is_ours(error, last):
        from snugfit.versions import __version__

        return RehearsalError(
            f"{name} could not be rehearsed, and that is a fault of snugfit {__version__}, not of your job: "
            f"{cause}{_frames(error)[-1]}. Please report it with the job, the recipe and what "
            "snugfit doctor prints."
        )
    return RehearsalError(
        f"{name} could not be rehearsed: {cause}{_where(error)}. Most likely a real step fails there too: "
        "check that the config's sizes agree, and that the task is the model's. If it does not, measure it "
        "instead, with snugfit measure."
    )


def _lacking_key(error: Exception) -> str | None:
    """The key that a config of transformers lacks, when that is the error."""
    from transformers import PretrainedConfig

    asks_config = isinstance(error, AttributeError) and isinstance(error.obj, PretrainedConfig)
    return getattr(error, "name", None) if asks_config else None


def _what_depends(error: Exception) -> str:
    """torch's refusals on `meta` name the operator: `aten::nonzero`, `torch.unique_consecutive`."""
    operator = re.search(r"\b(aten::|torch\.)(\w+)", str(error).partition("\n")[0])
    return f"the shape of what {operator[2]} gives depends on its data" if operator else _first_line(error)


def _is_ours(error: Exception, last: FrameType) -> bool:
    module = module_of(last)
    if not module.startswith("snugfit."):
        return False
    return module != _RUNS_OPERATORS and not isinstance(error, RuntimeError)


def _where(error: Exception) -> str:
    """Which line of the model's code failed, if one did: the last frame that is neither torch's nor ours."""
    own = [stop for stop in _frames(error) if not _passes_on(module_of(stop.frame))]
    return str(own[-1]) if own else ""


def _passes_on(module: str) -> bool:
    """Whether it is code that a model's calls pass through: torch's, ours, and the lookup in a config."""
    return module.partition(".")[0] in ("torch", "snugfit") or "configuration_" in module


def _frames(error: Exception) -> list[CodeLine]:
    """The frames that the error passed, from the rehearsal inwards."""
    return [CodeLine(*stop) for stop in traceback.walk_tb(error.__traceback__)]


def _first_line(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{first} ({type(error).__name__})" if first else type(error).__name__
