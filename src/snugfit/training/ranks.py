"""The processes that train one model together, as each of them sees the others.

torchrun starts them, or `snugfit train --gpus N`, which asks torch for the same. Each learns its number (its
rank) and theirs from the environment. Three groups are made of them:

    the default one     gradients and weights: NCCL between GPUs, gloo for what is on the CPU. torch's own DDP
                        and FSDP2 use it. As in most scripts it is bound to no device when it is made
                        (`measurement/experiment/group.py`)
    on the host         what is decided together: sums, and what the first has found out. A few numbers a
                        step, by gloo, so that no GPU is waited for
    for writing         checkpoints, which a thread writes while the steps use the other two

Along the data axis of their mesh each has a part of the global batch; others work on the same part, and then
one of them counts it (`Ranks.sharing`).

A run of one process has `ALONE`, which answers the same questions and talks to nobody.

What one process finds out alone, such as an error in an option that all have, is told by the first alone: in
the others `ToldElsewhere` is raised, and they are silent. So they are when another process has ended and the
exchange with it breaks: that one, or whoever started it, tells why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, final

from snugfit.errors import SnugfitError, UsageError

if TYPE_CHECKING:
    import torch

    from snugfit.techniques.setup import ParallelWish

Answer = TypeVar("Answer")

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torch's launcher tells each process that it starts."""

_BROKEN = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What gloo's errors say, which are plain `RuntimeError`s (gloo/transport/tcp), of an exchange that broke."""


class ToldElsewhere(SnugfitError):
    """Another process of the run says what is wrong; this one only ends."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class World:
    """What the environment says of the processes that were started together."""

    rank: int
    """The number of this one, from 0."""

    size: int
    """How many there are."""

    local_rank: int
    """The number of this one on its host, which is that of its GPU."""


def world(environment: Mapping[str, str] = os.environ) -> World | None:
    """What torch's launcher has told this process; None where none has started it. Raises `UsageError` for
    numbers that are none."""
    if not all(environment.get(name) for name in VARIABLES):
        return None
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_RANK", rank))
    except ValueError:
        rank, size, local = -1, 0, -1
    if not 0 <= rank < size or local < 0:
        values = ", ".join(f"{name}={environment.get(name)}" for name in (*VARIABLES[:2], "LOCAL_RANK"))
        raise UsageError(f"The environment says {values}. Start the processes with torchrun, or --gpus N.")
    return World(rank=rank, size=size, local_rank=local)


@final
class Ranks:
    """One process among those that train together."""

    def __init__(self, rank: int = 0, size: int = 1, *, host: Any = None, writing: Any = None) -> None:
        self.rank, self.size = rank, size
        self.host, self.writing = host, writing
        """Groups of torch.distributed, for the loop's own thread and for the one that writes."""
        self.data_rank, self.data_ranks = rank, size
        """Which part of the global batch this one works on, and how many parts there are."""
        self.counts = 1.0
        """How much of what this one says that its part came to counts: others may work on it too."""

    def sharing(self, wish: ParallelWish | None) -> Ranks:
        """The same process, in the mesh that a recipe wishes for."""
        ranks = Ranks(self.rank, self.size, host=self.host, writing=self.writing)
        if wish is not None and wish.ranks:
            ranks.data_rank, ranks.data_ranks = wish.data_rank(self.rank), wish.data_ranks
            ranks.counts = wish.counts(self.rank)
        return ranks

    @property
    def is_first(self) -> bool:
        """Whether this one writes the journal and speaks for all."""
        return self.rank == 0

    @property
    def are_many(self) -> bool:
        """Whether there are others."""
        return self.size > 1

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Each number, summed over all processes: the same in each, bit for bit."""
        if not self.are_many:
            return list(numbers)
        import torch
        import torch.distributed as dist

        values = torch.tensor(numbers, dtype=torch.float64)
        with talking():
            dist.all_reduce(values, group=self.host)
        summed: list[float] = values.tolist()
        return summed

    def sum_parts(self, numbers: Sequence[float]) -> list[float]:
        """Each number, summed over the parts of the global batch, each of which counts once."""
        return self.sum([self.counts and self.counts * number for number in numbers])

    def gather(self, value: Any) -> list[Any]:
        """What each process gives, by rank, in the first; nothing in the others."""
        if not self.are_many:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.size if self.is_first else None
        with talking():
            dist.gather_object(value, values, dst=0, group=self.host)
        return values or []

    def first_answers(self, ask: Callable[[], Answer]) -> Answer:
        """What `ask` gives in the first process, in all of them. An error that it raises there is raised
        there, and `ToldElsewhere` in the others."""
        if not self.are_many:
            return ask()
        fault: Exception | None = None
        values: list[Any] = [None, None]
        if self.is_first:
            try:
                values[0] = ask()
            except Exception as error:
                fault = error
                values[1] = (str(error), getattr(error, "exit_code", 1))
        _broadcast(values, self.host)
        if fault is not None:
            raise fault
        if values[1] is not None:
            raise ToldElsewhere(*values[1])
        answer: Answer = values[0]
        return answer

    def all_do(self, do: Callable[[], Answer]) -> Answer:
        """What `do` gives in this process, when it goes well in all; no exchange may be in it. Else the first
        process that has an error raises it, or each that has one where that is not the first, and the others
        `ToldElsewhere`."""
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

    def alike(self, error: SnugfitError) -> SnugfitError:
        """The error that ends all processes at the same moment: the first tells it."""
        return error if self.is_first else ToldElsewhere(str(error), error.exit_code)

    def wait(self) -> None:
        """Until all processes are here."""
        self.sum([0.0])


ALONE = Ranks()
"""The only process of a run."""


def _broadcast(values: list[Any], group: Any) -> None:
    """The first process's values, in all of them."""
    import torch.distributed as dist

    with talking():
        dist.broadcast_object_list(values, src=0, group=group)


def from_first(value: Any, group: Any) -> Any:
    """The first process's value, told over this group."""
    values = [value]
    _broadcast(values, group)
    return values[0]


@contextmanager
def talking() -> Iterator[None]:
    """Within it processes exchange something. Raises `ToldElsewhere` when another one has ended."""
    try:
        yield
    except RuntimeError as fault:
        if not is_broken_exchange(fault):
            raise
        text = "Another process of this run has ended, so this one ends too."
        raise ToldElsewhere(text) from fault


def is_broken_exchange(fault: BaseException) -> bool:
    """Whether this says that an exchange with other processes broke off, because one of them ended."""
    import torch.distributed as dist

    kinds = getattr(dist, "DistError", ())
    return isinstance(fault, RuntimeError) and (
        (bool(kinds) and isinstance(fault, kinds)) or any(sign in str(fault) for sign in _BROKEN)
    )


@contextmanager
def process_group(device: torch.device) -> Iterator[Ranks]:
    """This process among those that were started with it, while the context is entered; `ALONE` where there
    are no others. Groups of torch.distributed that somebody else has made are used, and left."""
    process = world()
    if process is None or process.size == 1:
        yield ALONE
        return
    import torch
    import torch.distributed as dist

    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    is_ours = not dist.is_initialized()
    with talking():
        if is_ours:
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        host, writing = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    ranks = Ranks(process.rank, process.size, host=host, writing=writing)
    try:
        yield ranks
    except RuntimeError as fault:
        if not is_broken_exchange(fault):
            raise
        raise ToldElsewhere("Another process of this run has ended, so this one ends too.") from fault
    ranks.wait()  # the first may still have been writing: whoever leaves sooner would be missed by it
    if is_ours:
        dist.destroy_process_group()
