"""Plans remembered: a question asked again is answered from a file.

A plan is one JSON file in the user's cache folder (`$XDG_CACHE_HOME/snugfit/plans`, or `~/.cache/...`),
named by a digest of all that it depends on: the job, the GPU and its rates (a calibration changes them), the
memory, fidelity and objective, the versions of the packages that it was rehearsed with, and the source files
of snugfit itself. A file that is damaged, or that another version wrote, counts as none. A folder that cannot
be written is no error: the plan is made anew each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.planning.plan import Plan
from snugfit.prediction.profile import installed_versions
from snugfit.prediction.rates import rates_for

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job

LARGEST_FILE = 16 << 20
"""A plan is some hundred kilobytes; what is larger is none."""


def folder() -> Path:
    """Where plans are remembered."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return root / "snugfit" / "plans"


def key_of(job: Job, gpu: Gpu | None, **asked: Any) -> str | None:
    """A digest of all that a plan depends on; None for a model that lives in this process only. Raises
    `GpuError` as `rates_for` does."""
    if job.model.module is not None:
        return None
    question = {
        "job": job.to_json(),
        "gpu": gpu.to_json() if gpu else None,
        "rates": rates_for(gpu).to_json() if gpu else None,
        "asked": asked,
        "versions": installed_versions(),
        "source": _source(),
    }
    text = json.dumps(question, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def recall(key: str) -> Plan | None:
    """The plan that was remembered under this key; None when there is none that can be read."""
    path = folder() / f"{key}.json"
    try:
        if path.stat().st_size > LARGEST_FILE:
            return None
        document = json.loads(path.read_text(encoding="utf-8"))
        return Plan.from_json(document) if isinstance(document, dict) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SnugfitError):
        return None


def remember(key: str, plan: Plan) -> None:
    """Writes the plan down, whole or not at all."""
    path = folder() / f"{key}.json"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=".plan-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(plan.to_json(), file)
            os.replace(beside, path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise


def _source() -> str:
    """A digest of snugfit's own files: a plan of another version of them is another plan."""
    root = Path(__file__).parents[1]
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json"))
    seen = [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(seen).encode()).hexdigest()
