"""Inductor's graph passes over a joint graph (forward and backward), with the decisions that they would make
on the simulated GPU.

The decisions of two passes depend on the device. One pass replaces explicit attention by a fused kernel. The
other pads matrix products whose rows are no multiple of 16 bytes, if padding is faster in a benchmark. A
simulation runs no benchmark. It pads such products by a rule that was fitted to the benchmarks of one H200.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.features.compile.simulation.lowering import relabel
from snugfit.features.compile.simulation.timed_padding import PaddedProduct, product_of
from snugfit.rehearsal.device.attention import attention_by
from snugfit.rehearsal.device.policy import CudaPolicy

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.device.policy import Policy

MIN_MULTIPLICATIONS = 54.4
"""Multiplications per element of operands and result, above which Inductor is assumed to pad a 16-bit matrix
product.

On an H200, products with 59 were padded and those with 49 were not. On an H100, some products with 48 were
padded, in the backward pass of an attention over 393 positions. Inductor benchmarked all of them
(`timed_padding.py`).
"""

HALF = 2
"""Bytes of a 16-bit number."""

PADDED = (
    "Compiled products have sizes that are no multiple of 16 bytes. Inductor decides on the GPU, by "
    "timing, if it pads them. The prediction pads those that one H200 padded. snugfit measure shows yours."
)


@contextlib.contextmanager
def joint_passes_for(
    policy: Policy, doubt: Callable[[str], None], times: Callable[[PaddedProduct], None]
) -> Iterator[None]:
    """Context in which Inductor's passes run with tensors on the CPU and decisions for the simulated device.

    The passes ignore patterns and constants on `meta`. Autograd, with which they trace, needs a GPU for
    tensors on `cuda`. `doubt` is called with each assumption (a text), and `times` with the matrix products
    that a GPU would benchmark.
    """
    import torch
    from torch._inductor import compile_fx as fx
    from torch._subclasses import fake_tensor

    passes, cpu = fx._recursive_joint_graph_passes, torch.device("cpu")
    # This argument exists only in some versions of torch.
    takes_device = "input_device" in inspect.signature(passes).parameters

    def run(graph: Any, *arguments: Any, **keywords: Any) -> Any:
        # Inductor's patterns and constants ignore `meta` tensors, so the graph is labelled as the CPU's.
        relabel(graph, cpu)
        on_gpu = isinstance(policy, CudaPolicy)
        decisions = _decisions_of(policy, doubt, times) if on_gpu else contextlib.nullcontext()
        # The first joint graph of a process creates patterns for CUDA, which would open a context on a GPU.
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
        """Return True if Inductor may replace a matched attention by a fused kernel: torch allows it, and the
        kernel multiplies in tf32.
        """
        in_fp32 = match.kwargs["query"].meta["val"].dtype == torch.float32
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        # On CUDA, torch fuses attention in fp32 only if tf32 is allowed.
        return (tf32 or not in_fp32) and may_replace(match)

    def should_pad(
        match: Any, first: torch.Tensor, second: torch.Tensor, operator: Any, input: Any = None
    ) -> bool:
        # Inductor decides about padding first. It does not fuse attention whose products were padded.
        times(product_of(match, first, second, operator, input))
        pads = pays_to_pad(match, first, second)
        if pads:
            doubt(PADDED)
        return pads

    with (
        patch.object(fuse_attention, "_scaled_dot_product_attention", attention_by(policy, trains=True)),
        patch.object(fuse_attention, "_sfdp_params_check", may_replace_on_cuda),
        # One check searches the text of a tensor's device for "cuda", so that text is replaced.
        patch.object(fuse_attention, "str", lambda device: "cuda", create=True),
        patch.object(pad_mm, "check_device", lambda left, other: True),
        patch.object(pad_mm, "has_triton", lambda: True),
        patch.object(pad_mm, "_should_pad", should_pad),
    ):
        yield


def pays_to_pad(match: Any, first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if this matrix product, (m, k) by (k, n), is assumed to be faster with padded operands.

    The rule: it is in 16 bits, and its operands are written padded or its inner dimension needs no padding.
    It fits the six measured products of one attention. Products in tf32, over 373 positions, were not padded.
    """
    from torch._inductor.fx_passes import pad_mm

    (rows, inner), columns = first.shape[-2:], second.shape[-1]
    moved = rows * inner + inner * columns + rows * columns
    if first.itemsize != HALF or rows * inner * columns <= MIN_MULTIPLICATIONS * moved:
        return False
    align = pad_mm.get_alignment_size(first)
    lengths = [max(operand.stride()[-2:]) for operand in (first, second)]
    written_padded = all(pad_mm.should_exclude_padding_time(match, name) for name in ("mat1", "mat2"))
    return any(length % align for length in (*lengths, columns)) and (written_padded or not inner % align)
