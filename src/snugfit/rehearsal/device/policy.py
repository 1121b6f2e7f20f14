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
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

from snugfit.errors import SnugfitError
from snugfit.rehearsal.device import attention_choice, autocast_lists
from snugfit.rehearsal.device.buffers import Buffer, GpuSize, Scratch
from snugfit.rehearsal.device.scratch import composed_scratch, cuda_scratch
from snugfit.rehearsal.trace.trace import MATRIX_PRODUCTS
from snugfit.units import MIB

if TYPE_CHECKING:
    import torch

_Choice = TypeVar("_Choice", bound=Hashable)


class PoliciesDiffer(SnugfitError):
    """GPUs that were to share a rehearsal would run another kernel each; no user meets it."""


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """What a kind of device decides."""

    autocast: ClassVar[autocast_lists.AutocastLists]
    """What autocast casts on this device."""

    fuses_dropout: ClassVar[bool]
    """Whether dropout is one kernel with a boolean mask (`native_dropout`)."""

    softmax_upcasts_fp16: ClassVar[bool]
    """Whether softmax reads fp16 and writes fp32 in one kernel."""

    fuses_rms_norm: ClassVar[bool]
    """Whether `rms_norm` is one kernel (`_fused_rms_norm`)."""

    runs_cudnn: ClassVar[bool]
    """Whether recurrent networks are cuDNN's."""

    keeps_exchanged: ClassVar[bool]
    """Whether tensors that ranks exchange in a stream of their own are kept until the next such exchange
    begins (NCCL's stash in place of `record_stream`, `ProcessGroupNCCL.cpp`), and exchanges that begin
    together have one handle (`sharded/ranks.py`)."""

    remembers_scratch: ClassVar[bool] = True
    """Whether the scratch of a call need not be asked twice."""

    free_bytes: int | None = field(default=None, compare=False)
    """Bytes that a process finds free on the device before its model is built; None where that is not known.
    Only what asks the device before it decides (DeepSpeed's second stage) depends on it."""

    softmax_saves_input: bool = False
    """True for torch before 1.11, whose softmax kept its input for backward beside its output."""

    @abstractmethod
    def choose_attention(self, operands: attention_choice.Operands) -> str:
        """The attention kernel for these operands."""

    @property
    def attention_order(self) -> Sequence[str]:
        """The order in which torch asks its attention kernels on this device."""
        return attention_choice.DEFAULT_ORDER

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

    def workspaces(self, operator: str, arguments: Sequence[Any] = ()) -> tuple[Buffer, ...]:
        """Workspaces that a thread takes once, at its first use of this operator."""
        return ()

    def output_alloc_order(self, operator: str, outputs: Sequence[Any]) -> Sequence[Any]:
        """The operator's new tensors in the order in which the device's kernel allocates them."""
        reorder = _OUTPUT_ORDER.get(operator) if self.fuses_dropout else None
        return reorder(outputs) if reorder else outputs


class ScratchSize(NamedTuple):
    """What the workspaces and the scratch of a GPU grow with."""

    workspaces: int
    """Bytes of all workspaces of a thread."""
    threads: int
    """Resident threads of the whole GPU."""


