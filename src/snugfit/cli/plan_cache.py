"""A cache of commands' results on disk: a repeated command reads its result from a file.

A result (a prediction, a plan, the plans for many GPUs) is one JSON file in the user's cache folder. That is
`$XDG_CACHE_HOME/snugfit/answers`, or `~/.cache/...`. A digest of all its inputs is the file's name. The
inputs are the job, every other argument, and the GPUs and their rates, which a calibration changes. They also
include the versions of the packages of the simulation, and the source files of snugfit itself.

A file that is damaged, or that another version wrote, is ignored. A folder that cannot be written is no
error: each result is then computed again. The least recently used results are deleted when the folder grows
too large.

Reading a result imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from snugfit.cli.progress import show_progress
from snugfit.documents import BadDocument, read_document, write_document
from snugfit.errors import GpuError, SnugfitError, UsageError, did_you_mean
from snugfit.frontends.one_of_several import COMMAND_LINE
from snugfit.prediction.profile import installed_versions
from snugfit.prediction.rates import rates_for
from snugfit.prediction.worker_pool import few_collections

if TYPE_CHECKING:
    from collections.abc import Callable

    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.plan import Plan


class Storable(Protocol):
    """Protocol for a result that can be converted to a JSON document for the cache."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""


_Answer = TypeVar("_Answer", bound=Storable)


LARGEST_FILE = 16 << 20
"""Largest size of one stored plan in bytes. A plan has some hundred kilobytes."""

LARGEST_FOLDER = 64 << 20
"""Largest size of all stored plans together in bytes, enough for some hundreds of them."""


def folder() -> Path:
    """Return the cache folder in which results of commands are stored. Without a home folder, the path is
    relative and has no results.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification ignores a relative path.
    root = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~/.cache"))
    return root / "snugfit" / "answers"


def key_of(job: Job, *gpus: Gpu | None, **arguments: Any) -> str | None:
    """Return a digest of all inputs that determine a command's result for these GPUs.

    None for a model that exists in this process only, whose results are not cached.
    """
    if job.model.module is not None:
        return None
    question = {
        "gpus": [gpu.to_json() for gpu in gpus if gpu],
        "rates": [_rates(gpu, count) for gpu in gpus if gpu for count in arguments.get("gpus") or (1,)],
        "job": job.to_json(),
        "asked": arguments,
        "versions": installed_versions(),
        "source": _source(),
    }
    text = json.dumps(question, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def recall(key: str, read: Callable[[dict[str, Any]], _Answer]) -> _Answer | None:
    """Return the cached result for this key, converted from its document by `read`; None if it is missing or
    invalid.
    """
    file = folder() / f"{key}.json"
    try:
        answer = read(read_document(file, limit=LARGEST_FILE))
    except (OSError, BadDocument, ValueError, KeyError, TypeError, AttributeError, SnugfitError):
        return None
    # `_prune` removes the plans that were not used for the longest time, by this modification time.
    with contextlib.suppress(OSError):
        os.utime(file)
    return answer


def answer(
    read: Callable[[dict[str, Any]], _Answer],
    compute: Callable[[Callable[[str], None]], _Answer],
    job: Job,
    *gpus: Gpu | None,
    fresh: bool,
    first: str = "",
    **arguments: Any,
) -> _Answer:
    """Return the result for this job, these GPUs and the arguments `arguments`, from the cache or computed.

    If none is stored, or with `fresh`, `compute` is called, with its progress shown, and its result is
    stored. `first` is the progress line before any computation.
    """
    key = key_of(job, *gpus, **arguments)
    if key and not fresh and (known := recall(key, read)) is not None:
        return known
    with few_collections(), show_progress(first) as tell:
        new = compute(tell)
    if key:
        store_result(key, new)
    return new


def plan(job: Job, *, fresh: bool = False, **arguments: Any) -> Plan:
    """Return the plan of `planning.search.search.plan`, with the command's cache and its progress on stderr.

    The arguments are those of that function. A plan that was made before, here or by the command, is read
    from a file, except with `fresh`. With a `clock`, with custom start-up rates or without a GPU, the plan is
    not stored.
    """
    from snugfit.deferred_imports import defer_imports
    from snugfit.job.gpu import find_gpu
    from snugfit.job.job import Job
    from snugfit.planning.plan import Plan
    from snugfit.planning.request import refuse_non_callables
    from snugfit.planning.search import search

    known = inspect.signature(search.plan)
    refuse_non_callables(tell=arguments.get("tell"), clock=arguments.get("clock"))
    try:
        bound = known.bind(job, **arguments)
    except TypeError:
        name = min(arguments.keys() - known.parameters.keys())
        takes = ", ".join(list(known.parameters)[1:])
        guess = did_you_mean(name, known.parameters)
        raise UsageError(f"plan takes no {name}.{guess} It takes {takes}.") from None
    if {"clock", "once"} & arguments.keys() or arguments.get("gpu") is None or not isinstance(job, Job):
        return search.plan(job, **arguments)
    gpu = find_gpu(arguments["gpu"])
    bound.apply_defaults()
    # These arguments do not change a plan, or the cache's key has them separately.
    left_out = ("job", "gpu", "clock", "once", "tell", "workers")
    question = {name: value for name, value in bound.arguments.items() if name not in left_out}

    def search_for(tell: Callable[[str], None]) -> Plan:
        if COMMAND_LINE.get():
            defer_imports()  # only worker processes import torch, to simulate
        return search.plan(job, **{**arguments, "tell": arguments.get("tell", tell)})

    return answer(
        Plan.from_json,
        search_for,
        job,
        gpu,
        fresh=fresh,
        first=f"planning {job.model.name}" if COMMAND_LINE.get() else "",
        **question,
    )


def store_result(key: str, answer: Storable) -> None:
    """Store a command's result under this key, completely or not at all, and delete old results if the folder
    is too large.
    """
    if not folder().is_absolute():
        return
    with contextlib.suppress(OSError, ValueError):
        folder().mkdir(parents=True, exist_ok=True)
        write_document(folder() / f"{key}.json", answer.to_json())
        _prune(LARGEST_FOLDER)


def _prune(limit: int) -> None:
    """Delete the least recently used results until the rest has at most `limit` bytes."""
    with os.scandir(folder()) as entries:
        files = [(entry.stat().st_mtime_ns, entry.stat().st_size, entry.path) for entry in entries]
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > limit:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _rates(gpu: Gpu, gpus: int) -> Any:
    """Return the rates (FLOP/s, bytes/s, ...) of this GPU while `gpus` of them work, as a part of a cache
    key. If they are unknown, return the reason.
    """
    try:
        return rates_for(gpu, gpus).to_json()
    except GpuError as unknown:
        return str(unknown)


@functools.cache
def _source() -> str:
    """Return a digest of snugfit's own source files, as a part of a cache key."""
    root = Path(__file__).parents[1]
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json"))
    # Sizes and times of files are read much faster than their contents.
    stats = [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()
