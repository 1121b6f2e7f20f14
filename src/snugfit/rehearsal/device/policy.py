"""A device's decisions: the only place that knows what a kind of device does differently.

torch decides much of a step by asking the tensor's device: which attention kernel runs, what autocast casts,
whether dropout is one kernel, which optimizers are fused, what a kernel takes as scratch. A rehearsal's
tensors live on `meta`, which would answer for itself. A `Policy` answers for the device that is meant.

Two exist: `CudaPolicy` for a GPU by its compute capability, and `CpuPolicy`, with which law 1 compares a
rehearsal with the allocator's own reports of a real run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.device import attention, autocast_lists
from snugfit.rehearsal.device.buffers import Scratch
from snugfit.rehearsal.device.scratch import composed_scratch, cuda_scratch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """What a kind of device decides."""

    softmax_saves_input: bool = False
    """True for torch before 1.11, whose softmax kept its input for backward beside its output."""

    @abstractmethod
    def choose_attention(self, operands: attention.Operands) -> str:
        """The attention kernel for these operands."""

    @property
    @abstractmethod
    def autocast(self) -> autocast_lists.AutocastLists:
        """What autocast casts on this device."""

    @property
    @abstractmethod
    def fuses_dropout(self) -> bool:
        """Whether dropout is one kernel with a boolean mask."""

    @property
    @abstractmethod
    def softmax_upcasts_fp16(self) -> bool:
        """Whether softmax reads fp16 and writes fp32 in one kernel."""

    @property
    @abstractmethod
    def fuses_rms_norm(self) -> bool:
        """Whether `rms_norm` is one kernel."""

    @property
    @abstractmethod
    def uses_grouped_mm(self) -> bool:
        """Whether products of experts go through `grouped_mm`."""

    @abstractmethod
    def fuses_groups(self, dtype: torch.dtype) -> bool:
        """Whether such a grouped product is one kernel."""

    @abstractmethod
    def scratch(self, operator: str, arguments: Sequence[Any], out: Any) -> Scratch:
        """What the kernel of this operator allocates for itself while it runs."""

    @abstractmethod
    def workspaces(self, operator: str) -> tuple[tuple[str, int], ...]:
        """Workspaces that a thread takes once, at its first use of this operator: name and bytes."""

    def output_alloc_order(self, operator: str, outputs: Sequence[Any]) -> Sequence[Any]:
        """The operator's new tensors in the order in which the device's kernel allocates them."""
        reorder = _BIRTHS.get(operator) if self.fuses_dropout else None
        return reorder(outputs) if reorder else outputs


@dataclass(frozen=True, kw_only=True)
class CudaPolicy(Policy):
    """A CUDA GPU."""

    capability: tuple[int, int] = (9, 0)
    """Compute capability."""

    multiprocessors: int = 132
    """How many it has: reductions size their buffers by it."""

    threads_per_multiprocessor: int = 2048
    """Resident threads of one multiprocessor."""

    cudnn_version: int = 91900
    """As `torch.backends.cudnn.version()` gives it on a CUDA build."""

    def choose_attention(self, operands: attention.Operands) -> str:
        """As `sdp_utils.cpp` decides for this capability."""
        return attention.chosen_on_cuda(operands, self._fused)

    @property
    def _fused(self) -> attention.Fused:
        return attention.fused_on_cuda(self.capability, self.cudnn_version)

    @property
    def decisions(self) -> Hashable:
        """Equal for GPUs that run the same kernels whatever they are given; they may yet differ in
        workspaces and scratch."""
        grouped = self.uses_grouped_mm, self.capability[0] in _GROUPED
        return self._fused, grouped, self.softmax_saves_input

    @property
    def scratch_size(self) -> tuple[int, int]:
        """What workspaces and scratch grow with: bytes of the former, and threads."""
        workspaces = sum(nbytes for _, nbytes in self.workspaces("aten::addmm"))
        return workspaces, self.multiprocessors * self.threads_per_multiprocessor

    @property
    def autocast(self) -> autocast_lists.AutocastLists:
        """CUDA's lists."""
        return autocast_lists.CUDA

    @property
    def fuses_dropout(self) -> bool:
        """Yes: `native_dropout`."""
        return True

    @property
    def softmax_upcasts_fp16(self) -> bool:
        """Yes, for fp16 input."""
        return True

    @property
    def fuses_rms_norm(self) -> bool:
        """Yes: `_fused_rms_norm`."""
        return True

    @property
    def uses_grouped_mm(self) -> bool:
        """From Ampere on: `_can_use_grouped_mm`, transformers' `integrations/moe.py`."""
        return self.capability >= (8, 0)

    def fuses_groups(self, dtype: torch.dtype) -> bool:
        """For bfloat16 on sm_90 and sm_100. Else the ends of the groups are read on the host, and each group
        is a product of its own: so profiles of fp32 on an H200 show it. Other architectures are taken to be
        alike; nothing was measured on them."""
        return str(dtype) == "torch.bfloat16" and self.capability[0] in _GROUPED

    def scratch(self, operator: str, arguments: Sequence[Any], out: Any) -> Scratch:
        """Reductions, attention and embedding backward: see `scratch.py`."""
        sizes = (self.multiprocessors, self.threads_per_multiprocessor)
        return cuda_scratch(operator, arguments, out, sizes)

    def workspaces(self, operator: str) -> tuple[tuple[str, int], ...]:
        """cuBLAS, and cuBLASLt for products with a bias."""
        if operator not in _GEMMS:
            return ()
        cublas = ("cuBLAS workspace", 33_554_432 if self.capability >= (9, 0) else 8_519_680)
        if operator == "aten::addmm":
            return (cublas, ("cuBLASLt workspace", 1_048_576))
        return (cublas,)


