"""Every error that a user can meet, with the exit code of the command that raised it.

    SnugfitError                 1   a failure that is not the user's mistake
    +-- UsageError               2   an invalid request: the message gives the value, the allowed ones
    |   |                            and a remedy
    |   +-- ModelError           2   the model: its name, its folder, its config.json
    |   +-- JobError             2   task, lengths, batch
    |   +-- RecipeError          2   a technique's name, its settings, or a pair that cannot go together
    |   +-- GpuError             2   the GPU's name or its memory
    +-- NothingFits              3   a valid request that no recipe can meet
    +-- OutOfMemory              4   a measured run ran out of GPU memory
    +-- OutsideBand              5   a prediction differs from its measurement by more than the stated band
    +-- RehearsalError           1   a failed simulation: an operator without shapes, a model that fails
    |                                on its shapes, a bug of ours, or torch internals that the
    |                                policies do not support; the message gives the cause
    +-- MeasurementError         1   a measurement's process died, or the GPU was not clean

A command prints the message alone, without a traceback. A message may quote text of files from other people
(a label, a name), so control characters are shown as escapes.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Regular expression of control characters that a terminal would interpret, or that reverse the direction of
the text. Tabs and new lines are excluded.
"""


def escape_controls(text: str) -> str:
    r"""Return the text with control characters as escapes, such as `\x1b`."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class SnugfitError(Exception):
    """Base class of all errors that snugfit raises on purpose."""

    exit_code = 1

    def __str__(self) -> str:
        return escape_controls(super().__str__())


class UsageError(SnugfitError):
    """Error for an invalid request. Its message has the given value, the allowed values and a next action."""

    exit_code = 2


class ModelError(UsageError):
    """Error in the model's name, folder or configuration."""


class JobError(UsageError):
    """Error in the job's task, lengths or batch."""


class RecipeError(UsageError):
    """Error in a recipe: a technique's name, its settings, or techniques that exclude each other."""


class GpuError(UsageError):
    """Error in the GPU's name or its memory."""


class NothingFits(SnugfitError):
    """Error for a valid request that no recipe can meet, for example within the memory of a GPU."""

    exit_code = 3


class OutOfMemory(SnugfitError):
    """Error for a measured run that ran out of GPU memory."""

    exit_code = 4


class OutsideBand(SnugfitError):
    """Error for a prediction that differs from its measurement by more than the allowed error."""

    exit_code = 5


class RehearsalError(SnugfitError):
    """Error for a failed simulation: the step cannot run on tensors without data."""


class MeasurementError(SnugfitError):
    """Error for a measurement whose process died, or whose GPU other processes used."""


NEAR_MISS = 0.75
"""Smallest similarity (1 for equal words) at which an unknown word counts as a typing mistake for a known
one.

The similarity of `linaer` and `linear` is 0.83, and that of `liger` and `eager` 0.6.
"""


def nearest(word: str, allowed: Iterable[str], *, count: int = 3, cutoff: float = NEAR_MISS) -> list[str]:
    """Return the allowed words most similar to `word`, best first; empty if none reaches the similarity
    `cutoff` (1 is equal).
    """
    choices = list(allowed)
    lowered = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(str(word).lower(), lowered, n=count, cutoff=cutoff)
    return [lowered[name] for name in matches]


def did_you_mean(word: str, allowed: Iterable[str], *, cutoff: float = NEAR_MISS) -> str:
    """Return ` Did you mean a or b?`, or an empty string if no allowed word is similar."""
    matches = nearest(word, allowed, cutoff=cutoff)
    return f" Did you mean {' or '.join(repr(name) for name in matches)}?" if matches else ""


TRAIN, DATA, PLOTS = '"snugfit[train]"', '"snugfit[data]"', '"snugfit[plots]"'

EXTRAS = {
    "accelerate": TRAIN,
    "psutil": TRAIN,
    "pynvml": TRAIN,
    "datasets": DATA,
    "pandas": DATA,
    "PIL": DATA,
    "pyarrow": DATA,
    "matplotlib": PLOTS,
}
"""Argument of `pip install` that brings a package of an extra, by the name under which Python imports it."""


def missing_package_message(name: str, error: BaseException) -> str | None:
    """Return a message that `name` needs the package that could not be imported, or None for any other error.

    The cause is a failed import or transformers' `requires_backends`. An installed package that cannot be
    imported counts as another error. One of its files may be missing, or its caller may not support its
    version.
    """
    # Python and transformers use these words. An ImportError with other words has another cause.
    message = re.search(r"^No module named '([\w-]+)|requires the ([\w.-]+) library", str(error))
    if not isinstance(error, ImportError) or not message:
        return None
    package = message[message.lastindex or 0]
    # A package that is in `sys.modules` is installed: only a part of it is missing.
    return None if package in sys.modules else _needs_package(name, package)


def require_packages(name: str, *packages: str) -> None:
    """Raise `UsageError` if one of these packages is not installed. `name` is the function or option that
    needs them.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise UsageError(_needs_package(name, package))


def _needs_package(name: str, package: str) -> str:
    cure = EXTRAS.get(package, package)
    return f"{name} needs {package}, which is not installed. Try: pip install {cure}"


def some_of(names: Sequence[str], limit: int = 3) -> str:
    """Return names as text, `a, b, c and 2 more`: the first few of them, and the number of the rest."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more}"


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return the message of another library's error on one line of at most `limit` characters."""
    return " ".join(str(error).split())[:limit]
