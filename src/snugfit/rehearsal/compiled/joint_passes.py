"""Inductor's passes over a joint graph (forward and backward), as they run for the policy's device.

Two of them decide by the device. One replaces attention that is written out by a fused kernel: on CUDA in
fp32 only with tf32, some spellings on the CPU alone. Which kernel, torch asks the device; here the policy
answers. The other pads products whose rows are no multiple of 16 bytes, if it times that as faster. Nothing
is timed here: products that it would time are taken to be faster padded as those were that one H200 timed. It
comes first, and attention whose products are padded is not replaced any more. A Whisper with eager attention
over 1,500 positions took 52 % more memory on an H200 than one whose scores are never stored.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.rehearsal.compiled.lowering import relabel
from snugfit.rehearsal.compiled.timed_padding import PaddedProduct, product_of
from snugfit.rehearsal.device.attention import attention_by
from snugfit.rehearsal.device.policy import CudaPolicy

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.device.policy import Policy

BALANCE = 54.4
"""Multiplications for each element of its operands and result above which a product in 16 bits is taken to
be faster padded. On an H200, products with 59 were padded and such with 49 were not; on an H100, some of the
backward pass of an attention over 393 positions were, with 48. All were timed (`timed_padding.py`)."""

HALF = 2
"""Bytes of a number in 16 bits."""

PADDED = (
    "Compiled products with sizes that are no multiple of 16 bytes: Inductor times on the GPU whether to pad "
    "them. Where one H200 padded them, they are predicted padded."
)


@contextlib.contextmanager
def joint_passes_for(
    policy: Policy, doubt: Callable[[str], None], times: Callable[[PaddedProduct], None]
) -> Iterator[None]:
    """Within it, the passes find the graph's tensors on the CPU, not on `meta`, where patterns and constants
    are nothing, and decide as on the policy's device: autograd, which they trace with, needs a GPU for
    tensors that are said to be there. `doubt` hears what is assumed, and `times` of the products that are
    timed there."""
    import torch
    from torch._inductor import compile_fx as fx
    from torch._subclasses import fake_tensor

    passes, cpu = fx._recursive_joint_graph_passes, torch.device("cpu")
    takes_device = "input_device" in inspect.signature(passes).parameters

    def run(graph: Any, *arguments: Any, **keywords: Any) -> Any:
        relabel(graph, cpu)
        on_gpu = isinstance(policy, CudaPolicy)
        decisions = _decisions_of(policy, doubt, times) if on_gpu else contextlib.nullcontext()
        # the first joint graph of a process has patterns made for CUDA, which would open a context there
        with decisions, patch.object(fake_tensor, "init_gpu_context", lambda device: None):
            return passes(
                graph, *arguments, **{**keywords, "input_device": cpu} if takes_device else keywords
            )

    with patch.object(fx, "_recursive_joint_graph_passes", run):
        yield


@contextlib.contextmanager
def _decisions_of(
    policy: Policy, doubt: Callable[[str], None], times: Callable[[PaddedProduct], None]
) -> Iterator[None]:
    import torch
    from torch._inductor.fx_passes import fuse_attention, pad_mm

    may_replace: Callable[[Any], bool] = fuse_attention._sfdp_params_check

    def may_replace_on_cuda(match: Any) -> bool:
        """As torch says it, and: a fused kernel multiplies in tf32."""
        in_fp32 = match.kwargs["query"].meta["val"].dtype == torch.float32
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        return (tf32 or not in_fp32) and may_replace(match)

    def should_pad(
        match: Any, first: torch.Tensor, second: torch.Tensor, operator: Any, input: Any = None
    ) -> bool:
        times(product_of(match, first, second, operator, input))
        pads = pays_to_pad(match, first, second)
        if pads:
            doubt(PADDED)
        return pads

    with (
        patch.object(fuse_attention, "_scaled_dot_product_attention", attention_by(policy, trains=True)),
        patch.object(fuse_attention, "_sfdp_params_check", may_replace_on_cuda),
        # what is left to the CPU looks for "cuda" in the text of a tensor's device
        patch.object(fuse_attention, "str", lambda device: "cuda", create=True),
        patch.object(pad_mm, "check_device", lambda one, other: True),
        patch.object(pad_mm, "has_triton", lambda: True),
        patch.object(pad_mm, "_should_pad", should_pad),
    ):
        yield


def pays_to_pad(match: Any, first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether this product, (m, k) by (k, n), is taken to be faster padded: in 16 bits, as the six of one
    attention were or were not, of operands that kernels write padded at once, or whose inner dimension needs
    no padding. Those of an attention in tf32, over 373 positions, were not."""
    from torch._inductor.fx_passes import pad_mm

    (rows, inner), columns = first.shape[-2:], second.shape[-1]
    moved = rows * inner + inner * columns + rows * columns
    if first.itemsize != HALF or rows * inner * columns <= BALANCE * moved:
        return False
    align = pad_mm.get_alignment_size(first)
    lengths = [max(one.stride()[-2:]) for one in (first, second)]
    written_padded = all(pad_mm.should_exclude_padding_time(match, name) for name in ("mat1", "mat2"))
    return any(length % align for length in (*lengths, columns)) and (written_padded or not inner % align)
