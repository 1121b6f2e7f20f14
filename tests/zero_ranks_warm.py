"""The process that forks those that train by DeepSpeed's engine: it has imported DeepSpeed too."""

from __future__ import annotations

import contextlib
import sys

import many_ranks


def warm() -> None:
    """What the process that forks does first."""
    many_ranks.warm()
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed
        import deepspeed.ops.adam  # noqa: F401
