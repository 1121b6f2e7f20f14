"""Run DeepSpeed's engine on tensors that have shapes and no data.

The context provides a process group of torch that sends nothing, and an accelerator for tensors without data.
It also replaces the host's memory by untouched pages, and the CPU's update by a record of it. One rank of
several also has streams (`engine_of_rank`). At its end, the context removes the process group and restores
DeepSpeed's own accelerator.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from snugfit.features.distributed.engine.config import PROCESS_GROUP
from snugfit.features.distributed.simulate.device_module import ShapesModule
from snugfit.features.distributed.simulate.host_tensors import HostTensors
from snugfit.features.distributed.simulate.patches import Patch, count_calls, replace_attributes
from snugfit.features.distributed.simulate.ranks import RankRecorder, process_group
from snugfit.features.distributed.simulate.streams import Moment, StreamOrder
from snugfit.rehearsal.device import attention
from snugfit.rehearsal.record.assumed_float import AssumedFloat
from snugfit.rehearsal.record.recorder import Recorder
from snugfit.results.footprint import Kind
from snugfit.step.host_link import MetaLink


class CpuAdam:
    """Replacement of DeepSpeed's compiled CPU Adam, which reports updates and host memory to an observer."""

    def __init__(self, host: HostTensors) -> None:
        self._host = host

    def load(self) -> CpuAdam:
        """Return itself instead of a compiled module."""
        return self

    def create_adam(self, *arguments: Any) -> None:
        """Do nothing: a simulation has no compiled CPU optimizer."""

    destroy_adam = create_adam

    def adam_update(self, *arguments: Any) -> None:
        """Report an update of the weights, which are the ninth positional argument."""
        MetaLink.observer.update_on_host(arguments[8].nbytes, arguments[8].dtype)
        MetaLink.observer.hold_on_host(self._host.most, self._host.pinned)


