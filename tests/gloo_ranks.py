"""Run several real ranks on the CPU: gloo processes that each run a Step while the allocator reports.

`run_ranks` starts them once for many recipes. It returns the allocator events of each rank. It also returns
the losses of a second run in which all ranks draw the same weights and batches. Each rank is a process of its
own, because a default process group belongs to a whole process; torchrun does the same. It is forked from one
that has imported the necessary modules and done nothing else (`clean_forks.py`).

Gloo's own threads release a tensor some time after its exchange. torch's profiler records no free by such a
thread. So gloo has one thread here. Each exchange that Python code starts is waited for. A second exchange of
a single number in the same group follows it. The thread releases the first tensor before it starts the second
exchange. Exchanges that DDP starts itself are unchanged.

The second exchange cannot be a barrier. Gloo's barrier holds weak pointers to the works in progress at its
start. A work without an owner frees its tensors only when no weak pointer is left (`c10::intrusive_ptr`).
With a barrier that happens some time after its end.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aligned import Event, compare, peak
from clean_forks import forks_of
from rank_events import to_last_birth, unheard, without_own

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

TIME_LIMIT = 600
"""Seconds after which a waiting rank counts as deadlocked."""

Case = tuple["Job", str]
"""The job of all ranks together, and the recipe."""


class Ran(NamedTuple):
    """Results of a rank in one case."""

    account: list[Event]
    losses: list[float]
    weights: dict[str, torch.Tensor]
    """Whole weights that the rank has after these losses, by name."""
    exchanged: frozenset[int] = frozenset()
    """Bytes of the tensors that it exchanged in Python."""


def run_ranks(
    ranks: int,
    cases: Sequence[Case],
    loop: str = "plain",
    *,
    within: str = "",
    warm: str = "many_ranks",
    trains: bool = True,
) -> list[list[Ran]]:
    """Run each case on so many ranks in this loop and return the results of each rank. `within` is the import
    path (`module:name`) of a context manager. The module `warm` imports the dependencies of the ranks.
    Without `trains`, there is no second run, and no losses."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases").write_bytes(pickle.dumps(list(cases)))
        forks = forks_of(warm)
        started = [forks.start(one_rank, name, loop, ranks, within, trains, rank) for rank in range(ranks)]
        failed = [rank for rank, one in enumerate(started) if forks.ended(one, TIME_LIMIT)]
        assert not failed, "\n".join((folder / f"said{rank}").read_text() for rank in failed)
        read = [pickle.loads((folder / f"ran{rank}").read_bytes()) for rank in range(ranks)]
        return [[Ran(*one) for one in of_rank] for of_rank in read]


def by_case(
    cases: Sequence[tuple[str, str]], ran: Sequence[Sequence[Ran]]
) -> dict[tuple[str, str, int], Ran]:
    """Return the results by family, recipe and rank."""
    return {
        (*case, rank): result
        for rank, of_rank in enumerate(ran)
        for case, result in zip(cases, of_rank, strict=True)
    }


def assert_same_account(
    account: Sequence[Event],
    trace: Sequence[Event],
    about: str,
    *,
    kept: Callable[[Sequence[Event]], Sequence[Event]] = list,
    sizes: Collection[int] = (),
) -> None:
    """Assert law 1 (real and simulated allocations are equal) for a rank, for the events that `kept` returns.
    Exchanged tensors may have these `sizes`."""
    account, trace = kept(without_own(account)), kept(without_own(trace))
    account = unheard(account, trace, sizes)
    comparison = compare(to_last_birth(account), to_last_birth(trace))
    assert comparison.similarity == 1.0, f"{about}: {comparison}"
    assert peak(account) == peak(trace)


def in_steps(events: Sequence[Event]) -> list[Event]:
    """Return the events after the build."""
    return [event for event in events if event.step >= 0]


