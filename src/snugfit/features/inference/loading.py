"""Memory and time of loading a checkpoint: transformers' `from_pretrained` of safetensors to one GPU.

The tensors come from the model class on `meta`. The order and the copies are those of `core_model_loading.py`
and `modeling_utils.py` (transformers 5.17 to 5.23). On the CPU, real loads have the predicted peaks
(`tests/test_loading.py`). Seconds on a CPU are 3 to 6 % above those of loads from the page cache. They are 8
to 23 % below those of loads from the disk (`lab/loading_seconds.py`). The warm-up was measured on no GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.report.text.answer import show_gib
from snugfit.units import GIB, show_seconds

if TYPE_CHECKING:
    import torch

    from snugfit.job.gpu import Gpu
    from snugfit.prediction.allocator import Allocator
    from snugfit.results.prediction import Prediction

THREADS = 4
"""Largest number of threads with which transformers reads tensors (`GLOBAL_WORKERS` of
`core_model_loading.py`).
"""

UNRESERVED_BYTES = int(1.2 * GIB)
"""Bytes of the GPU that transformers' warm-up does not reserve (`caching_allocator_warmup` of
`modeling_utils.py`).
"""

BLOCK_OF_SCALE, BYTES_OF_CODES = 64, 64
"""Number of 4-bit weights that share a scale in bitsandbytes, and bytes of the 16 codes (fp32) of a weight
tensor.

Source: `quantize_4bit` and `get_4bit_type` in `functional.py` (bitsandbytes 0.50).
"""

DISK_RATE = 2e9
"""Assumed bytes per second that a disk reads (chosen). An NVMe disk of PCIe gen3 reads about 3e9 by its data
sheet, and disks of rented machines 0.2e9 to 2e9.
"""

ASSUMPTIONS = (
    "from_pretrained loads safetensors to one GPU, with device_map 'cuda', or 'auto' if the model fits.",
    "transformers first reserves a block of the model's bytes on the GPU. No GPU has measured this warm-up.",
    "Threads read the tensors in order. Those that read ahead of the joined experts may reserve more.",
    "The host maps the files. Under pressure the system drops their pages, and the host needs less.",
    "Seconds are a formula: bytes of the files by the disk's rate, or copied bytes by the link's if longer.",
    "The disk reads 2 GB/s (assumed). The files of a second load are in the page cache, and read no disk.",
    "Mapped files are pageable memory, which one H200's host copied at 11 GB/s. A slower link limits them.",
    "Imports, Python's time for each tensor, and the kernels that quantize are not in the seconds.",
    "bitsandbytes quantizes with its default settings, without nested scales.",
)
"""Assumptions behind all predicted figures for loading."""


class CheckpointTensor(NamedTuple):
    """A tensor of a model, with the tensors of the checkpoint from which it is loaded."""

    sources: tuple[int, ...]
    """Numbers of elements of the source tensors in the checkpoint. Experts are stored one by one and loaded
    into one tensor.
    """
    file_size: int
    """Bytes of one element in the checkpoint file."""
    size: int
    """Bytes of one element on the device, before quantization."""
    places: tuple[int, ...] = (0,)
    """Positions of the source tensors in the order in which threads read all of them."""
    rows: int = 0
    """Output features of a linear weight, each of which has a scale in 8 bits; otherwise 0."""
    is_linear: bool = False
    """True for the weight of a linear layer, which bitsandbytes quantizes."""
    is_transposed: bool = False
    """True for a weight of `Conv1D`, which is transposed before quantization."""

    @property
    def elements(self) -> int:
        """Number of elements of the checkpoint's tensors for this one."""
        return sum(self.sources)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, before quantization."""
        return self.elements * self.size


@dataclass(frozen=True, kw_only=True)
class LoadingResult:
    """Predicted memory of loading a checkpoint to a GPU, and the seconds of its copies.

    The bytes of the CUDA context are not included.
    """

    weights: str
    """Format of the loaded weights: `as saved`, or `4 bits` or `8 bits`, to which bitsandbytes quantizes them
    during loading.
    """
    allocated_bytes: int
    """Peak of the bytes in the allocator's used blocks, including the block of the warm-up."""
    reserved_bytes: int
    """Bytes that the allocator reserves on the device."""
    host_bytes: int
    """Peak of the host memory for mapped files and copies, in bytes, without the process itself."""
    host_copy_bytes: int
    """Part of `host_bytes` for copies in another dtype, which threads make concurrently."""
    read_bytes: int
    """Bytes of the checkpoint's tensors, each read once from the disk."""
    copied_bytes: int
    """Bytes copied between host and device, both directions together."""
    copy_seconds: float | None = None
    """Seconds of a load from the page cache: `copied_bytes` by the rate of copies from mapped files. None
    without a GPU.
    """
    disk_seconds: float = 0.0
    """Seconds of a first load: `read_bytes` by the assumed rate of the disk, or the copies, if they take
    longer. Threads copy while others read.
    """


