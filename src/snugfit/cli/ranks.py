"""A command as one of several processes: the first speaks for all, and another of a fault of its own.

Started by torchrun, each process runs the whole command. What all find out alike (a mistake in the job file)
the first says, with its exit code. A fault of one alone is said by that one, with its rank. Either is
written where torch's launcher looks for it (`TORCHELASTIC_ERROR_FILE`). Started by our own `--gpus N`, nobody
says it but the launcher, once (`launch.py`).

When the launcher dies, so do they: the kernel is asked for it.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from snugfit.errors import SnugfitError, escape_controls
from snugfit.training.ranks import ToldElsewhere, World, world

LAUNCHED = "SNUGFIT_LAUNCHED"
"""The variable by which processes know that `launch.py` started them."""


@contextmanager
def one_of_several() -> Iterator[None]:
    """Within it the command runs. Nothing is done where no launcher has started several processes. Raises
    `ToldElsewhere` for an error that was told, or is told by another process."""
    here = world()
    if here is None or here.size == 1:
        yield
        return
    from snugfit.measurement.process import die_with_parent

    die_with_parent(os.getppid())
    stdout, stderr = sys.stdout, sys.stderr
    try:
        if here.rank:
            sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
        yield
    except ToldElsewhere:
        raise
    except Exception as fault:
        code = int(getattr(fault, "exit_code", 1))
        _record(fault)
        if LAUNCHED not in os.environ:
            if not here.rank:
                raise
            if _are_joined():
                print(escape_controls(_text(fault, here)), file=stderr, flush=True)
        raise ToldElsewhere(str(fault), code) from fault
    finally:
        sys.stdout, sys.stderr = stdout, stderr


def _record(fault: Exception) -> None:
    """Writes the fault where torch's launcher reads it, if one has started this process."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(fault)


def _are_joined() -> bool:
    """Whether the processes know of each other already: before that, all find out the same."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _text(fault: Exception, here: World) -> str:
    if isinstance(fault, SnugfitError):
        return f"snugfit: rank {here.rank}: {fault}"
    return f"snugfit: rank {here.rank}:\n{''.join(traceback.format_exception(fault))}"
