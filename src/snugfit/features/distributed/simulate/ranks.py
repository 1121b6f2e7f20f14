"""Run torch's own distributed code for one rank of several, on tensors without data.

The context provides a process group that sends nothing, a device module with streams, and a recorder of
streams and exchanges. At its end, the context restores the process's state.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from snugfit.features.distributed.fields import PARALLEL
from snugfit.features.distributed.simulate import chunks, collectives
from snugfit.features.distributed.simulate.allocations import RankAllocations
from snugfit.features.distributed.simulate.device_module import ShapesModule
from snugfit.features.distributed.simulate.host_tensors import asks_for_shapes, copies_out
from snugfit.features.distributed.simulate.offloaded_shards import HostShards, shards_on_host
from snugfit.features.distributed.simulate.patches import Patch, count_calls, replace_attributes
from snugfit.features.distributed.simulate.streams import Moment, StreamOrder
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.device.scratch import CUDA_RULES
from snugfit.rehearsal.record.kernels import KernelCost
from snugfit.rehearsal.record.recorder import Recorder
from snugfit.rehearsal.trace.trace import (
    ALL_REDUCE,
    ALONE,
    BROADCAST,
    DEFAULT_STREAM,
    PART_OPERATORS,
    SHARD_HOOKS,
    SHARDED_OPERANDS,
    UPDATE_ON_HOST,
    WEIGHTS_APART,
    WORK_ON_HOST,
    MarkKind,
    Recording,
)
from snugfit.results.footprint import Kind
from snugfit.step.host_link import MetaLink
from snugfit.techniques.registry import tensors_beside

if TYPE_CHECKING:
    from snugfit.features.distributed.fields import ParallelWish
    from snugfit.techniques.setup import Setup

REDISTRIBUTION = 5
"""Host time of one redistribution of a sharded tensor, in units of one operator on such tensors. A
redistribution runs some 400 Python functions (torch 2.13, on a CPU).
"""

_resize = torch.UntypedStorage.resize_
_data_ptr = torch.Tensor.data_ptr


class RankRecorder(Recorder):
    """Records allocations, kernels, streams and collectives of one rank's simulated run."""

    allocations = RankAllocations
    memory: RankAllocations

    @classmethod
    def micro_batches_to_settle(cls, setup: Setup) -> float:
        """Return the number of micro-batches after which all further ones have the same trace. It is 1, since
        kernels of the second still wait for collectives of the first (DDP's buffers). It is infinity for a
        pipeline, whose order of passes depends on all micro-batches, and for DeepSpeed's engine.
        """
        wish = PARALLEL.of(setup)
        return 1 if wish is not None and wish.stages == 1 else math.inf

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.order = StreamOrder(self.memory.use_stream)
        """Current stream, and the order in which kernels of different streams wait for each other."""
        self.memory.moment_of = self.order.moment
        self.shards: HostShards | None = None
        """Simulated host memory of the shards; None if they are on the GPU."""
        self.keeps_exchanged = isinstance(self.policy, CudaPolicy)
        """True if tensors of asynchronous collectives stay alive until the next collective begins.

        This is NCCL's stash, which replaces `record_stream` (`ProcessGroupNCCL.cpp`). Exchanges that begin
        together then have one handle.
        """
        self.experts = 1
        """Number of ranks over which the experts of a layer are sharded.

        Each rank has the rows of all tokens, but its matrix products skip those for experts of other ranks.
        The remaining rows are assumed to be an even part.
        """
        self.in_stages = False
        """True if the rank runs pipeline stages. The trace then marks the start of each pass."""
        self.averages_over: Any = None
        """Process group in which DDP averages gradients."""
        self._passes: list[int] = []  # index of the kernel at which each pass of the last step begins
        self._of_group: dict[str, int] = {}  # number of NCCL's own stream, by process group
        self._unawaited: Moment = frozenset()  # last kernels of collectives that no stream waits for yet
        self._further_groups: set[str] = set()  # process groups in addition to that of all ranks
        self._kept: list[torch.Tensor] = []  # gradient buckets that NCCL still references
        self._first_to_come = True  # True before the first bucket of a backward pass
        self._carried: dict[int, Any] = {}  # operands of unfinished exchanges, by the result's storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # DTensor computes shapes with operators on fake tensors, which do not run on the device.
        if asks_for_shapes() or (self._phase == "build" and func.is_view and self._is_on_host(args[0])):
            return func(*args, **kwargs)
        if collectives.is_wrapping(func):
            return AsyncCollectiveTensor(args[0])
        if collectives.is_collective(func) and DTensor not in types:
            return self._exchange(func, args, kwargs)
        if self.shards is not None and DTensor not in types:
            # Operators on shards in host memory are not kernels.
            if self.shards.works_here(func, args, kwargs):
                return func(*args, **kwargs)
            if self._phase == "backward" and copies_out(func, args, kwargs):  # gradient of a shard
                return self.shards.keep(args[0])
        if DTensor in types:
            self._count_parts(args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _is_on_host(self, value: Any) -> bool:
        """Return True if a value is a tensor of a model built on the host, and was not moved to the
        device.
        """
        return isinstance(value, torch.Tensor) and value.is_meta and not self.memory.has_seen(value)

    def claim(self, tensor: torch.Tensor, kind: str, module: str = "") -> None:
        """Label this tensor's bytes (weights, gradients, ...) in the recording; for a sharded tensor, those
        of the local shard.
        """
        if kind is Kind.WEIGHTS and self._phase != "build":  # a shard is copied from the host
            kind = Kind.GATHERED
        super().claim(tensor.to_local() if isinstance(tensor, DTensor) else tensor, kind, module)

    def phase(self, name: str) -> None:
        """Record the start of a phase, to which all later events belong.

        After the backward pass, the device waits until all gradients are averaged.
        """
        if name == "backward":
            self._first_to_come = True
        elif self._phase == "backward":
            # The optimizer waits until all gradients are averaged.
            self.order.wait(DEFAULT_STREAM, self.take_unawaited())
            self._carried.clear()
        if self.in_stages and name in ("forward", "backward") and self._step == self.steps - 1:
            self._passes.append(len(self.kernels))
        super().phase(name)

    def step_ends(self, index: int) -> None:
        """Record the end of optimizer step `index`, and the bytes in host memory."""
        if self.shards is not None:
            MetaLink.observer.hold_on_host(self.shards.most, self.shards.pinned)
        super().step_ends(index)

    def end_of(self, optimizer: Any) -> None:
        """Ignore later frees if this is the optimizer of the recorded run, which is over then."""
        self.memory.is_over |= optimizer is not None and optimizer is self._optimizer

    def average(self, bucket: torch.Tensor) -> None:
        """Record the average of a bucket of gradients over all ranks, in NCCL's own stream.

        NCCL references the bucket until one of two events. Either the next backward pass begins to average,
        or another collective runs in parallel to the computation. `_release_first_buckets` gives the
        reason; two H200s showed it without other collectives.
        """
        # NCCL drops the buckets of the previous pass when the first one of this pass is averaged.
        if self._first_to_come:
            self._kept.clear()
            self._first_to_come = False
        self.claim(bucket, Kind.COMMUNICATION)
        if self.keeps_exchanged:
            self._kept.append(bucket)
        self._add_exchange(ALL_REDUCE, bucket.nbytes, self.averages_over, own_stream=True)

    def count_host_work(self, what: str, often: int) -> None:
        """Record work of the host in forward and backward passes, such as FSDP2's hooks."""
        if self._phase in ("forward", "backward"):
            self._add_to_last_step(what, _cost(tensors=often))

    def _count_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count an operator on sharded tensors (DTensor), whose sharding the host computes.

        Outside of forward and backward, the cost depends on the number of operands. Optimizers and clipping
        have lists of them.
        """
        if self._phase in ("forward", "backward"):
            self.count_host_work(PART_OPERATORS, 1)
            return
        operands = sum(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs)))
        self._add_to_last_step(SHARDED_OPERANDS, _cost(tensors=operands))

    def _add_to_last_step(self, operator: str, cost: KernelCost, peers: tuple[int, int] = ALONE) -> None:
        """Add an operator with its cost to the last recorded step. Work on the host counts as shared by all
        ranks, which share the bandwidth of its memory.
        """
        shared = operator in (WORK_ON_HOST, UPDATE_ON_HOST)
        super()._add_to_last_step(operator, cost, (dist.get_world_size(), 1) if shared else peers)

    def recording(self, attention: Iterable[str]) -> Recording:
        """Return the recorded data, with the groups that communicated, and the kernels for which freed blocks
        wait."""
        recording = super().recording(attention)
        awaited = dict(self.memory.awaited)
        # Launch positions are needed only if the reuse of a block must wait.
        launched = [mark.event for mark in recording.marks if awaited and mark.kind is MarkKind.KERNEL]
        trace = replace(
            recording.trace,
            groups=len(self._further_groups),
            awaited=awaited,
            launched=tuple(launched),
            passes=tuple(self._passes),
        )
        return recording._replace(trace=trace)

    def take_unawaited(self) -> Moment:
        """Return the time at which all collectives that no kernel waited for are finished, and mark them as
        awaited.
        """
        moment, self._unawaited = self._unawaited, frozenset()
        return moment

    def _exchange(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in collectives.WAITS:
            self.order.wait(self.order.current, self.take_unawaited())
            if not collectives.gives_its_own(func):
                return func(*args, **kwargs)
            self._carried.pop(args[0].untyped_storage()._cdata, None)
            return args[0]
        if func.namespace == "_c10d_functional":
            self.count_host_work(PART_OPERATORS, REDISTRIBUTION)
        out = func(*args, **kwargs)
        kernel = collectives.kernel_of(func, args)
        self.memory.add_outputs(kernel, out)
        copied = kernel in (ALL_REDUCE, BROADCAST)  # NCCL copies the operand
        if collectives.is_functional(func) and isinstance(out, torch.Tensor) and not copied:
            self._carried[out.untyped_storage()._cdata] = args[0]
        for tensor in collectives.tensors_carried(func, out, args):
            self.claim(tensor, Kind.COMMUNICATION)
        group = collectives.group_of(func, args)
        nbytes = collectives.carried_bytes(func, out, args, kwargs)
        peers = collectives.peers_of_exchange(func, args, group)
        if peers is not None:  # a transfer between pipeline stages
            self._add_to_last_step(kernel, _cost(nbytes), peers)
            return out
        own_stream = collectives.is_async(func, args, kwargs)
        if own_stream and kernel == ALL_REDUCE and self._phase != "backward":
            # In a backward pass, such collectives (DDP finds unused weights with them) do not wait for the
            # buckets. After the broadcasts at the start of DDP's step, NCCL's thread still referenced all
            # buckets.
            self._kept.clear()
        self._add_exchange(kernel, nbytes, group, own_stream=own_stream)
        return out

    def _add_exchange(self, kernel: str, nbytes: int, group: Any, *, own_stream: bool) -> None:
        if group is not dist.group.WORLD:
            self._further_groups.add(group.group_name)
        # Only kernels of the last step are recorded.
        if self._step != self.steps - 1:
            return
        before = self.order.current
        if own_stream:
            name = group.group_name
            # Negative numbers differ from those of streams that other code creates.
            stream = self._of_group.setdefault(name, len(self._of_group) - (1 << 10))
            # The exchange starts after the kernels that compute its tensors.
            self.order.wait(stream, self.order.moment(before))
            self.order.current = stream  # allocations still use the memory of the current stream
        self._add_kernel(kernel, _cost(nbytes), collectives.peers_of(group, kernel))
        if own_stream:
            self._unawaited |= self.order.moment(stream)
            self.order.current = before

    def _run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operator: str,
        cost: KernelCost | None,
    ) -> None:
        # Only the products of this rank's experts are counted.
        if cost is not None and func is torch.ops.aten._grouped_mm.default:
            cost = cost._replace(flops=cost.flops // self.experts)
        super()._run(func, args, kwargs, operator, cost)

    def _place(self, number: int) -> tuple[int, tuple[int, ...]]:
        return self.order.place(number)


class _Unlogged:
    """Replacement of DDP's logger of times, which would only warn that a simulated device has no clock."""

    def __init__(self, log: Any) -> None:
        self._log = log  # DDP's reducer only has a weak reference to it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def set_runtime_stats_and_log(self) -> None:
        """Write nothing, because a simulation of DDP has no times to log."""


def _cost(nbytes: int = 0, tensors: int = 1) -> KernelCost:
    """Return the cost of an exchange of these bytes, or of work on the host that is counted in tensors."""
    return KernelCost(0, nbytes, (), "", tensors, "", ())


@contextlib.contextmanager
def rank_on_shapes(recorder: RankRecorder, wish: ParallelWish) -> Iterator[None]:
    """Run torch.distributed on `meta` inside the context, as one rank of the settings' processes.

    With None, the rank has the largest part of an optimizer's sharded states.
    """
    import torch.distributed._meta_registrations as fake_work
    import torch.nn.parallel.distributed as data_parallel
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def resize(storage: Any, nbytes: int) -> Any:
        before = storage.nbytes()
        out = _resize(storage, nbytes)
        # FSDP2 frees and reallocates the memory of a storage, whose object stays the same.
        if storage.device.type == "meta" and before != nbytes:
            recorder.memory.resize(storage, nbytes)
        return out

    replaced: tuple[Patch, ...] = (
        (torch.UntypedStorage, "resize_", resize),
        # FSDP2 refuses weights on `meta`.
        (FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
        *(
            count_calls(FSDPParamGroup, name, functools.partial(recorder.count_host_work, SHARD_HOOKS, hooks))
            for name, hooks in {"pre_forward": 2, "unshard": 1, "post_backward": 2}.items()
        ),
        # There are no other processes to compare shapes with.
        (data_parallel, "_verify_param_shape_across_processes", lambda *compared: None),
        averaged_buckets(recorder),
        # torch draws these ids by Python's `random`, whose state belongs to the run.
        (fake_work, "generate_unique_id", itertools.count().__next__),
        counted_weights(recorder),
        *([takes_the_largest_part()] if recorder.rank is None and wish.states == "sharded" else []),
        *instead_of_others(handles_for_all=recorder.keeps_exchanged),
        *one_search_for_strides(),
    )
    recorder.experts, recorder.in_stages = wish.experts, wish.stages > 1
    with contextlib.ExitStack() as stack:
        stack.enter_context(process_group(recorder.rank or 0, wish.ranks))
        stack.enter_context(patch.dict(CUDA_RULES, chunks.SCRATCH))
        shapes = ShapesModule(recorder.order, wish.ranks, recorder.wait, recorder.empty_cache)
        # FSDP2 waits by `torch.accelerator` for gathered weights of a group without trained ones.
        of_device = [(torch, "meta", shapes), (torch.accelerator, "current_stream", shapes.current_stream)]
        stack.enter_context(replace_attributes([*of_device, *replaced, *while_spreading(recorder)]))
        if wish.on_host:
            recorder.shards = stack.enter_context(shards_on_host(recorder))
        yield


def averaged_buckets(recorder: RankRecorder) -> Patch:
    """Return a patch by which DDP's averages of gradients are recorded and not computed."""
    from torch.nn.parallel import DistributedDataParallel

    def average(recorder: RankRecorder, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        recorder.average(bucket.buffer())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    make = DistributedDataParallel.__init__

    def make_and_hook(self: Any, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        self.register_comm_hook(recorder, average)
        recorder.averages_over = self.process_group
        self.logger = _Unlogged(self.logger)

    average.__annotations__.update(  # torch compares these annotations, and requires the classes themselves
        bucket=vars(dist)["GradBucket"], **{"return": torch.futures.Future[torch.Tensor]}
    )

    return DistributedDataParallel, "__init__", make_and_hook


@contextlib.contextmanager
def process_group(rank: int = 0, ranks: int = 1) -> Iterator[None]:
    """Set torch's default process group to one of `ranks` processes that sends nothing, inside the
    context."""
    from torch.testing._internal.distributed import fake_pg

    if dist.is_initialized():
        raise RuntimeError("a process group is there already")
    # torch registers its fake backend for all devices except `meta`.
    if not hasattr(dist.Backend, "FAKE") or "meta" not in dist.Backend.backend_capability.get("fake", ()):
        dist.Backend.register_backend(
            "fake", fake_pg._create_fake_pg, extended_api=True, devices=["cpu", "cuda", "meta"]
        )
    with _dynamos_table_kept():
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=fake_pg.FakeStore())
    try:
        yield
    finally:
        has_parts = len(dist.distributed_c10d._world.pg_map) > 1
        dist.destroy_process_group()
        if has_parts:
            _forget_meshes()


def _dynamos_table_kept() -> contextlib.AbstractContextManager[Any]:
    """Keep Dynamo's table of functions when a new process group is created inside the context.

    Otherwise torch would empty the table and fill it again with the overrides of a simulation
    (`rehearsal/device/overrides.py`).
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    return contextlib.nullcontext() if rules is None else patch.object(rules, "clear_lru_cache", lambda: None)


def _forget_meshes() -> None:
    """Clear DTensor's caches of operators on a mesh, which contain the mesh itself.

    The next mesh of the same shape is equal to it, but has other groups.
    """
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear()
    for name in ("_gen_transform_infos", "_gen_transform_infos_non_cached"):
        getattr(getattr(_redistribute, name, None), "cache_clear", lambda: None)()


def takes_the_largest_part() -> Patch:
    """Return a patch by which this process has the largest part of an optimizer's states (`zero1`).

    torch's `ZeroRedundancyOptimizer` assigns each weight, the largest first, to the process with the fewest
    elements. If matrices have few different sizes, some processes get a percent more than others, or even
    more. Everything else is equal in all processes, so the largest part gives the highest memory use.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    plain = vars(ZeroRedundancyOptimizer)["_partition_parameters"]

    def partition(self: Any, *given: Any) -> list[list[dict[str, Any]]]:
        is_known = bool(self._partition_parameters_cache)
        parts: list[list[dict[str, Any]]] = plain(self, *given)
        if not is_known:
            largest = max(range(len(parts)), key=lambda number: _elements(parts[number]))
            parts[self.rank], parts[largest] = parts[largest], parts[self.rank]
        return parts

    return ZeroRedundancyOptimizer, "_partition_parameters", partition


def _elements(groups: list[dict[str, Any]]) -> int:
    return sum(weight.numel() for group in groups for weight in group["params"])


def while_spreading(recorder: RankRecorder) -> list[Patch]:
    """Return the patches under which FSDP2 and accelerate shard a model over ranks."""
    import torch.distributed.fsdp._fully_shard._fsdp_init as first
    import torch.distributed.fsdp._fully_shard._fully_shard as second

    # A model on the host and one on the device are both on `meta`, so that FSDP2 would move nothing.
    moving = functools.partial(_move, recorder)
    instead = {
        "_move_states_to_device": moving,
        # Without a mesh, FSDP2 shards over all ranks of torch's own device type.
        "_init_default_mesh": _mesh_of_all,
        "_init_default_fully_shard_mesh": _mesh_of_all,
    }
    replaced = [
        (module, name, function)
        for module in (first, second)  # the module that has the function depends on torch's version
        for name, function in instead.items()
        if hasattr(module, name)
    ]
    # accelerate identifies parameters by the addresses of their data, which are 0 on `meta`.
    return [*replaced, (torch.Tensor, "data_ptr", _address)]


def one_search_for_strides() -> list[Patch]:
    """Return a patch under which DTensor searches the operands of a call for strided shards only once.

    torch 2.13 searches all operands for each tensor of a list. For AdamW's lists of a deep model, this took
    most of a simulation. Other versions without this function need no patch.
    """
    from torch.distributed.tensor import _sharding_prop
    from torch.distributed.tensor.placement_types import _StridedShard

    name = "_propagate_use_strided_shard_flag"
    if (plain := getattr(_sharding_prop, name, None)) is None:
        return []
    last: Any = None
    is_strided = False

    def propagate(strategy: Any, schema: Any) -> None:
        nonlocal last, is_strided
        # The reference keeps the schema alive, so no other schema gets the same identity.
        if schema is not last:
            placements = (one for spec in schema.args_spec for one in spec.placements)
            last, is_strided = schema, any(isinstance(one, _StridedShard) for one in placements)
        if is_strided:
            plain(strategy, schema)

    return [(_sharding_prop, name, propagate)]


def _move(recorder: RankRecorder, parameters: list[Any], buffers: list[torch.Tensor], device: Any) -> None:
    """Allocate each tensor that is still on the host on the simulated device, as `model.to(device)` would.
    Scales of a quantized weight move before the weight.
    """
    for tensor in (*parameters, *buffers):
        for owner, name in tensors_beside(tensor):
            if not recorder.memory.has_seen(beside := getattr(owner, name)):
                setattr(owner, name, torch.empty_like(beside, device=device))
        held = getattr(tensor, "_local_tensor", tensor)  # this rank's shard of a sharded matrix
        if not recorder.memory.has_seen(held):
            tensor.data = torch.empty_like(tensor, device=device)


def _mesh_of_all(mesh_dim_names: tuple[str, ...] | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("meta", (dist.get_world_size(),), mesh_dim_names=mesh_dim_names)


def _address(tensor: torch.Tensor) -> int:
    if not tensor.is_meta:
        return _data_ptr(tensor)
    return int(tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size())


VOTES = ("_warmup_forward_vote", "_warmup_backward_result")


class _Handle:
    """Simulated handle of a collective, which keeps the collective's tensors alive."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def wait(self, *timeout: Any) -> bool:
        """Return True: a simulated exchange is always finished."""
        return True


def instead_of_others(*, handles_for_all: bool) -> list[Patch]:
    """Return patches that simulate a pipeline stage's communication with other stages. With
    `handles_for_all`, transfers that begin together have one handle.

    Neither end has a stream here, because a stage's wait is not in its own trace
    (`features/distributed/price/stages.py`). A block that is freed during its transfer is reusable at once,
    although NCCL references it until the end (`record_stream`).
    """
    import torch.distributed.distributed_c10d as exchanges
    from torch.distributed.pipelining import PipelineStage

    def agree(*asked: Any, **more: Any) -> torch.Tensor:
        # Since torch 2.13, stages exchange two messages on known shapes. In a simulation they always agree.
        return torch.ones(1, dtype=torch.int32, device="cpu")

    plain, together = exchanges.isend, exchanges.batch_isend_irecv

    def isend(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> _Handle:
        plain(tensor, *arguments, **keywords)
        # A sent tensor is kept alive by its handle, gloo's or NCCL's of one exchange (`WorkNCCL::outputs_`).
        return _Handle(tensor)

    def batch_isend_irecv(operations: list[Any]) -> list[_Handle]:
        together(operations)
        # Before torch 2.13, NCCL's handle of several exchanges keeps no tensors alive (`endCoalescing`).
        return [_Handle()]

    instead: list[tuple[str, Any]] = [("isend", isend)]
    if handles_for_all:
        instead.append(("batch_isend_irecv", batch_isend_irecv))
    known = [(PipelineStage, name, agree) for name in VOTES if hasattr(PipelineStage, name)]
    return [*known, *((owner, *pair) for owner in (exchanges, torch.distributed) for pair in instead)]


def counted_weights(recorder: RankRecorder) -> Patch:
    """Return a patch that counts the weights whose gradients a `zero_bubble` pipeline computes in a pass of
    their own.

    torch walks the graph in Python for each of them and calls autograd (`_backward.py`).
    """
    from torch.distributed.pipelining import stage

    plain = vars(stage)["stage_backward_weight"]

    def stage_backward_weight(weights: Any, groups: list[dict[str, Any]], *further: Any, **more: Any) -> Any:
        recorder.count_host_work(WEIGHTS_APART, sum(len(group["params"]) for group in groups))
        return plain(weights, groups, *further, **more)

    return stage, "stage_backward_weight", stage_backward_weight
