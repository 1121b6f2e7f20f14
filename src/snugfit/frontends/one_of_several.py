"""Error reports of a command that runs in several processes: each error is printed once.

With torchrun, each process runs the whole command. The first process reports errors that all processes have,
such as a mistake in the job file. An error of a single process is reported by that process, with its rank.
Either error is also written to the file that torch's launcher reads (`TORCHELASTIC_ERROR_FILE`). With `--gpus
N`, only snugfit's launcher reports the error (`Feature.processes`).

When the launcher dies, the kernel kills its processes, because each of them has registered for it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from snugfit.errors import SnugfitError, escape_controls
from snugfit.training.ranks import ToldElsewhere, are_joined, world

COMMAND_LINE: ContextVar[tuple[str, ...]] = ContextVar("COMMAND_LINE", default=())
"""Command-line arguments of the running command, without the program's name."""

OWN_PROCESS: ContextVar[bool] = ContextVar("OWN_PROCESS", default=False)
"""True if the process runs one command and then exits."""

LAUNCHED = "SNUGFIT_LAUNCHED"
"""Name of the environment variable in processes that `--gpus N` started."""

STARTED_AGAIN = "SNUGFIT_STARTED_AGAIN"
"""Name of the environment variable in processes that `--gpus N` restarted to continue the same run."""

CAN_START_AGAIN = "can_start_again"
"""Name of an error's attribute, and of a key in the launcher's file. Either means that the command can
restart."""


def is_started_again() -> bool:
    """Return True if a launcher has restarted this command for the same run: snugfit's own launcher, or
    torchrun with `--max-restarts`.

    The launcher is ours, or torchrun with `--max-restarts`.
    """
    return STARTED_AGAIN in os.environ or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


@contextmanager
def one_of_several() -> Iterator[None]:
    """Context that reports a command's error in one of several processes only; without effect in a single
    process.

    Raises `ToldElsewhere` for an error that has been reported, or that another process reports.
    """
    process = world()
    if process is None or process.size == 1:
        yield
        return
    from snugfit.measurement.process import die_with_parent

    # This process must end when its launcher is killed.
    die_with_parent(os.getppid())
    stdout, stderr = sys.stdout, sys.stderr
    try:
        if process.rank:
            # Only the first process prints.
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
            if are_joined():  # before that, all processes raise the same errors
                text = f"snugfit: rank {process.rank}: {_text(fault)}"
                print(escape_controls(text), file=stderr, flush=True)
        raise ToldElsewhere(str(fault), code) from fault
    finally:
        sys.stdout, sys.stderr = stdout, stderr


def _record(fault: Exception) -> None:
    """Write the error to the file of torch's launcher, if one started this process.

    The format is that of `ErrorHandler.record_exception`. An expected error is written without the traceback
    that torchrun would print.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more: dict[str, Any] = {"py_callstack": _text(fault), "timestamp": str(int(time.time()))}
        more[CAN_START_AGAIN] = bool(getattr(fault, CAN_START_AGAIN, False))
        document = {"message": {"message": f"{type(fault).__name__}: {fault}", "extraInfo": more}}
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump(document, file)


def _text(fault: Exception) -> str:
    """Return the text of an error: the message alone for an expected error, otherwise the traceback."""
    return str(fault) if isinstance(fault, SnugfitError) else "".join(traceback.format_exception(fault))