class FileHandle:
    """Replacement of DeepSpeed's reader and writer of files (`csrc/aio`): it reports the bytes to an observer
    and uses no files.

    DeepSpeed's swappers run unchanged, with page-locked buffers on the host.
    """

    def __init__(self, host: HostTensors) -> None:
        self._host = host
        self._pending = 0

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int = 0) -> int:
        """Report the read or write of a file, in bytes, to the observer. Return 0 for success."""
        self._pending += 1
        MetaLink.observer.swap(buffer.nbytes)
        return 0

    async_pwrite = async_pread

    def wait(self) -> int:
        """Return the number of finished reads and writes of files, as DeepSpeed's handle does after
        waiting.
        """
        done, self._pending = self._pending, 0
        return done

    def new_cpu_locked_tensor(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor in page-locked memory of the host."""
        tensor = torch.empty(int(numel), dtype=like.dtype, device="cpu")
        self._host.lock(tensor)
        LOCKED.add(tensor.untyped_storage()._cdata)
        return tensor

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> None:
        """Record that a tensor is freed: subtract its bytes from the page-locked host memory."""
        LOCKED.discard(tensor.untyped_storage()._cdata)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is in page-locked memory."""
        return tensor.untyped_storage()._cdata in LOCKED


LOCKED: set[int] = set()
"""Addresses of page-locked host storages, shared by all objects of this process."""


class FileOperator:
    """Replacement of DeepSpeed's builder of the file operator, and of the module that it compiles."""

    def __init__(self, host: HostTensors) -> None:
        self._host = host

    def load(self, verbose: bool = False) -> FileOperator:
        """Return itself instead of a compiled module."""
        return self

    def aio_handle(self, **settings: Any) -> FileHandle:
        """Return a simulated reader and writer of files; its settings change no byte count."""
        return FileHandle(self._host)


class TorchForShapes:
    """Replacement of the module `torch` inside DeepSpeed's code for ZeRO-2.

    ZeRO-2 creates tensors on `meta` itself as placeholders for shapes. In a simulation they must not count as
    device tensors.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros_like(like: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return zeros of this shape; if the target device is `meta`, an expanded one-element tensor on the
        host.
        """
        if options.get("device") == "meta":
            return torch.empty((), device="cpu").expand(like.shape)
        return torch.zeros_like(like, **options)


class _Number:
    """Replacement of `float` in DeepSpeed's code. It turns the gradients' norm, a tensor without data, into
    1, because no shape depends on it.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __call__(self, value: Any) -> float:
        if isinstance(value, AssumedFloat):
            return 1.0
        if isinstance(value, torch.Tensor) and value.is_meta:
            self._recorder.wait()
            return 1.0
        return float(value)


HOOKS = {
    "DeepSpeedZeRoOffload": (
        "pre_sub_module_forward_function",
        "post_sub_module_forward_function",
        "pre_sub_module_backward_function",
        "post_sub_module_backward_function",
    ),
    "DeepSpeedZeroOptimizer_Stage3": ("reduce_ready_partitions_and_remove_grads",),
}
"""Methods of ZeRO stage 3 that run in Python, by class.

They run before and after each module, to find the weights to fetch and to release. One runs at each weight's
gradient.
"""


def _counted_hooks(recorder: Recorder) -> list[Patch]:
    """Return patches that count each call of DeepSpeed's functions in `HOOKS` as Python work of the host."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    kinds = DeepSpeedZeRoOffload, DeepSpeedZeroOptimizer_Stage3
    return [
        count_calls(kind, name, recorder.count_function) for kind in kinds for name in HOOKS[kind.__name__]
    ]


@contextlib.contextmanager
def engine_on_shapes(recorder: Recorder, ranks: int) -> Iterator[None]:
    """Run DeepSpeed's engine on `meta` inside the context, as one of `ranks` processes."""
    import cpuinfo
    import deepspeed.accelerator.real_accelerator as real
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
    import deepspeed.runtime.zero.stage_1_and_2 as stage2
    import torch.distributed._meta_registrations as fake_work
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.ops.adam import cpu_adam
    from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper, partitioned_param_swapper
    from deepspeed.runtime.zero import linear, stage3

    from snugfit.features.distributed.simulate.accelerator import ShapesAccelerator

    recorder.host = host = HostTensors.beside(recorder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(process_group(recorder.rank or 0, ranks))
        free = recorder.policy.free_bytes
        free = None if free is None else free - PROCESS_GROUP[2]  # ZeRO stage 2 reads the free memory
        order = (
            recorder.order if isinstance(recorder, RankRecorder) else StreamOrder(recorder.memory.use_stream)
        )
        streams = ShapesModule(order, ranks, recorder.wait, recorder.empty_cache)
        accelerator = ShapesAccelerator(recorder, host.pin, free, streams)
        swappers = partitioned_param_swapper, partitioned_optimizer_swapper
        patches: list[Patch] = [
            (real, "ds_accelerator", accelerator),
            (linear, "get_accelerator", CPU_Accelerator),  # used under autocast
            (cpuinfo, "get_cpu_info", dict),  # the real query takes a second
            (cpu_adam, "CPUAdamBuilder", lambda: CpuAdam(host)),
            *((swapper, "AsyncIOBuilder", lambda: FileOperator(host)) for swapper in swappers),
            # On one GPU all work is in one stream.
            (torch.Tensor, "record_stream", lambda self, stream: None),
            # There are no other ranks to compare with.
            (coordinator, "assert_ints_same_as_other_ranks", lambda *ints: None),
            # A norm without data cannot be read.
            *((module, "is_invalid_grad_norm", lambda norm: False) for module in (stage2, stage3)),
            *((module, "float", _Number(recorder)) for module in (stage2, stage3)),
            (stage2, "torch", TorchForShapes()),
            # torch draws these ids from Python's `random`, whose state belongs to the run.
            (fake_work, "generate_unique_id", itertools.count().__next__),
            # The recorder and the simulated host memory are two modes.
            (attention, "RECORDING_MODES", 2),
            *_counted_hooks(recorder),
        ]
        stack.enter_context(replace_attributes(patches))
        if isinstance(recorder, RankRecorder):
            stack.enter_context(engine_of_rank(recorder))
        stack.enter_context(host)
        yield


class _Gathering:
    """Simulated handle of a gather of weights that still runs."""

    def __init__(self, recorder: RankRecorder, moment: Moment) -> None:
        self._recorder, self._moment = recorder, moment

    def wait(self) -> None:
        """Let the current stream wait until the weights have arrived."""
        order = self._recorder.order
        order.wait(order.current, self._moment)


@contextlib.contextmanager
def engine_of_rank(recorder: RankRecorder) -> Iterator[None]:
    """Record the engine's streams and collectives, which exist only on several ranks.

    The engine gathers weights in one stream and averages gradients in another (`overlap_comm`). A tensor of
    one stream that another one uses (`record_stream`) is not reused until that use ends. The third stage
    starts a gather, and waits for it later.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import partition_parameters as partitions
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    begin, destroy = partitions._dist_allgather_fn, DeepSpeedEngine.destroy

    def gather(*arguments: Any, **keywords: Any) -> _Gathering:
        begin(*arguments, **keywords)
        # The handle waits for the collectives that this gather has just started.
        return _Gathering(recorder, recorder.take_unawaited())

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        recorder.memory.lend(tensor, stream.stream_id)

    def end_and_destroy(engine: Any) -> None:
        """End the recording and destroy the engine, so that its frees do not change the last recorded step.

        An earlier run's engine is destroyed when the garbage collector finds it.
        """
        recorder.end_of(getattr(getattr(engine, "optimizer", None), "optimizer", None))
        destroy(engine)

    replaced: list[Patch] = [
        (torch.Tensor, "record_stream", record_stream),
        (partitions, "_dist_allgather_fn", gather),
        (DeepSpeedEngine, "destroy", end_and_destroy),
    ]
    for handle in (partitions.AllGatherHandle, partitions.AllGatherCoalescedHandle):
        replaced.append((handle, "wait", _and_claim(handle, recorder)))
    for stage, makes in (
        (DeepSpeedZeroOptimizer, "setup_buckets"),
        (DeepSpeedZeroOptimizer_Stage3, "__init__"),
    ):
        if hasattr(stage, makes):  # DeepSpeed 0.18 creates the buffers of stage 2 elsewhere
            replaced.append((stage, makes, _and_claim_buckets(getattr(stage, makes), recorder)))
    with replace_attributes(replaced):
        yield


def _and_claim(kind: Any, recorder: RankRecorder) -> Callable[..., None]:
    """Return a replacement of a handle's `wait` that also labels the gathered bytes as weights in the
    recording.
    """
    wait = kind.wait

    def wait_and_claim(handle: Any, *arguments: Any, **keywords: Any) -> None:
        wait(handle, *arguments, **keywords)
        # The handle of a single weight is in a private attribute, whose name Python mangles.
        private = f"_{kind.__name__}__param"
        for weight in handle.params if hasattr(handle, "params") else [getattr(handle, private)]:
            recorder.memory.claim(weight.data, Kind.GATHERED, instead_of=Kind.COMMUNICATION)

    return wait_and_claim


def _and_claim_buckets(method: Callable[..., None], recorder: RankRecorder) -> Callable[..., None]:
    """Return a replacement of a method of a ZeRO stage that also labels the buckets of averaged gradients in
    the recording.
    """

    def run_and_claim(stage: Any, *arguments: Any, **keywords: Any) -> None:
        method(stage, *arguments, **keywords)
        for bucket in stage.ipg_buckets.values():
            # ZeRO stage 2 has a list of buffers, stage 3 a single one.
            for buffer in bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]:
                recorder.claim(buffer, Kind.COMMUNICATION)
        if (gradients := getattr(stage, "grad_partitions_flat_buffer", None)) is not None:
            recorder.claim(gradients, Kind.GRADIENTS)

    return run_and_claim