@dataclass(frozen=True, kw_only=True)
class CudaPolicy(Policy):
    """The decisions of a CUDA GPU."""

    autocast = autocast_lists.CUDA
    fuses_dropout = True
    softmax_upcasts_fp16 = True
    fuses_rms_norm = True
    runs_cudnn = True
    keeps_exchanged = True

    capability: tuple[int, int] = (9, 0)
    """Compute capability: major and minor."""

    multiprocessors: int = 132
    """How many it has: reductions size their buffers by it."""

    threads_per_multiprocessor: int = 2048
    """Resident threads of one multiprocessor."""

    cache_bytes: int = field(default=60 * MIB, compare=False)
    """Of its second cache. GPUs that differ in it alone are rehearsed as one."""

    peers: tuple[CudaPolicy, ...] = ()
    """Those of other GPUs that `may_share` the rehearsals: where one of them decides otherwise about a step,
    its rehearsal ends with `PoliciesDiffer`."""

    def choose_attention(self, operands: attention_choice.Operands) -> str:
        """As `sdp_utils.cpp` decides for this capability."""
        return self.common(lambda one: attention_choice.choose_on_cuda(operands, one._attention_kernels))

    def common(self, fact: Callable[[CudaPolicy], _Choice]) -> _Choice:
        """Return a fact of this GPU. Raises `PoliciesDiffer` where that of a peer is another."""
        facts = {fact(one) for one in (self, *self.peers)}
        if len(facts) > 1:
            raise PoliciesDiffer(
                f"GPUs that are simulated together run different kernels: {sorted(map(str, facts))}."
            )
        return facts.pop()

    @property
    def attention_order(self) -> Sequence[str]:
        """As `sdp_utils.cpp` has it for this capability."""
        return self._attention_kernels.order

    @property
    def _attention_kernels(self) -> attention_choice.FusedKernels:
        return attention_choice.kernels_on_cuda(self.capability)

    @property
    def decisions(self) -> Hashable:
        """Equal for GPUs that run the same kernels whatever they are given; they may yet differ in
        workspaces and scratch."""
        return self._attention_kernels, self.capability[0] in _FUSING_GROUPS, self.may_share

    @property
    def may_share(self) -> Hashable:
        """Equal for GPUs that run the same kernels but for heads of more than 128 and grouped products, and
        may be each other's `peers`."""
        return self.attention_order, self.uses_grouped_mm, self.softmax_saves_input

    @property
    def scratch_size(self) -> ScratchSize:
        """What this GPU's workspaces and scratch grow with."""
        workspaces = sum(nbytes for _, nbytes in self.workspaces("aten::addmm"))
        return ScratchSize(workspaces, self.resident_threads)

    @property
    def resident_threads(self) -> int:
        """Of the whole GPU."""
        return self.multiprocessors * self.threads_per_multiprocessor

    @property
    def uses_grouped_mm(self) -> bool:
        """From Ampere on: `_can_use_grouped_mm`, transformers' `integrations/moe.py`."""
        return self.capability >= (8, 0)

    def fuses_groups(self, dtype: torch.dtype) -> bool:
        """For bfloat16 on sm_90 and sm_100. Else the ends of the groups are read on the host, and each group
        is a product of its own: so profiles of fp32 on an H200 show it. Other architectures are taken to be
        alike; nothing was measured on them."""
        is_fused = str(dtype) == "torch.bfloat16"
        return self.common(lambda one: is_fused and one.capability[0] in _FUSING_GROUPS)

    def scratch(self, operator: str, arguments: Sequence[Any], out: Any) -> Scratch:
        """Reductions, attention and embedding backward: see `scratch.py`."""
        gpu = GpuSize(self.multiprocessors, self.threads_per_multiprocessor, self.capability)
        return cuda_scratch(operator, arguments, out, gpu)

    def workspaces(self, operator: str, arguments: Sequence[Any] = ()) -> tuple[Buffer, ...]:
        """That of cuBLAS, and of cuBLASLt for products with a bias or in 8-bit floats. What is added to a
        matrix is none (`isInputCompliesAddmmCudaLt`, `native/cuda/Blas.cpp`); without arguments it is taken
        for one."""
        if operator not in _GEMMS:
            return ()
        cublas = Buffer("cuBLAS workspace", 33_554_432 if self.capability >= (9, 0) else 8_519_680)
        with_bias = operator == "aten::addmm" and not (arguments and _is_matrix(arguments[0]))
        if with_bias or operator == "aten::_scaled_mm":
            return (cublas, Buffer("cuBLASLt workspace", 1_048_576))
        return (cublas,)


