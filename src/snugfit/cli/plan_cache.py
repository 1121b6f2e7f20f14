"""Plans remembered: a question asked again is answered from a file.

A plan, or the plans for many GPUs, is one JSON file in the user's cache folder
(`$XDG_CACHE_HOME/snugfit/plans`, or `~/.cache/...`), named by a digest of all that it depends on: the job,
the GPUs and their rates (a calibration changes them), the memory, fidelity and objective, the versions of the
packages that it was rehearsed with, and the source files of snugfit itself. A file that is damaged, or that
another version wrote, counts as none. A folder that cannot be written is no error: the plan is made anew each
time.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from snugfit.cli.progress import show_progress
from snugfit.documents import BadDocument, read_document, write_document
from snugfit.errors import GpuError, SnugfitError, UsageError, did_you_mean
from snugfit.prediction.profile import installed_versions
from snugfit.prediction.rates import rates_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.plan import Plan


class Rememberable(Protocol):
    """What can be written down."""

    def to_json(self) -> dict[str, Any]:
        """The answer as a JSON object."""


_Answer = TypeVar("_Answer", bound=Rememberable)


LARGEST_FILE = 16 << 20
"""A plan is some hundred kilobytes; what is larger is none."""


def folder() -> Path:
    """Where plans are remembered."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return root / "snugfit" / "plans"


def key_of(job: Job, *gpus: Gpu | None, **asked: Any) -> str | None:
    """A digest of all that a plan for these GPUs depends on; None for a model that lives in this process
    only."""
    if job.model.module is not None:
        return None
    question = {
        "gpus": [gpu.to_json() for gpu in gpus if gpu],
        "rates": [_rates(gpu, count) for gpu in gpus if gpu for count in asked.get("gpus") or (1,)],
        "job": job.to_json(),
        "asked": asked,
        "versions": installed_versions(),
        "source": _source(),
    }
    text = json.dumps(question, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def recall(key: str, read: Callable[[dict[str, Any]], _Answer]) -> _Answer | None:
    """What was remembered under this key, as `read` makes it of its document; None when there is none that
    can be read."""
    try:
        return read(read_document(folder() / f"{key}.json", limit=LARGEST_FILE))
    except (OSError, BadDocument, ValueError, KeyError, TypeError, AttributeError, SnugfitError):
        return None


def answer(
    read: Callable[[dict[str, Any]], _Answer],
    compute: Callable[[Callable[[str], None]], _Answer],
    job: Job,
    *gpus: Gpu | None,
    fresh: bool,
    **asked: Any,
) -> _Answer:
    """The remembered answer to what is `asked` about this job on these GPUs; or, where there is none or a
    `fresh` one is wanted, what `compute` gives, which shows its progress and is remembered."""
    key = key_of(job, *gpus, **asked)
    if key and not fresh and (known := recall(key, read)):
        return known
    with show_progress() as tell:
        new = compute(tell)
    if key:
        remember(key, new)
    return new


def plan(job: Job, *, fresh: bool = False, **asked: Any) -> Plan:
    """`planning.search.search.plan`, whose arguments it takes, with the command's memory and its progress on
    stderr: a question asked again, here or by the command, is answered from a file unless it is `fresh`. With
    a `clock`, with start-up rates of one's own or without a GPU nothing is remembered."""
    from snugfit.job.gpu import find_gpu
    from snugfit.job.job import Job
    from snugfit.planning.plan import Plan
    from snugfit.planning.request import refuse_what_cannot_be_called
    from snugfit.planning.search import search

    known = inspect.signature(search.plan)
    refuse_what_cannot_be_called(tell=asked.get("tell"), clock=asked.get("clock"))
    try:
        bound = known.bind(job, **asked)
    except TypeError:
        name = min(asked.keys() - known.parameters.keys())
        takes = ", ".join(list(known.parameters)[1:])
        guess = did_you_mean(name, known.parameters)
        raise UsageError(f"plan takes no {name}.{guess} It takes {takes}.") from None
    if {"clock", "once"} & asked.keys() or asked.get("gpu") is None or not isinstance(job, Job):
        return search.plan(job, **asked)
    gpu = find_gpu(asked["gpu"])
    bound.apply_defaults()
    left_out = ("job", "gpu", "clock", "once", "tell", "workers")
    question = {name: value for name, value in bound.arguments.items() if name not in left_out}
    return answer(
        Plan.from_json,
        lambda tell: search.plan(job, **{**asked, "tell": asked.get("tell", tell)}),
        job,
        gpu,
        fresh=fresh,
        **question,
    )


def remember(key: str, answer: Rememberable) -> None:
    """Writes the answer down, whole or not at all."""
    with contextlib.suppress(OSError, ValueError):
        folder().mkdir(parents=True, exist_ok=True)
        write_document(folder() / f"{key}.json", answer.to_json())


def _rates(gpu: Gpu, gpus: int) -> Any:
    """How fast this GPU is while so many work, or why that is not known."""
    try:
        return rates_for(gpu, gpus).to_json()
    except GpuError as unknown:
        return str(unknown)


def _source() -> str:
    """A digest of snugfit's own files: a plan of another version of them is another plan."""
    root = Path(__file__).parents[1]
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json"))
    stats = [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()
