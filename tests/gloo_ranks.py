"""Several real ranks on the CPU: gloo processes, each of which runs a Step while the allocator reports.

`run_ranks` starts them once for many recipes and gives back what each rank's allocator did, and the losses
of a second run, in which all ranks draw the same weights and the same batches. Each
rank is a process of its own, as torchrun starts it: a default process group is one for a whole process. It is
forked from one that has imported what ranks need and done nothing else (`clean_forks.py`).

Gloo works in threads of its own, which let go of a tensor some time after it is exchanged; torch's profiler
does not hear of it when a tensor is freed by them. So gloo has one thread here, and each exchange that is
asked for in Python is waited for and followed by another one in the same group, of a single number, before
anybody goes on: the thread lets go of one before it begins the next. What DDP exchanges by itself is left as
it is.

That other one is no barrier. A barrier of gloo's keeps weak pointers to the works that are under way when it
is asked for, and a work whose last owner is gone frees its tensors only when no weak pointer is left
(`c10::intrusive_ptr`): with the barrier itself, some time after it is over.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clean_forks import forks_of

if TYPE_CHECKING:
    import torch

    from aligned import Event
    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

TIME_LIMIT = 600
"""Seconds after which a rank that waits for another is taken to wait for ever."""

Case = tuple["Job", str]
"""The job of all ranks together, and the recipe."""


class Ran(NamedTuple):
    """What a rank did in one case."""

    account: list[Event]
    losses: list[float]
    weights: dict[str, torch.Tensor]
    """Those that the rank has after these losses, by name; whole ones."""
    exchanged: frozenset[int] = frozenset()
    """Bytes of the tensors that it exchanged in Python."""


def run_ranks(
    ranks: int, cases: Sequence[Case], loop: str = "plain", *, within: str = "", warm: str = "many_ranks"
) -> list[list[Ran]]:
    """What each of so many ranks did in each case, in this loop, `within` a context manager that is named by
    its import path (`module:name`). The module `warm` imports what the ranks need."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases").write_bytes(pickle.dumps(list(cases)))
        forks = forks_of(warm)
        started = [forks.start(one_rank, name, loop, ranks, within, rank) for rank in range(ranks)]
        failed = [rank for rank, one in enumerate(started) if forks.ended(one, TIME_LIMIT)]
        assert not failed, "\n".join((folder / f"said{rank}").read_text() for rank in failed)
        read = [pickle.loads((folder / f"ran{rank}").read_bytes()) for rank in range(ranks)]
        return [[Ran(*one) for one in of_rank] for of_rank in read]


def one_rank(folder: str, loop: str, ranks: int, within: str, rank: int) -> int:
    """The work of a fork. Its other ranks would wait for one that failed until somebody ends them, so that it
    says why at once."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    try:
        run_rank(Path(folder), loop, ranks, within, rank)
    except Exception:
        (Path(folder) / f"said{rank}").write_text(traceback.format_exc())
        return 1
    return 0


def losses_of(job: Job, setup: Setup, loop: str = "plain") -> list[float]:
    """The losses of a few real steps, whose weights and batches are those of one seed."""
    return trained(job, setup, loop)[0]


def trained(job: Job, setup: Setup, loop: str = "plain") -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a few real steps that begin with one seed, and the weights after them, by name."""
    import torch

    from snugfit.step.open_step import open_step
    from snugfit.step.step import Observer

    class SeedAfterBuilding(Observer):
        """However many numbers were drawn while the model was built."""

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


def run_rank(folder: Path, loop: str, ranks: int, within: str, rank: int) -> None:
    """What each process does."""
    import torch.distributed as dist

    from reported import reports
    from snugfit.techniques.recipe import Recipe
    from snugfit.techniques.several_gpus import job_of_rank, on_gpus

    cases: list[Case] = pickle.loads((folder / "cases").read_bytes())
    if loop == "trainer":  # it leaves the choice to torch, and a GPU's is another (`test_law_loops.py`)
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
            FOLLOWED[0] = False  # stages have other numbers of weights, which are gathered to be compared
            ran.append((account, *trained(part, setup, loop), frozenset(EXCHANGED)))
            dist.barrier()
            FOLLOWED[0] = True
    (folder / f"ran{rank}").write_bytes(pickle.dumps(ran))
    dist.barrier()
    dist.destroy_process_group()


EXCHANGES = (
    "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor",
    "all_reduce", "broadcast",
)  # fmt: skip
"""Functions of torch.distributed by which FSDP2 and DeepSpeed exchange, under the names of all its
versions."""

EXCHANGED: set[int] = set()
"""Bytes of the tensors that this process has given to them."""

FUNCTIONAL = ("all_gather_single", "all_gather_tensor", "permute_tensor")
"""Of torch's functional ones those by which ring attention exchanges; it waits for what they give."""


BY_DTENSOR = (
    "all_reduce", "all_gather_single", "all_gather_tensor", "reduce_scatter_single", "reduce_scatter_tensor",
    "all_to_all_single",
)  # fmt: skip
"""Those by which DTensor does, which give a tensor that waits when it is first used."""


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
"""Whether ranks meet after each exchange: while what they allocate is written down."""


def _meet(group: Any = None) -> None:
    from torch.distributed import distributed_c10d

    if FOLLOWED[0]:
        distributed_c10d.all_reduce(_number(), group=group)  # the one that nobody follows


@functools.cache
def _number() -> torch.Tensor:
    import torch

    return torch.zeros(1)


def _group_of(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """The process group that a functional exchange was asked to use: itself, its name, or a
    dimension of a mesh."""
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
        EXCHANGED.update(one.nbytes for one in given)  # asking for the storage would count as a use of it
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
    within: list[Any] = []  # groups of the exchanges that are being asked for, which may wait by themselves

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
            if not isinstance(result, functional.AsyncCollectiveTensor):  # it has been waited for within
                _meet(group)
            result.exchanged_by = group
            return result

        return run

    functional.AsyncCollectiveTensor.wait = wait_and_follow  # type: ignore[method-assign]
    for name in FUNCTIONAL:
        if (exchange := getattr(functional, name, None)) is not None:
            setattr(functional, name, with_group(exchange))