@dataclass(frozen=True, kw_only=True)
class CpuPolicy(Policy):
    """The CPU, for which `meta` already answers mostly right."""

    def choose_attention(self, operands: attention.Operands) -> str:
        """Flash attention for the CPU where it can, else math."""
        return attention.chosen_on_cpu(operands)

    @property
    def autocast(self) -> autocast_lists.AutocastLists:
        """The CPU's lists."""
        return autocast_lists.CPU

    @property
    def fuses_dropout(self) -> bool:
        """No: a random mask, and products."""
        return False

    @property
    def softmax_upcasts_fp16(self) -> bool:
        """No."""
        return False

    @property
    def fuses_rms_norm(self) -> bool:
        """No."""
        return False

    @property
    def uses_grouped_mm(self) -> bool:
        """Yes, in torch 2.11 and later."""
        return True

    def fuses_groups(self, dtype: torch.dtype) -> bool:
        """No device waits for the CPU's groups."""
        return True

    def scratch(self, operator: str, arguments: Sequence[Any], out: Any) -> Scratch:
        """What torch composes of other operators; buffers of the kernels themselves are not modelled."""
        return composed_scratch(operator, arguments, out)

    def workspaces(self, operator: str) -> tuple[tuple[str, int], ...]:
        """None."""
        return ()


_GROUPED = (9, 10)
_GEMMS = frozenset(
    {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::_grouped_mm"}
)


def _mask_first(outputs: Sequence[Any]) -> Sequence[Any]:
    return (outputs[1], outputs[0])


def _without_philox(outputs: Sequence[Any]) -> Sequence[Any]:
    """Efficient attention keeps its random seed and offset on the host in eager mode."""
    return outputs[:2]


def _philox_first(outputs: Sequence[Any]) -> Sequence[Any]:
    """cuDNN attention: seed and offset, then output and log-sum-exp (recorded on an H200)."""
    return (outputs[6], outputs[7], outputs[0], outputs[1])


_BIRTHS: dict[str, Callable[[Sequence[Any]], Sequence[Any]]] = {
    "aten::native_dropout": _mask_first,
    "aten::_scaled_dot_product_efficient_attention": _without_philox,
    "aten::_scaled_dot_product_cudnn_attention": _philox_first,
}