def loading_results(prediction: Prediction) -> tuple[LoadingResult, ...]:
    """Return memory and time of loading the prediction's model as saved, and in 4 and 8 bits by bitsandbytes.

    The result is empty for a user's module, which has no checkpoint, and for a checkpoint that is quantized
    already. The checkpoint's dtype and sizes come from its config.
    """
    from snugfit.job.config import ignored_keys

    job = prediction.job
    if job.model.module is not None or "quantization_config" in ignored_keys(job.model.config):
        return ()
    tensors, buffers = tensors_of(_skeleton(prediction), job.model.dtype)
    plain = _result(tensors, buffers, prediction.gpu, 0)
    if not any(tensor.is_linear for tensor in tensors):
        return (plain,)
    return (plain, *(_result(tensors, buffers, prediction.gpu, bits) for bits in (4, 8)))


def loading_line(results: Sequence[LoadingResult]) -> str:
    """Return a line for a report on loading a checkpoint: its peak memory and its seconds."""
    first, *quantized = results
    cached = "" if first.copy_seconds is None else f", {show_seconds(first.copy_seconds)} if cached"
    text = (
        f"{show_gib(first.reserved_bytes)}, host {show_gib(first.host_bytes)}, by a formula "
        f"{show_seconds(first.disk_seconds)} from disk{cached}"
    )
    more = ", ".join(f"{result.weights} {show_gib(result.reserved_bytes)}" for result in quantized)
    return f"{text}; {more}" if more else text


def _skeleton(prediction: Prediction) -> Any:
    """Return the prediction's model on `meta`, with weights in the dtypes of the recipe."""
    import torch

    from snugfit.job.build import instantiate
    from snugfit.step.applier import model_arguments

    with torch.device("meta"):
        return instantiate(prediction.job, **model_arguments(prediction.recipe.setup()))


def tensors_of(model: Any, file_dtype: str | None) -> tuple[list[CheckpointTensor], int]:
    """Return a model's tensors in the order in which they are loaded, and the bytes of its other buffers.

    `file_dtype` is torch's name for the checkpoint's dtype; None if it is that of the model. Tied weights are
    stored once.
    """
    import torch
    from transformers.core_model_loading import dot_natural_key

    tied = getattr(model, "all_tied_weights_keys", {})
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    stored = getattr(torch, file_dtype or "", None)
    linear = _linear_weights(model)
    tensors = []
    sources_by_name = _sources(model, state)
    stored_names = sorted(
        {key for sources in sources_by_name.values() for key in sources}, key=dot_natural_key
    )
    places = {name: position for position, name in enumerate(stored_names)}
    for name, tensor in state.items():
        sources = sources_by_name[name]
        by_file = stored if stored is not None and tensor.is_floating_point() else tensor.dtype
        entry = CheckpointTensor(
            sources=tuple(source.numel() for source in sources.values()),
            file_size=by_file.itemsize,
            size=tensor.dtype.itemsize,
            places=tuple(places[key] for key in sources),
            **linear.get(name, {}),
        )
        tensors.append(entry)
    left = sum(buffer.nbytes for name, buffer in model.named_buffers() if name not in model.state_dict())
    return sorted(tensors, key=lambda one: min(one.places)), left


