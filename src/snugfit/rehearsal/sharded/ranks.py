"""What one rank of several runs in, in a rehearsal: torch's own distributed code on tensors of shapes.

A process group of so many ranks that sends nothing, a device module that knows streams, and a recorder that
hears of what a single GPU's step does not have:

- FSDP2 frees and takes again the bytes of a storage that it keeps (`UntypedStorage.resize_`);
- DTensor asks what shape a result has by running operators on fake tensors, which a device never sees;
- blocks come from the pools of the stream that was current, and kernels wait for those of other streams;
- tensors are exchanged.

Afterwards the process is as it was.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from snugfit.rehearsal.record.kernels import KernelCost
from snugfit.rehearsal.record.recorder import Recorder
from snugfit.rehearsal.sharded import collectives
from snugfit.rehearsal.sharded.device_module import ShapesModule
from snugfit.rehearsal.sharded.streams import Moment, StreamOrder
from snugfit.rehearsal.trace.trace import ALL_REDUCE, DEFAULT_STREAM
from snugfit.results.footprint import Kind

FAKE = torch._C._TorchDispatchModeKey.FAKE

_resize = torch.UntypedStorage.resize_


class RankRecorder(Recorder):
    """Writes a rank's run: streams and exchanges too."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.order = StreamOrder(self.memory.use_stream)
        """Which stream is current, and which kernels wait for which."""
        self._of_group: dict[str, int] = {}  # NCCL's own stream of a process group
        self._unawaited: Moment = frozenset()  # exchanges that nobody has waited for
        self._averaged: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(FAKE) is not None:
            return func(*args, **kwargs)
        if collectives.is_collective(func) and DTensor not in types:
            return self._exchange(func, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def claim(self, tensor: torch.Tensor, kind: str, module: str = "") -> None:
        """The bytes of this tensor, or of a sharded one's own part, are of this kind."""
        super().claim(tensor.to_local() if isinstance(tensor, DTensor) else tensor, kind, module)

    def phase(self, name: str) -> None:
        """Everything from here on belongs to this phase. After the backward pass the device has waited for
        all gradients that were being averaged."""
        if self._phase == "backward" and name != "backward":
            self.order.wait(DEFAULT_STREAM, self._unawaited)
            self._unawaited = frozenset()
        super().phase(name)

    def average(self, bucket: torch.Tensor) -> None:
        """A bucket of gradients is averaged over all ranks, in NCCL's own stream. It is kept until something
        is exchanged in another step (`step/wishes/parallel.py` says why)."""
        self.claim(bucket, Kind.COMMUNICATION)
        self._averaged.append(bucket)
        self._add_exchange(ALL_REDUCE, bucket.nbytes, dist.group.WORLD, own_stream=True)

    def _exchange(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if func in collectives.WAITS:
            self.order.wait(self.order.current, self._unawaited)
            self._unawaited = frozenset()
            return out
        self.memory.add_outputs(collectives.kernel_of(func), out)
        for tensor in collectives.carried(func, out, args):
            self.claim(tensor, Kind.COMMUNICATION)
        group = collectives.group_of(func, args)
        nbytes = collectives.carried_bytes(func, out, args, kwargs)
        own_stream = collectives.is_async(func, args, kwargs)
        if own_stream:
            self._averaged.clear()
        self._add_exchange(collectives.kernel_of(func), nbytes, group, own_stream=own_stream)
        return out

    def _add_exchange(self, kernel: str, nbytes: int, group: Any, *, own_stream: bool) -> None:
        if self._step != self.steps - 1:
            return
        before = self.order.current
        if own_stream:
            name = group.group_name
            stream = self._of_group.setdefault(name, len(self._of_group) - (1 << 10))
            self.order.wait(stream, self.order.moment(before))
            self.order.current = stream  # its memory is the current stream's all the same
        self._add_kernel(kernel, KernelCost(0, nbytes, (), "", 1, "", ()), collectives.peers_of(group))
        if own_stream:
            self._unawaited |= self.order.moment(stream)
            self.order.current = before

    def _place(self, number: int) -> tuple[int, tuple[int, ...]]:
        return self.order.place(number)


@contextlib.contextmanager
def rank_on_shapes(recorder: RankRecorder, rank: int, ranks: int) -> Iterator[None]:
    """Within it, torch.distributed is that of this rank of so many, on `meta`."""
    import torch.distributed._meta_registrations as fake_work
    import torch.nn.parallel.distributed as data_parallel
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def resize(storage: Any, nbytes: int) -> Any:
        before = storage.nbytes()
        out = _resize(storage, nbytes)
        if storage.device.type == "meta" and before != nbytes:
            recorder.memory.resize(storage, nbytes)
        return out

    def average(recorder: RankRecorder, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        recorder.average(bucket.buffer())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    make = data_parallel.DistributedDataParallel.__init__

    def make_and_hook(self: Any, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        self.register_comm_hook(recorder, average)

    average.__annotations__.update(  # which torch compares, and wants the classes themselves
        bucket=vars(dist)["GradBucket"], **{"return": torch.futures.Future[torch.Tensor]}
    )

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (torch.UntypedStorage, "resize_", resize),
        (FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
        (data_parallel, "_verify_param_shape_across_processes", lambda *compared: None),
        (data_parallel.DistributedDataParallel, "__init__", make_and_hook),
        (fake_work, "generate_unique_id", itertools.count().__next__),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(process_group(rank, ranks))
        stack.enter_context(patch.object(torch, "meta", ShapesModule(recorder.order, ranks), create=True))
        for owner, name, instead in replaced:
            stack.enter_context(patch.object(owner, name, instead))
        yield


@contextlib.contextmanager
def process_group(rank: int = 0, ranks: int = 1) -> Iterator[None]:
    """Within it, torch's default process group is of so many processes, and sends nothing."""
    from torch.testing._internal.distributed import fake_pg

    if dist.is_initialized():
        raise RuntimeError("a process group is there already")
    if not hasattr(dist.Backend, "FAKE") or "meta" not in dist.Backend.backend_capability.get("fake", ()):
        dist.Backend.register_backend(
            "fake", fake_pg._create_fake_pg, extended_api=True, devices=["cpu", "cuda", "meta"]
        )
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=fake_pg.FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
