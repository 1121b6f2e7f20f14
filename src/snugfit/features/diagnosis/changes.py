"""General changes to try after a memory failure, by its cause (such as fragmentation)."""

from __future__ import annotations

from snugfit.features.diagnosis.result import FailureKind, SuggestedChange

_SHORTAGE = (
    ("micro_batches(2), or half the batch per GPU and twice gradient_accumulation_steps",
     "the same update; activations of half the samples; a step is a little slower"),
    ("every_layer (gradient_checkpointing=True)",
     "the same numbers; keeps one activation a layer; a step takes about a third longer"),
    ("adamw_8bit, or lora(r=16)", "smaller optimizer states; the model learns slightly differently"),
)  # fmt: skip
_GENERAL: dict[FailureKind, tuple[tuple[str, str], ...]] = {
    FailureKind.SHORTAGE: _SHORTAGE,
    FailureKind.UNCLEAR: _SHORTAGE,
    FailureKind.FRAGMENTATION: (
        ("expandable (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; PYTORCH_HIP_ALLOC_CONF with ROCm)",
         "segments grow in place, so free pieces join; the same numbers; torch 2.1 or newer on Linux"),
        ("batches of one length: pad to a fixed length, or to multiples of 64",
         "requests repeat, so freed pieces serve again"),
        ("micro_batches(2)", "smaller pieces; the same update"),
    ),
    FailureKind.OUTSIDE: (
        ("end the other processes that `nvidia-smi` lists, such as old notebooks",
         "the memory is free at once"),
        ("another GPU: CUDA_VISIBLE_DEVICES=1", "no change of the run"),
        ("a plan: `snugfit plan MODEL --gpu NAME --memory AMOUNT`",
         "a recipe that fits in the rest of the memory"),
    ),
    FailureKind.LIBRARY: (
        ("micro_batches(2), or half the batch", "leaves memory for libraries outside of the allocator"),
        ("torch.cuda.empty_cache() before the call that failed",
         "returns unallocated memory to the driver; slows the next step"),
        ("torch.cuda.set_per_process_memory_fraction(0.95)",
         "leaves 5 % of the GPU to libraries; the allocator frees its cache earlier"),
    ),
    FailureKind.HOST: (
        ("fewer dataloader workers: loader workers copy the dataset's Python objects",
         "less memory of the host; loading may become slower"),
        ("more memory for the job: --mem of SLURM, --memory of Docker, resources.limits.memory of Kubernetes",
         "no change of the run"),
        ("no offload to the host; weights loaded as safetensors, in the dtype of the training",
         "less memory of the host"),
    ),
    FailureKind.SHARED_MEMORY: (
        ("docker run --shm-size=16g, or an emptyDir of medium Memory at /dev/shm in Kubernetes",
         "no change of the run"),
        ("num_workers=0 or fewer workers, and a smaller prefetch_factor", "loading may become slower"),
        ('torch.multiprocessing.set_sharing_strategy("file_system")', "batches go through files"),
    ),
    FailureKind.NO_FAILURE: (),
}  # fmt: skip


def general_changes(kind: FailureKind, *, expandable: bool = False) -> tuple[SuggestedChange, ...]:
    """Return general advice for a kind of out-of-memory failure, such as a fragmented allocator. With
    `expandable`, the allocator's `expandable_segments` is on already.
    """
    lines = _GENERAL[kind]
    lines = lines[1:] if expandable and kind is FailureKind.FRAGMENTATION else lines
    return tuple(SuggestedChange(change=change, effect=effect) for change, effect in lines)