def one_rank(folder: str, loop: str, ranks: int, within: str, trains: bool, rank: int) -> int:
    """Run a rank in a fork. Write its error at once, because the remaining ranks wait for a failed one until
    they are ended."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    try:
        run_rank(Path(folder), loop, ranks, within, trains, rank)
    except Exception:
        (Path(folder) / f"said{rank}").write_text(traceback.format_exc())
        return 1
    return 0


def losses_of(job: Job, setup: Setup, loop: str = "plain") -> list[float]:
    """Return the losses of a few real steps, whose weights and batches are those of one seed."""
    return trained(job, setup, loop)[0]


def trained(job: Job, setup: Setup, loop: str = "plain") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of a few real steps from one seed, and the weights after them, by name."""
    import torch

    from snugfit.step.open_step import open_step
    from snugfit.step.step import Observer

    class SeedAfterBuilding(Observer):
        """Seeds after the build, so that the number of draws while building does not matter."""

        def build_ends(self, model: Any, optimizer: Any) -> None:
            torch.manual_seed(5)

    torch.manual_seed(0)
    step = open_step(job, setup, loop, torch.device("cpu"), keep_losses=True)
    losses = list(step.run(3, SeedAfterBuilding()))
    weights = {
        name: (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach()
        for name, weight in (step.model.named_parameters() if step.model is not None else ())
    }
    return losses, weights


def run_rank(folder: Path, loop: str, ranks: int, within: str, trains: bool, rank: int) -> None:
    """Run all cases in one process and write the results."""
    import torch.distributed as dist

    from reported import reports
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.several_gpus import job_of_rank, on_gpus

    cases: list[Case] = pickle.loads((folder / "cases").read_bytes())
    if loop == "trainer":  # it leaves the choice to torch, which differs on a GPU (`test_law_loops.py`)
        module: Any = importlib.import_module("torch.optim.optimizer")
        module._get_foreach_kernels_supported_devices = lambda: ["cpu", "meta"]
    _wait_for_the_thread()
    dist.init_process_group("one_thread", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    ran = []
    module, _, name = within.partition(":")
    with getattr(importlib.import_module(module), name)() if within else contextlib.nullcontext():
        for job, recipe in cases:
            setup = on_gpus(Recipe.parse(recipe).setup(), ranks)
            part = job_of_rank(job, setup)
            EXCHANGED.clear()
            account = reports(part, setup, loop=loop)
            # stages have different numbers of weights, which are gathered for the comparison
            FOLLOWED[0] = False
            outcome = trained(part, setup, loop) if trains else ([], {})
            ran.append((account, *outcome, frozenset(EXCHANGED)))
            dist.barrier()
            FOLLOWED[0] = True
    (folder / f"ran{rank}").write_bytes(pickle.dumps(ran))
    dist.barrier()
    dist.destroy_process_group()


EXCHANGES = (
    "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor",
    "all_reduce", "broadcast",
)  # fmt: skip
"""Functions of torch.distributed by which FSDP2 and DeepSpeed exchange tensors, under their names of all
versions."""

EXCHANGED: set[int] = set()
"""Bytes of the tensors that this process has passed to them."""

FUNCTIONAL = ("all_gather_single", "all_gather_tensor", "permute_tensor")
"""torch's functional collectives that ring attention uses; it waits for their results."""


BY_DTENSOR = (
    "all_reduce", "all_gather_single", "all_gather_tensor", "reduce_scatter_single", "reduce_scatter_tensor",
    "all_to_all_single",
)  # fmt: skip
"""Functional collectives of DTensor; their result waits at its first use."""


def _wait_for_the_thread() -> None:
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        device = dist.ProcessGroupGloo.create_device(interface="lo")
        options._devices, options._timeout, options._threads = [device], timeout, 1
        return dist.ProcessGroupGloo(store, rank, size, options)

    dist.Backend.register_backend("one_thread", make, devices=["cpu"])
    for name in EXCHANGES:
        if (exchange := getattr(dist, name, None)) is not None:
            setattr(dist, name, _waited_for(exchange))
    for name in sorted({*BY_DTENSOR} - {*FUNCTIONAL}):
        if (exchange := getattr(functional, name, None)) is not None:
            setattr(functional, name, _waited_for(exchange))
    _follow_functional_ones()


FOLLOWED = [True]
"""True while allocations are recorded: ranks then synchronise after each exchange."""


def _meet(group: Any = None) -> None:
    from torch.distributed import distributed_c10d

    if FOLLOWED[0]:
        distributed_c10d.all_reduce(_number(), group=group)  # the one without a follow-up exchange


@functools.cache
def _number() -> torch.Tensor:
    import torch

    return torch.zeros(1)


def _group_of(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Return the process group of a functional exchange, given as the group, its name, or a dimension of a
    mesh."""
    import torch.distributed as dist

    for one in (*keywords.values(), *arguments):
        if isinstance(one, dist.ProcessGroup):
            return one
        if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], dist.DeviceMesh):
            return one[0].get_group(one[1])
        if isinstance(one, str) and one in dist.distributed_c10d._world.pg_names.values():
            return dist.distributed_c10d._resolve_process_group(one)  # type: ignore[arg-type]
    return None


def _waited_for(exchange: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def wait(*arguments: Any, **keywords: Any) -> Any:
        given = [one for one in (*arguments, *keywords.values()) if isinstance(one, torch.Tensor)]
        EXCHANGED.update(one.nbytes for one in given)  # reading the storage would count as a use of it
        work = exchange(*arguments, **keywords)
        if isinstance(work, torch.Tensor):
            work.exchanged_by = _group_of(arguments, keywords)  # type: ignore[attr-defined]
            getattr(work, "trigger_wait", lambda: None)()
            _meet(_group_of(arguments, keywords))
            return work
        if work is not None:
            work.wait()
        _meet(_group_of(arguments, keywords))
        return work

    return wait


def _follow_functional_ones() -> None:
    import torch.distributed._functional_collectives as functional

    wait = functional.AsyncCollectiveTensor.wait
    within: list[Any] = []  # groups of the exchanges in progress, which may wait by themselves

    def wait_and_follow(result: Any) -> Any:
        tensor = wait(result)
        _meet(getattr(result, "exchanged_by", within[-1] if within else None))
        return tensor

    def with_group(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            group = _group_of(arguments, keywords)
            within.append(group)
            try:
                result = exchange(*arguments, **keywords)
            finally:
                within.pop()
            if not isinstance(result, functional.AsyncCollectiveTensor):  # already waited for within
                _meet(group)
            result.exchanged_by = group
            return result

        return run

    functional.AsyncCollectiveTensor.wait = wait_and_follow  # type: ignore[method-assign]
    for name in FUNCTIONAL:
        if (exchange := getattr(functional, name, None)) is not None:
            setattr(functional, name, with_group(exchange))
