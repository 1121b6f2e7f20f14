"""What DeepSpeed's engine has on one of several ranks and not on one GPU, in a rehearsal.

- It gathers weights in a stream of its own, and averages gradients in another, beside the computation
  (`overlap_comm`).
- A tensor of one stream that another works on (`record_stream`) is dropped and stays where it is until that
  work is done.
- The third stage begins to gather, and waits for what it gathers later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.results.footprint import Kind

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.sharded.ranks import RankRecorder
    from snugfit.rehearsal.sharded.streams import Moment


class _Gathering:
    """Weights on their way: who waits for them has its stream wait."""

    def __init__(self, recorder: RankRecorder, moment: Moment) -> None:
        self._recorder, self._moment = recorder, moment

    def wait(self) -> None:
        """The current stream runs nothing further before they have come."""
        order = self._recorder.order
        order.wait(order.current, self._moment)


@contextlib.contextmanager
def engine_of_rank(recorder: RankRecorder) -> Iterator[None]:
    """Within it, the engine's streams and exchanges are written down."""
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import partition_parameters as partitions
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    begin, destroy = partitions._dist_allgather_fn, DeepSpeedEngine.destroy

    def gather(*arguments: Any, **keywords: Any) -> _Gathering:
        begin(*arguments, **keywords)
        return _Gathering(recorder, recorder.take_unawaited())

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        recorder.memory.lend(tensor, stream.stream_id)

    def end_and_destroy(engine: Any) -> None:
        """What this run's engine frees as it is destroyed would make the last step another than those before;
        an earlier run's is destroyed when the collector finds it."""
        recorder.end_of(getattr(getattr(engine, "optimizer", None), "optimizer", None))
        destroy(engine)

    replaced: list[tuple[Any, str, Any]] = [
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
        if hasattr(stage, makes):  # DeepSpeed 0.18 makes the second stage's elsewhere
            replaced.append((stage, makes, _and_claim_buckets(getattr(stage, makes), recorder)))
    with contextlib.ExitStack() as stack:
        for owner, name, instead in replaced:
            stack.enter_context(patch.object(owner, name, instead))
        yield


def _and_claim(kind: Any, recorder: RankRecorder) -> Callable[..., None]:
    """A handle's `wait`, after which its weights' bytes are known to be gathered."""
    wait = kind.wait

    def wait_and_claim(handle: Any, *arguments: Any, **keywords: Any) -> None:
        wait(handle, *arguments, **keywords)
        private = f"_{kind.__name__}__param"
        for weight in handle.params if hasattr(handle, "params") else [getattr(handle, private)]:
            recorder.memory.claim(weight.data, Kind.GATHERED, instead_of=Kind.COMMUNICATION)

    return wait_and_claim


def _and_claim_buckets(method: Callable[..., None], recorder: RankRecorder) -> Callable[..., None]:
    """A method of a stage's, after which the buckets in which gradients are averaged are there."""

    def run_and_claim(stage: Any, *arguments: Any, **keywords: Any) -> None:
        method(stage, *arguments, **keywords)
        for bucket in stage.ipg_buckets.values():
            for buffer in bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]:
                recorder.claim(buffer, Kind.COMMUNICATION)
        if (gradients := getattr(stage, "grad_partitions_flat_buffer", None)) is not None:
            recorder.claim(gradients, Kind.GRADIENTS)

    return run_and_claim
