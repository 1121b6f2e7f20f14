"""`--gpus N`: the same command in N processes, started and watched by torch's own launcher.

It equals `torchrun --nproc-per-node N -m snugfit ...`, with four additions.

- Signals are passed on. No SIGKILL follows after 30 seconds as with torchrun, since a checkpoint may take
  longer. A second signal ends the run at once.
- The processes' ends are summarized in one message and one exit code.
- CPU cores are divided: each process gets its share of the cores as threads.
- When one process runs out of memory and records that the run can continue (`start_again.py`), all are
  started again. Each recipe needs less memory than the last, until none is left.

No other error starts the processes again: the same command resumes the run.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from types import FrameType
from typing import Any

from snugfit.errors import SnugfitError
from snugfit.frontends.one_of_several import CAN_START_AGAIN, LAUNCHED, STARTED_AGAIN
from snugfit.training.interrupt import AT_ONCE, EXIT_CODES

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
STOPPED = {*EXIT_CODES.values(), *AT_ONCE.values()}

ENTRY = ("-m", "snugfit")
"""Command-line arguments of Python that start snugfit in each process."""

AGAIN = "snugfit: memory ran out in one process; all start again, under a recipe that needs less"

NEXT = "Start the command again to resume the run."


class RankFailed(SnugfitError):
    """Error: one of several processes failed, which ends the run."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def launch(processes: int, command_line: Sequence[str]) -> int:
    """Run the command in `processes` processes on this host; return their exit code.

    The code is 0, or that of a run that a signal stopped. Raises `RankFailed` with the first cause when a
    process failed.
    """
    os.environ[LAUNCHED] = "1"
    os.environ.pop(STARTED_AGAIN, None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    with _passing_on_signals() as passed:
        while True:
            ended = _run(processes, command_line)
            if isinstance(ended, int):
                return ended
            if any(number != signal.SIGUSR1 for number in passed) or not _can_start_again(ended):
                return _ending(ended, passed)
            print(AGAIN, file=sys.stderr, flush=True)
            os.environ[STARTED_AGAIN] = "1"


def _run(processes: int, command_line: Sequence[str]) -> int | Mapping[int, Any]:
    """Run the command once in several processes. Return their exit code, or their failures by rank."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quieten()  # loggers exist only once their modules are imported
    with tempfile.TemporaryDirectory(prefix="snugfit-") as logs:
        more: dict[str, Any] = {"signals_to_handle": "SIGQUIT"}
        known = {field.name for field in fields(LaunchConfig)}
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            **{name: value for name, value in more.items() if name in known},
        )
        try:
            elastic_launch(config=config, entrypoint=sys.executable)(*ENTRY, *command_line)
        except ChildFailedError as ended:
            failures: Mapping[int, Any] = ended.failures
            return failures
        except SignalException as stopped:  # raised by a launcher that handles the signal itself
            return EXIT_CODES.get(signal.Signals(stopped.sigval), 1)
    return 0


def _quieten() -> None:
    """Disable the log lines that torch's launcher writes for each ended process; `_ending` reports them
    instead."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).disabled = True


@contextmanager
def _passing_on_signals() -> Iterator[list[int]]:
    """Context that passes signals on to its child processes, and yields the list of received ones.

    The processes have a session of their own, so Ctrl-C reaches them only through this handler.
    """
    import psutil

    passed: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed.append(number)
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        yield passed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ending(failures: Mapping[int, Any], passed: Sequence[int]) -> int:
    """Return the exit code of processes that signals stopped. Raises `RankFailed` for any other end.

    The error names a process that recorded one, else one that a signal killed. Processes that ended as a
    consequence come last.
    """
    rank = min(failures, key=lambda one: (_order(failures[one]), failures[one].timestamp, one))
    failure = failures[rank]
    code = failure.exitcode
    error = _error_of(failure)
    if error is None and code in STOPPED:
        return int(code)
    if error is None and code < 0 and -code in passed:
        return AT_ONCE.get(signal.Signals(-code), 1)
    if error is not None:
        alike = len({_error_of(other) for other in failures.values() if _error_of(other)}) == 1
        by_all = alike and sum(_error_of(other) is not None for other in failures.values()) > 1
        raise RankFailed(error if by_all else f"rank {rank}: {error}", code if code > 0 else 1)
    if code < 0:
        name = signal.Signals(-code).name
        why = " The system does this when the machine's memory runs out." if -code == signal.SIGKILL else ""
        raise RankFailed(f"rank {rank}: its process was ended by {name}.{why} {NEXT}", 1)
    raise RankFailed(f"rank {rank}: its process ended with exit code {code}, without a message. {NEXT}", code)


def _can_start_again(failures: Mapping[int, Any]) -> bool:
    """Return True if a process recorded that the same command continues.

    The errors of the other processes follow from its end, or will occur again.
    """
    return any(_more_of(failure).get(CAN_START_AGAIN) is True for failure in failures.values())


def _order(failure: Any) -> int:
    """Return a sort key of a failed process: 0 for the likely cause of the run's end, more for consequences.
    torch ends the remaining processes by SIGTERM, and those that ignore it by SIGKILL.
    """
    if _error_of(failure) is not None:
        return 0
    if failure.exitcode < 0:
        return 1 if -failure.exitcode != signal.SIGTERM else 4
    return 2 if failure.exitcode in STOPPED else 3


def _error_of(failure: Any) -> str | None:
    """Return the error that a process recorded before it ended (`one_of_several.py`)."""
    message = failure.error_file_data.get("message")
    if not isinstance(message, Mapping):
        return None
    return str(_more_of(failure).get("py_callstack", message.get("message", ""))).strip()


def _more_of(failure: Any) -> Mapping[str, Any]:
    """Return further details of the failure from the process's error file, such as its traceback."""
    message = failure.error_file_data.get("message")
    more = message.get("extraInfo") if isinstance(message, Mapping) else None
    return more if isinstance(more, Mapping) else {}
