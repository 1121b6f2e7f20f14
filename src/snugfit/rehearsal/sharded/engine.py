"""What DeepSpeed's engine runs in, in a rehearsal: its own code on tensors that have shapes and no data.

A process group of torch's that sends nothing, an accelerator of shapes, the host's memory that is not handed
out, and an update of the CPU that is only told of; for one of several ranks, streams besides
(`engine_ranks.py`). Afterwards the process is as it was: no group is left, and DeepSpeed has its own
accelerator again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from snugfit.rehearsal.device import attention
from snugfit.rehearsal.record.assumed_float import AssumedFloat
from snugfit.rehearsal.record.recorder import Recorder
from snugfit.rehearsal.sharded.device_module import ShapesModule
from snugfit.rehearsal.sharded.host_tensors import HostTensors
from snugfit.rehearsal.sharded.ranks import RankRecorder, process_group
from snugfit.step.host_link import MetaLink

TO_COPY = torch.ops.aten._to_copy.default


class CpuAdam:
    """DeepSpeed's compiled CPU Adam: an observer hears of its updates, and of what the host holds then."""

    def __init__(self, host: HostTensors) -> None:
        self._host = host

    def load(self) -> CpuAdam:
        """Itself, in the place of a compiled module."""
        return self

    def create_adam(self, *arguments: Any) -> None:
        """Does nothing: there is no compiled optimizer."""

    destroy_adam = create_adam

    def adam_update(self, *arguments: Any) -> None:
        """Updates the weights that are the ninth of its arguments."""
        if MetaLink.observer is not None:
            MetaLink.observer.update_on_host(arguments[8].nbytes, arguments[8].dtype)
            MetaLink.observer.hold_on_host(self._host.most, self._host.pinned)


class TorchForShapes:
    """`torch` as DeepSpeed's second stage sees it. The tensors that it makes on `meta` itself, to keep shapes
    by, are no tensors of the device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros_like(like: torch.Tensor, **options: Any) -> torch.Tensor:
        """On the host and of one element, where it is for its shape."""
        if options.get("device") == "meta":
            return torch.empty((), device="cpu").expand(like.shape)
        return torch.zeros_like(like, **options)


class _Number:
    """`float` as DeepSpeed's stages see it: the norm of gradients, which nothing is shaped by, is 1."""

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
"""What the third stage runs in Python at each module, before and after it, forward and backward (it looks up
which weights to fetch and to release), and at each weight's gradient, by the classes that have it."""


@contextlib.contextmanager
def _hooks_counted(recorder: Recorder) -> Iterator[None]:
    """Within it, each call of `HOOKS` is one more function of a library's that the host runs."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    def with_count(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def count_and_run(*arguments: Any, **keywords: Any) -> Any:
            recorder.count_function()
            return run(*arguments, **keywords)

        return count_and_run

    with contextlib.ExitStack() as patches:
        for kind in (DeepSpeedZeRoOffload, DeepSpeedZeroOptimizer_Stage3):
            for name in HOOKS[kind.__name__]:
                patches.enter_context(patch.object(kind, name, with_count(getattr(kind, name))))
        yield


@contextlib.contextmanager
def engine_on_shapes(recorder: Recorder, rank: int = 0, ranks: int = 1) -> Iterator[HostTensors]:
    """Within it, DeepSpeed's engine trains on `meta`, as this rank of so many; gives the host's memory."""
    import cpuinfo
    import deepspeed.accelerator.real_accelerator as real
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
    import deepspeed.runtime.zero.stage_1_and_2 as stage2
    import torch.distributed._meta_registrations as fake_work
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.ops.adam import cpu_adam
    from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper, partitioned_param_swapper
    from deepspeed.runtime.zero import linear, stage3

    from snugfit.rehearsal.sharded.accelerator import RankAccelerator, ShapesAccelerator
    from snugfit.rehearsal.sharded.disk import FileOperator
    from snugfit.rehearsal.sharded.engine_ranks import engine_of_rank

    host = HostTensors(
        lambda tensor, dtype: recorder.__torch_dispatch__(TO_COPY, (), (tensor,), {"dtype": dtype})
    )
    recorder.host = host
    with contextlib.ExitStack() as stack:
        stack.enter_context(process_group(rank, ranks))
        accelerator = ShapesAccelerator(recorder, host.pin, recorder.policy.free_bytes)
        if isinstance(recorder, RankRecorder):
            streams = ShapesModule(recorder.order, ranks, recorder.wait, recorder.empty_cache)
            accelerator = RankAccelerator(recorder, host.pin, recorder.policy.free_bytes, streams)
        stack.enter_context(patch.object(real, "ds_accelerator", accelerator))
        stack.enter_context(patch.object(linear, "get_accelerator", CPU_Accelerator))  # of autocast
        stack.enter_context(patch.object(cpuinfo, "get_cpu_info", dict))  # it asks for a second
        stack.enter_context(patch.object(cpu_adam, "CPUAdamBuilder", lambda: CpuAdam(host)))
        for swapper in (partitioned_param_swapper, partitioned_optimizer_swapper):
            stack.enter_context(patch.object(swapper, "AsyncIOBuilder", lambda: FileOperator(host)))
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda self, stream: None))
        stack.enter_context(patch.object(coordinator, "assert_ints_same_as_other_ranks", lambda *ints: None))
        for module in (stage2, stage3):
            stack.enter_context(patch.object(module, "is_invalid_grad_norm", lambda norm: False))
            stack.enter_context(patch.object(module, "float", _Number(recorder), create=True))
        stack.enter_context(patch.object(stage2, "torch", TorchForShapes()))
        stack.enter_context(patch.object(fake_work, "generate_unique_id", itertools.count().__next__))
        stack.enter_context(patch.object(attention, "RECORDING_MODES", 2))
        stack.enter_context(_hooks_counted(recorder))
        if isinstance(recorder, RankRecorder):
            stack.enter_context(engine_of_rank(recorder))
        yield host
