"""A command as one of several processes: the first speaks for all, and another of a fault of its own.

Started by torchrun, each process runs the whole command. What all find out alike (a mistake in the job file)
the first says, with its exit code. A fault of one alone is said by that one, with its rank. Either is
written where torch's launcher looks for it (`TORCHELASTIC_ERROR_FILE`). Started by our own `--gpus N`, nobody
says it but the launcher, once (`launch.py`).

When the launcher dies, so do they: the kernel is asked for it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from snugfit.errors import SnugfitError, escape_controls
from snugfit.training.ranks import ToldElsewhere, world

LAUNCHED = "SNUGFIT_LAUNCHED"
"""The variable by which processes know that `launch.py` started them."""

STARTED_AGAIN = "SNUGFIT_STARTED_AGAIN"
"""The variable by which they know that it has done so before, for the same run."""

CAN_START_AGAIN = "can_start_again"
"""The attribute of an error, and the word in the launcher's file, that say that the same command goes on."""


def is_started_again() -> bool:
    """Whether a launcher, ours or torchrun with `--max-restarts`, has started this command for the same run
    before."""
    return STARTED_AGAIN in os.environ or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


@contextmanager
def one_of_several() -> Iterator[None]:
    """Within it the command runs. Nothing is done where no launcher has started several processes. Raises
    `ToldElsewhere` for an error that was told, or is told by another process."""
    process = world()
    if process is None or process.size == 1:
        yield
        return
    from snugfit.measurement.process import die_with_parent

    die_with_parent(os.getppid())
    stdout, stderr = sys.stdout, sys.stderr
    try:
        if process.rank:
            sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
        yield
    except ToldElsewhere:
        raise
    except Exception as fault:
        code = int(getattr(fault, "exit_code", 1))
        _record(fault)
        if LAUNCHED not in os.environ:
            if not process.rank:
                raise
            if _are_joined():
                text = f"snugfit: rank {process.rank}: {_text(fault)}"
                print(escape_controls(text), file=stderr, flush=True)
        raise ToldElsewhere(str(fault), code) from fault
    finally:
        sys.stdout, sys.stderr = stdout, stderr


def _record(fault: Exception) -> None:
    """Writes the fault where torch's launcher reads it, if one has started this process, as
    `ErrorHandler.record_exception` does; for an error on purpose without the traceback that torchrun would
    print."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more: dict[str, Any] = {"py_callstack": _text(fault), "timestamp": str(int(time.time()))}
        more[CAN_START_AGAIN] = bool(getattr(fault, CAN_START_AGAIN, False))
        document = {"message": {"message": f"{type(fault).__name__}: {fault}", "extraInfo": more}}
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump(document, file)


def _are_joined() -> bool:
    """Whether the processes know of each other already: before that, all find out the same."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _text(fault: Exception) -> str:
    """What is said of it: the message alone of an error that is raised on purpose."""
    return str(fault) if isinstance(fault, SnugfitError) else "".join(traceback.format_exception(fault))
