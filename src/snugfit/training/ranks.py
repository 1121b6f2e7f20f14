"""The processes that train one model together, as seen by one of them.

torchrun starts them, or `snugfit train --gpus N`, which calls torch's launcher. Each process reads its rank
and the number of processes from the environment. They form three groups:

- default: gradients and weights. NCCL between GPUs, gloo for tensors on the CPU. torch's own DDP and FSDP2
  use it. As in most scripts it is bound to no device when it is made.
- host: common decisions, such as sums and the results of the first process. A few numbers a step over gloo,
  so that no process waits for a GPU.
- writing: checkpoints, which a thread writes while the steps use the other two groups.

Each process has a part of the global batch, by its position on the data axis of the device mesh. Several
processes may compute the same part, and then only one of them counts it (`Ranks.sharing`).

A run with a single process uses `ALONE`, which has the same interface and exchanges nothing.

If only one process detects an error, such as a wrong option, the first process reports it. The others raise
`ToldElsewhere` and print nothing. A process raises the same error if its exchange fails because another
process has ended. That process, or its launcher, reports the reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, final

from snugfit.errors import SnugfitError, UsageError

if TYPE_CHECKING:
    import torch

    from snugfit.techniques.wish import SeveralProcesses

Answer = TypeVar("Answer")

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables that torch's launcher sets for each process."""

_BROKEN = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Substrings of gloo's messages about a broken connection. gloo raises them as plain `RuntimeError`
(gloo/transport/tcp)."""


class ToldElsewhere(SnugfitError):
    """Error that ends a process because the run failed in another process, which reports the reason."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class World:
    """The number of processes that a launcher started together and the ranks of this one, from the
    environment.
    """

    rank: int
    """The rank of this process, from 0."""

    size: int
    """Number of processes that train together."""

    local_rank: int
    """Rank among the processes of this host, which is the index of the process's GPU."""


def world() -> World | None:
    """Read the environment variables of torch's launcher; return None without a launcher. Raises `UsageError`
    for invalid numbers.
    """
    environment = os.environ
    if not all(environment.get(name) for name in VARIABLES):
        return None
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_RANK", rank))
    except ValueError:
        rank, size, local = -1, 0, -1
    if not 0 <= rank < size or local < 0:
        values = ", ".join(f"{name}={environment.get(name)}" for name in (*VARIABLES[:2], "LOCAL_RANK"))
        raise UsageError(
            f"The environment has {values}. RANK must be from 0 to WORLD_SIZE - 1, and LOCAL_RANK 0 or more. "
            "Start the processes with torchrun --nproc-per-node N. For --gpus N, unset these variables first."
        )
    return World(rank=rank, size=size, local_rank=local)