def _sources(model: Any, state: Mapping[str, torch.Tensor]) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Return for each tensor of a model the checkpoint's tensors, by name, from which it is loaded."""
    from transformers.core_model_loading import revert_weight_conversion

    def revert(part: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        try:
            return revert_weight_conversion(model, part)  # type: ignore[no-any-return]
        # Parts of a fused tensor cannot be reverted. They are views of it on the device.
        except (RuntimeError, ValueError, KeyError):
            return {}

    # A tensor that was only renamed is still the same object.
    renamed = {id(tensor): name for name, tensor in revert(state).items()}
    return {
        name: {renamed[id(tensor)]: tensor}
        if id(tensor) in renamed
        else revert({name: tensor}) or {name: tensor}
        for name, tensor in state.items()
    }


def _linear_weights(model: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return the fields of `CheckpointTensor` for each weight that bitsandbytes quantizes, by name.

    They are those of `nn.Linear` and `Conv1D` outside of transformers' own exceptions, such as the head
    (`replace_with_bnb_linear` of `integrations/bitsandbytes.py`).
    """
    import torch
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert

    whole = get_keys_to_not_convert(model)
    return {
        f"{name}.weight": {
            "rows": module.weight.shape[int(isinstance(module, Conv1D))],
            "is_linear": True,
            "is_transposed": isinstance(module, Conv1D),
        }
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and name not in whole
    }


def replay_loading(
    tensors: Sequence[CheckpointTensor],
    buffers: int,
    *,
    bits: int = 0,
    warm_up: int = 0,
    threads: bool = True,
) -> Allocator:
    """Return a simulated allocator after loading these tensors in order, and buffers of `buffers` bytes.

    Linear weights are quantized to 4 or 8 `bits`; 0 leaves them. The block of `warm_up` bytes is freed first.
    With `threads`, a tensor's sources are read with all tensors between them in the files. Threads that read
    further ahead are not modelled. transformers quantizes without threads.
    """
    from snugfit.prediction.allocator import Allocator

    allocator = Allocator()
    if warm_up:
        allocator.release(allocator.allocate(warm_up))
    reads = sorted(
        (position if threads and not bits else index, index, elements * tensor.size)
        for index, tensor in enumerate(tensors)
        for position, elements in zip(tensor.places, tensor.sources, strict=True)
    )
    blocks, queue = defaultdict[int, list[Any]](list), iter(reads)
    for index, tensor in enumerate(tensors):
        while len(blocks[index]) < len(tensor.sources):
            _, reader, nbytes = next(queue)
            blocks[reader].append(allocator.allocate(nbytes))
        held = blocks.pop(index)
        if bits and tensor.is_linear:
            copies, results = _quantized_sizes(tensor, bits)
            held += [allocator.allocate(nbytes) for nbytes in copies]
        elif len(held) > 1:
            results = [tensor.nbytes]
        else:
            continue
        for nbytes in results:
            allocator.allocate(nbytes)
        for block in held:
            allocator.release(block)
    if buffers:
        allocator.allocate(buffers)
    return allocator


def _quantized_sizes(tensor: CheckpointTensor, bits: int) -> tuple[list[int], list[int]]:
    """Return the bytes of the temporary copies while a weight is quantized, and of the resulting tensors.

    Sources: `_quantize` of `Params4bit` and `Int8Params` in `nn/modules.py` (bitsandbytes 0.50), without
    nested scales, which are not the default. In 8 bits, the device holds the weight and its copy in fp16.
    """
    if bits == 8:
        return [2 * tensor.elements], [tensor.elements, 4 * tensor.rows]
    scales = 4 * -(-tensor.elements // BLOCK_OF_SCALE)
    return [tensor.nbytes] if tensor.is_transposed else [], [-(-tensor.elements // 2), scales, BYTES_OF_CODES]


def warm_up_bytes(tensors: Sequence[CheckpointTensor], bits: int, gpu: Gpu | None) -> int:
    """Return the bytes that transformers allocates and frees first in a new process, to fill the allocator's
    cache.

    Source: `caching_allocator_warmup` and `get_total_byte_count` of `modeling_utils.py`. Quantized weights
    count without their scales.
    """
    total = sum(
        tensor.elements * bits // 8 if bits and tensor.is_linear else tensor.nbytes for tensor in tensors
    )
    if gpu is not None and gpu.memory_bytes:
        total = max(0, min(total, gpu.memory_bytes - UNRESERVED_BYTES))
    return total // 2 * 2


def _result(tensors: Sequence[CheckpointTensor], buffers: int, gpu: Gpu | None, bits: int) -> LoadingResult:
    from snugfit.prediction.kernel_seconds import PAGEABLE
    from snugfit.prediction.rates import host_link_bandwidth

    after = replay_loading(tensors, buffers, bits=bits, warm_up=warm_up_bytes(tensors, bits, gpu))
    read = sum(tensor.elements * tensor.file_size for tensor in tensors)
    copies = _host_copies(tensors, bits)
    copied = sum(tensor.nbytes for tensor in tensors)
    if bits == 8:
        # transformers copies each weight back to the host, and bitsandbytes copies it to the device again in
        # fp16.
        copied += sum(tensor.nbytes + 2 * tensor.elements for tensor in tensors if tensor.is_linear)
    copying = 0.0 if gpu is None else copied / min(PAGEABLE, host_link_bandwidth(gpu))
    return LoadingResult(
        weights=f"{bits} bits" if bits else "as saved",
        allocated_bytes=after.allocated_peak,
        reserved_bytes=after.reserved_peak,
        host_bytes=read + copies,
        host_copy_bytes=copies,
        read_bytes=read,
        copied_bytes=copied,
        copy_seconds=None if gpu is None else copying,
        disk_seconds=max(read / DISK_RATE, copying),
    )


def _host_copies(tensors: Sequence[CheckpointTensor], bits: int) -> int:
    """Return the peak bytes of temporary copies in host memory while a checkpoint is loaded.

    The host casts before a copy to the device (`copy_kernel_cuda` of torch's `Copy.cu`). Without
    quantization, several threads do so.
    """
    cast = [n * tensor.size for tensor in tensors if tensor.file_size != tensor.size for n in tensor.sources]
    at_once = sum(sorted(cast)[-(1 if bits else THREADS) :])
    # In 8 bits, the host holds each weight and its fp16 copy.
    back = (
        [tensor.nbytes + 2 * tensor.elements for tensor in tensors if tensor.is_linear] if bits == 8 else []
    )
    return max(at_once, *back, 0)
