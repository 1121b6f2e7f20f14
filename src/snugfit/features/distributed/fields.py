"""The fields of `Setup` (settings of a training step) that this feature adds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from snugfit.errors import UsageError
from snugfit.techniques.wish import SeveralProcesses, Wish

ONE_GPU = "trains on several GPUs, and one was named. Add --gpus 2 (gpus=2 in Python) or leave it out"

RING = "ring"
"""Name of the attention function for sequences that are cut over ranks. It is torch's
`scaled_dot_product_attention` without masks (`apply/ring_attention.py`).
"""


@dataclass(frozen=True, kw_only=True)
class ShardingWish(SeveralProcesses):
    """Value of the field `sharding`: DeepSpeed's engine around model and optimizer, on one or several
    GPUs."""

    stage: int = 2
    """Stage of ZeRO. Stage 2 partitions gradients and optimizer states over ranks, stage 3 also weights."""

    states: str = "none"
    """Device of optimizer states, fp32 weights and the update: `none` is the GPU, `cpu` the host, `nvme` a
    disk (stage 3).
    """

    weights: str = "none"
    """Device of weights until a module uses them (stage 3): `none` is the GPU, `cpu` the host, `nvme` a disk.
    """

    bucket: int | None = None
    """Number of elements of the buffer in which gradients are averaged (`reduce_bucket_size`). None is the
    size that `auto` gives, the square of the hidden size.
    """

    dtype: str = "float32"
    """Dtype of weights in modules and of their computation, by torch's name. The updated weights are always
    fp32.
    """

    ranks: int = 1
    """Number of processes that train together, one for each GPU. Each computes its part of the global batch.
    """

    def on(self, gpus: int) -> ShardingWish:
        """Return these settings for `gpus` GPUs; DeepSpeed's are the same for any number."""
        return replace(self, ranks=gpus)