@final
class Ranks:
    """One process of a training run, with its exchanges with the other processes."""

    def __init__(self, rank: int = 0, size: int = 1, *, host: Any = None, writing: Any = None) -> None:
        self.rank, self.size = rank, size
        self.host, self.writing = host, writing
        """Process groups on the host: one for the training loop, one for the thread that saves checkpoints.
        """
        self.data_rank, self.data_ranks = rank, size
        """Index of the part of the global batch that this process computes, and the number of parts."""
        self.counts = 1.0
        """Factor of this process's results in sums over the batch. It is below 1 if other processes compute
        the same part."""

    def sharing(self, processes: SeveralProcesses | None) -> Ranks:
        """Return a copy of this process's `Ranks`, with its place in a recipe's device mesh."""
        ranks = Ranks(self.rank, self.size, host=self.host, writing=self.writing)
        if processes is not None and processes.ranks:
            ranks.data_rank, ranks.data_ranks = processes.data_rank(self.rank), processes.data_ranks
            ranks.counts = processes.counts(self.rank)
        return ranks

    @property
    def is_first(self) -> bool:
        """True in the first process (rank 0), which writes the journal and prints messages."""
        return self.rank == 0

    @property
    def are_many(self) -> bool:
        """True if the run has several processes."""
        return self.size > 1

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return each number summed over all processes, identical in each, bit for bit."""
        if not self.are_many:
            return list(numbers)
        import torch
        import torch.distributed as dist

        # float64 represents token counts exactly.
        values = torch.tensor(numbers, dtype=torch.float64)
        with talking():
            dist.all_reduce(values, group=self.host)
        summed: list[float] = values.tolist()
        return summed

    def sum_parts(self, numbers: Sequence[float]) -> list[float]:
        """Return each number summed over the parts of the global batch, each part once."""
        return self.sum([self.counts and self.counts * number for number in numbers])

    def gather(self, value: Any) -> list[Any]:
        """Return each process's value by rank in the first process, and an empty list in the others."""
        if not self.are_many:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.size if self.is_first else None
        with talking():
            dist.gather_object(value, values, dst=0, group=self.host)
        return values or []

    def first_answers(self, function: Callable[[], Answer]) -> Answer:
        """Call `function` in the first process, and return its result in all processes.

        An error of `function` is raised in the first process, and `ToldElsewhere` in the others.
        """
        if not self.are_many:
            return function()
        fault: Exception | None = None
        values: list[Any] = [None, None]
        if self.is_first:
            try:
                values[0] = function()
            except Exception as error:
                fault = error
                values[1] = (str(error), getattr(error, "exit_code", 1))
        # The value is broadcast before the error is raised, because the other processes wait for it.
        _broadcast(values, self.host)
        if fault is not None:
            raise fault
        if values[1] is not None:
            raise ToldElsewhere(*values[1])
        answer: Answer = values[0]
        return answer

    def all_do(self, do: Callable[[], Answer]) -> Answer:
        """Call `do` in every process and return its result if no process failed. `do` must not communicate
        with other processes.

        The first process raises its own error. If the first did not fail, each failed process raises its own.
        All other processes raise `ToldElsewhere`.
        """
        if not self.are_many:
            return do()
        fault: SnugfitError | None = None
        try:
            answer = do()
        except SnugfitError as error:
            fault = error
        failed = float(fault is not None)
        of_first, of_all = self.sum([failed if self.is_first else 0.0, failed])
        if fault is not None and (self.is_first or not of_first):
            raise fault
        if of_all:
            text, code = (str(fault), fault.exit_code) if fault else ("Another process has an error.", 1)
            raise ToldElsewhere(text, code)
        return answer

    def common_error(self, error: SnugfitError) -> SnugfitError:
        """Return the error to raise in this process: `error` in the first one, `ToldElsewhere` in others,
        which print nothing.
        """
        return error if self.is_first else ToldElsewhere(str(error), error.exit_code)

    def wait(self) -> None:
        """Wait until all processes of the run call this."""
        self.sum([0.0])


ALONE = Ranks()
"""The `Ranks` of a run with one process."""


def _broadcast(values: list[Any], group: Any) -> None:
    """Copy the values of the first process to every other process, in place."""
    import torch.distributed as dist

    with talking():
        dist.broadcast_object_list(values, src=0, group=group)


def from_first(value: Any, group: Any) -> Any:
    """Send a value from the first process over this process group, and return it in every process."""
    values = [value]
    _broadcast(values, group)
    return values[0]


@contextmanager
def talking() -> Iterator[None]:
    """Context around communication between processes. Raises `ToldElsewhere` if another process has ended."""
    try:
        yield
    except RuntimeError as fault:
        if not is_broken_exchange(fault):
            raise
        text = (
            "Another process of this run has ended, so this one ends too. That process has printed the cause."
        )
        raise ToldElsewhere(text) from fault


def is_broken_exchange(fault: BaseException) -> bool:
    """Return True if this error means that the connection broke because another process ended."""
    import torch.distributed as dist

    kinds = getattr(dist, "DistError", ())
    return isinstance(fault, RuntimeError) and (
        (bool(kinds) and isinstance(fault, kinds)) or any(sign in str(fault) for sign in _BROKEN)
    )


def are_joined() -> bool:
    """Return True if this process has torch's process group, and so exchanges tensors with others."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


@contextmanager
def process_group(device: torch.device) -> Iterator[Ranks]:
    """Context with this process's `Ranks`, or `ALONE` without other processes.

    Process groups that exist already are used, and not destroyed at the end.
    """
    process = world()
    if process is None or process.size == 1:
        yield ALONE
        return
    import torch
    import torch.distributed as dist

    cuda = device.type == "cuda"
    if cuda:
        # NCCL uses the current CUDA device, which is the first GPU in every process by default.
        torch.cuda.set_device(device)
    is_ours = not dist.is_initialized()
    with talking():
        if is_ours:
            # The host exchanges data by gloo, so that it never waits for a GPU.
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        # The training and the saving thread have separate groups, because their exchanges could mix.
        host, writing = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    ranks = Ranks(process.rank, process.size, host=host, writing=writing)
    try:
        yield ranks
    except RuntimeError as fault:
        if not is_broken_exchange(fault):
            raise
        raise ToldElsewhere(
            "Another process of this run has ended, so this one ends too. That process has printed the cause."
        ) from fault
    ranks.wait()  # the first process may still write; leaving early would break its exchange
    if is_ours:
        dist.destroy_process_group()