@dataclass(frozen=True, kw_only=True)
class ComparedPolicy(CudaPolicy):
    """The decisions of one GPU, which notes what scratch others take and whether they run the same kernels.
    So one rehearsal tells about all of them."""

    remembers_scratch = False

    compared: tuple[CudaPolicy, ...]
    """Which `may_share` a search."""

    sizes: dict[CudaPolicy, dict[tuple[str, int], int] | None] = field(default_factory=dict, compare=False)
    """By GPU, the bytes of each buffer by its name in a trace and its bytes here; None where another kernel
    runs, another number of buffers is taken, or buffers that are equal here differ there."""

    @classmethod
    def of(cls, policy: CudaPolicy, policies: Sequence[CudaPolicy]) -> Self:
        """This policy, compared with these."""
        same = {item.name: getattr(policy, item.name) for item in fields(policy)}
        noting = cls(**same, compared=tuple(policies))
        for other in policies:
            noting.sizes[other] = {}
            noting._note(other, "", policy.workspaces("aten::addmm"), other.workspaces("aten::addmm"))
        return noting

    def common(self, fact: Callable[[CudaPolicy], _Choice]) -> _Choice:
        """Return a fact of this GPU. GPUs for which it is another are noted."""
        own = super().common(fact)
        self.sizes.update({other: None for other in self.compared if fact(other) != own})
        return own

    def scratch(self, operator: str, arguments: Sequence[Any], out: Any) -> Scratch:
        """This GPU's; that of the others is noted."""
        scratch = super().scratch(operator, arguments, out)
        for other in self.compared:
            if self.sizes[other] is not None:
                self._note(other, f"{operator}: ", scratch, other.scratch(operator, arguments, out))
        return scratch

    @property
    def resident_threads(self) -> int:
        """Of the whole GPU. What a step makes of so many is no buffer of a kernel, so others differ by it."""
        threads = super().resident_threads
        self.sizes.update({other: None for other in self.compared if other.resident_threads != threads})
        return threads

    def _note(self, other: CudaPolicy, prefix: str, own: Scratch, scratch: Scratch) -> None:
        sizes = self.sizes[other]
        if sizes is None or own == scratch == ():
            return
        pairs = [(prefix + one.name, one.nbytes, two.nbytes) for one, two in zip(own, scratch, strict=False)]
        alike = [(one.name, one.nbytes > 0) for one in own] == [(two.name, two.nbytes > 0) for two in scratch]
        for name, nbytes, size in pairs:
            alike = alike and (nbytes <= 0 or sizes.setdefault((name, nbytes), size) == size)
        if not alike:
            self.sizes[other] = None


@dataclass(frozen=True, kw_only=True)
class CpuPolicy(Policy):
    """The decisions of the CPU, for which `meta` already answers mostly right. Its dropout is a random mask
    and products, and buffers of its kernels are not modelled."""

    autocast = autocast_lists.CPU
    fuses_dropout = False
    softmax_upcasts_fp16 = False
    fuses_rms_norm = False
    runs_cudnn = False
    keeps_exchanged = False

    def choose_attention(self, operands: attention_choice.Operands) -> str:
        """Flash attention for the CPU where it can, else math."""
        return attention_choice.choose_on_cpu(operands)

    @property
    def uses_grouped_mm(self) -> bool:
        """Yes, in torch 2.11 and later."""
        return True

    def fuses_groups(self, dtype: torch.dtype) -> bool:
        """Yes: no device waits for the CPU's groups."""
        return True

    def scratch(self, operator: str, arguments: Sequence[Any], out: Any) -> Scratch:
        """What torch composes of other operators."""
        return composed_scratch(operator, arguments, out)


_FUSING_GROUPS = (9, 10)
"""Major compute capabilities on which a grouped product is one kernel."""

_GEMMS = MATRIX_PRODUCTS | {"aten::addmv", "aten::mv"}
"""Operators that run in cuBLAS."""


def _is_matrix(added: torch.Tensor) -> bool:
    """Whether it is more than one row."""
    return any(length > 1 for length in added.shape[:-1])


def _mask_first(outputs: Sequence[Any]) -> Sequence[Any]:
    return (outputs[1], outputs[0])


def _without_philox(outputs: Sequence[Any]) -> Sequence[Any]:
    """Efficient attention keeps its random seed and offset on the host in eager mode."""
    return outputs[:2]


def _philox_first(outputs: Sequence[Any]) -> Sequence[Any]:
    """cuDNN attention: seed and offset, then output and log-sum-exp (recorded on an H200)."""
    return (outputs[6], outputs[7], outputs[0], outputs[1])


def _first_alone(outputs: Sequence[Any]) -> Sequence[Any]:
    """What the backward pass of log-sigmoid needs besides is the CPU's."""
    return outputs[:1]


_OUTPUT_ORDER: dict[str, Callable[[Sequence[Any]], Sequence[Any]]] = {
    "aten::native_dropout": _mask_first,
    "aten::_scaled_dot_product_efficient_attention": _without_philox,
    "aten::_scaled_dot_product_cudnn_attention": _philox_first,
    "aten::log_sigmoid_forward": _first_alone,
}