@dataclass(frozen=True, kw_only=True)
class ParallelWish(SeveralProcesses):
    """Value of the field `parallel`: processes that train one model by torch.distributed, one for each GPU (a
    rank).

    They form a device mesh. Along its data axis, each rank has a part of the global batch. Along the other
    axes, ranks share the work on the same samples.
    """

    weights: str = "copied"
    """Distribution of weights, gradients and optimizer states over ranks with different samples (the data
    axis). `copied`: each rank has all, and gradients are averaged (DDP). `sharded`: each has a part, and
    weights are gathered where a layer computes (FSDP2). `alone`: all ranks work on the same samples.
    """

    states: str = "copied"
    """Distribution of optimizer states where weights are copied: `copied`, or `sharded`. A sharded rank has
    the states of a part of the weights, which it updates and sends to the others (`ZeroRedundancyOptimizer`).
    """

    ranks: int = 0
    """Number of processes; 0 before it is set."""

    shards: int = 0
    """Number of ranks of the data axis that share one copy of the weights; 0 for all of them. Fewer ranks
    make several copies, whose gradients are averaged.
    """

    reshard: str = "layers"
    """Weights that are dropped after the forward pass and gathered again for the backward one: those of
    `layers`, `all`, or `none`. Weights outside of layers are needed again at once.
    """

    on_host: bool = False
    """True if shards (each rank's part of weights and states) are in host memory and updated there."""

    dtype: str | None = None
    """Dtype of gathered weights and of their computation, by torch's name; None keeps the dtype of the
    shards.
    """

    bucket_views: bool = False
    """True if gradients of copied weights are views of the averaged buckets, without memory of their own."""

    tensor: int = 1
    """Number of ranks that the matrices of each layer are cut over."""

    context: int = 1
    """Number of ranks that each sequence is cut over."""

    stages: int = 1
    """Number of ranks that the layers are distributed over, one stage after the other."""

    schedule: str = ""
    """Order in which each stage runs its micro-batches, by torch's name; empty without pipeline stages."""

    chunks: int = 1
    """Number of stages on each rank of the pipeline. With n ranks, the first has the stages 0, n, 2n, ..."""

    experts: int = 1
    """Number of ranks that each layer's experts are distributed over. It is 1, or equal to `tensor`."""

    @property
    def copies(self) -> bool:
        """Return True if several ranks hold equal weights and average their gradients (as in DDP). These
        ranks are those of the data axis, or, without one, those that share each sequence.
        """
        return self.weights == "copied" or (self.weights == "alone" and self.context > 1)

    @property
    def matrix_parts(self) -> int:
        """Return the number of ranks over which each layer's matrices are sharded (tensor parallelism)."""
        return self.tensor

    @property
    def all_stages(self) -> int:
        """Return the number of pipeline stages that the model's layers are divided into."""
        return self.stages * self.chunks

    @property
    def ranks_of_one_part(self) -> int:
        """Return the number of ranks that work on the same part of the global batch."""
        return self.tensor * self.context * self.stages

    @property
    def data_ranks(self) -> int:
        """Return the number of parts that the global batch is cut into."""
        return self.ranks // self.ranks_of_one_part

    def data_rank(self, rank: int) -> int:
        """Return the index, from 0, of a rank's part of the global batch. The mesh's axes (`mesh_of`) left of
        the data axis change slower, and those right of it faster.
        """
        return rank // (self.context * self.tensor) % self.data_ranks

    def counts(self, rank: int) -> float:
        """Return the weight of this rank's loss in the sum of all ranks' losses, from 0 to 1. Ranks that
        share sequences have equal weights that sum to 1. Among other ranks with the same samples, one in the
        last pipeline stage has weight 1.
        """
        # Only the last stage has a loss. The loss of each part of a sequence is scaled as if it were the
        # whole one's.
        is_last_stage = rank // (self.ranks // self.stages) == self.stages - 1
        return 1 / self.context if is_last_stage and rank % self.tensor == 0 else 0.0

    @property
    def axes(self) -> dict[str, int]:
        """Return the number of ranks along each axis of the device mesh except the data axis. Axes of size
        one are left out.
        """
        counts = {"stages": self.stages, "context": self.context, "tensor": self.tensor}
        return {axis: count for axis, count in counts.items() if count > 1}

    def shares_evenly(self, gpus: int, batch_size: int, whole_hosts: int | None) -> bool:
        """Return True if `gpus` GPUs can be divided into whole groups, and the batch evenly among these. If
        experts are distributed, all GPUs of a group must share them.
        """
        groups, left = divmod(gpus, self.ranks_of_one_part)
        # `alone` has no data axis. All other values need at least two groups of ranks along it.
        if left or (self.weights == "alone") is not (groups == 1) or batch_size % groups:
            return False
        # On several hosts, each copy of sharded weights fills whole hosts.
        spread = self.shards * self.tensor * self.context
        is_whole = not self.shards or whole_hosts is None or whole_hosts == spread < gpus // self.stages
        # Experts are divided over exactly the ranks that share matrices.
        return is_whole and self.experts in (1, self.tensor)

    def on(self, gpus: int) -> ParallelWish:
        """Return these settings for another number of GPUs, which is the product of the mesh's axes."""
        if gpus == 1:
            raise UsageError(f"The recipe {ONE_GPU}.")
        together = self.ranks_of_one_part
        if self.experts not in (1, self.tensor):
            raise UsageError(
                f"Experts are spread over {self.experts} GPUs that share a layer, and {self.tensor} do. "
                f"Write 'tensor({self.experts}) + expert({self.experts})'."
            )
        if gpus % together:
            named = " x ".join(f"{count} for {axis}" for axis, count in self.axes.items())
            raise UsageError(
                f"The recipe takes {together} GPUs ({named}) or a multiple of them, and {gpus} were "
                f"named. Set --gpus to a multiple of {together}."
            )
        # The recipe fixes the sizes of all axes but the data axis, which gets the remaining GPUs.
        data = gpus // together
        if self.weights == "alone" and data > 1:
            raise UsageError(
                f"The recipe shares one copy of the model among {together} GPUs, and {gpus} were named. Add "
                f"fsdp or ddp, which share the batch among {data} such groups, or name {together} GPUs."
            )
        if self.weights != "alone" and data == 1:
            raise UsageError(
                f"On {gpus} GPUs nothing is left to divide the batch over: {together} work on each part of "
                f"it. Name a multiple of {together}, or leave the technique of the slot 'sharding' out."
            )
        if self.shards and (self.shards > data or data % self.shards):
            raise UsageError(
                f"hsdp({self.shards}) takes a multiple of {self.shards} GPUs that share the batch, and "
                f"{gpus} GPUs make {data}. Set --gpus to a multiple of {self.shards * together}, or write "
                f"hsdp(n) with a divisor n of {data} above 1."
            )
        return replace(self, ranks=gpus)


SHARDING = Wish[ShardingWish | None]("sharding", ShardingWish | None, None)
"""The field `sharding`: settings of DeepSpeed's engine, which then runs the steps; None trains without it."""

PARALLEL = Wish[ParallelWish | None]("parallel", ParallelWish | None, None)
"""The field `parallel`: settings of the processes that train together; None trains in one process. Each
process wraps the model before it creates an optimizer for its part of the weights.
"""
