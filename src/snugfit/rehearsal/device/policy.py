"""Policies: the kernels, dtypes and buffers that torch chooses by the type of device, for simulations on
`meta`.

Many choices of torch in a step depend on the tensor's device. Examples are the attention kernel, autocast's
operators, fused dropout and optimizers, and a kernel's temporary buffers. A simulation's tensors are on
`meta`, for which torch chooses otherwise. A `Policy` contains the choices for the predicted device.

There are two policies. `CudaPolicy` represents a GPU by its compute capability. `CpuPolicy` lets the tests
compare a simulation with a real run on the CPU.
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
    """Error: GPUs that share one simulation would run different kernels. It is internal and never shown to a
    user."""


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Base class for a device's policy: the kernels, buffers and dtypes that torch chooses on it."""

    autocast: ClassVar[autocast_lists.AutocastLists]
    """Lists of the operators that autocast casts on this device."""

    fuses_dropout: ClassVar[bool]
    """True if dropout is one kernel with a boolean mask (`native_dropout`)."""

    softmax_upcasts_fp16: ClassVar[bool]
    """True if softmax with an fp16 input and an fp32 result is one kernel."""

    fuses_rms_norm: ClassVar[bool]
    """True if `rms_norm` is one kernel (`_fused_rms_norm`) on this device."""

    runs_cudnn: ClassVar[bool]
    """True if recurrent networks run in cuDNN on this device."""

    remembers_scratch: ClassVar[bool] = True
    """True if the temporary buffers of an operator's call may be cached."""

    free_bytes: int | None = field(default=None, compare=False)
    """Bytes of device memory that are free before a process builds its model; None if unknown.

    Only code that reads the free memory for a decision (DeepSpeed's second stage) depends on it.
    """

    softmax_saves_input: bool = False
    """True for torch before 1.11. Its softmax saved its input for backward in addition to its output."""

    @abstractmethod
    def choose_attention(self, operands: attention_choice.Operands) -> str:
        """Return the name of the attention kernel that torch would choose for these operands."""

    @property
    def attention_order(self) -> Sequence[str]:
        """Names of torch's attention kernels in their order of preference on this device."""
        return attention_choice.DEFAULT_ORDER

    @property
    @abstractmethod
    def uses_grouped_mm(self) -> bool:
        """True if transformers runs the experts of a mixture-of-experts layer with `grouped_mm` on this
        device."""

    @abstractmethod
    def fuses_groups(self, dtype: torch.dtype) -> bool:
        """Return True if a matrix product over groups of rows (experts) is one kernel on this device."""

    @abstractmethod
    def scratch(self, operator: str, arguments: Sequence[Any], out: Any) -> Scratch:
        """Return the temporary buffers that this operator's kernel allocates on the device."""

    def workspaces(self, operator: str, arguments: Sequence[Any] = ()) -> tuple[Buffer, ...]:
        """Return the workspaces that a thread allocates once, at its first use of this operator."""
        return ()

    def output_alloc_order(self, operator: str, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return the operator's new tensors in the order in which the device's kernel allocates them."""
        # Only CUDA has fused dropout, and the orders are those of CUDA's kernels.
        reorder = _OUTPUT_ORDER.get(operator) if self.fuses_dropout else None
        return reorder(outputs) if reorder else outputs


class ScratchSize(NamedTuple):
    """Properties of a GPU that determine the sizes of library workspaces and of its kernels' temporary
    buffers.
    """

    workspaces: int
    """Bytes of the workspaces that one host thread's libraries allocate."""
    threads: int
    """Number of threads that the whole GPU can have resident at a time."""


@dataclass(frozen=True, kw_only=True)
class CudaPolicy(Policy):
    """The policy of a CUDA GPU: the kernels, buffers and dtypes that torch chooses on it."""

    autocast = autocast_lists.CUDA
    fuses_dropout = True
    softmax_upcasts_fp16 = True
    fuses_rms_norm = True
    runs_cudnn = True

    capability: tuple[int, int] = (9, 0)
    """CUDA compute capability of the GPU (major, minor)."""

    multiprocessors: int = 132
    """Number of the GPU's multiprocessors, on which the size of reduction buffers depends."""

    threads_per_multiprocessor: int = 2048
    """Number of threads that one multiprocessor can have resident at a time."""

    cache_bytes: int = field(default=60 * MIB, compare=False)
    """Bytes of the second-level cache. GPUs that differ only in it share a simulation."""

    peers: tuple[CudaPolicy, ...] = ()
    """Policies of other GPUs that share the simulation.

    A decision that differs between them ends the simulation with `PoliciesDiffer`. See `sharing_key`.
    """

    def choose_attention(self, operands: attention_choice.Operands) -> str:
        """Return the name of the attention kernel that `sdp_utils.cpp` chooses for this GPU's compute
        capability.
        """
        return self.common_choice(
            lambda policy: attention_choice.choose_on_cuda(operands, policy._attention_kernels)
        )

    def common_choice(self, fact: Callable[[CudaPolicy], _Choice]) -> _Choice:
        """Return the value of the function `fact` for this policy, such as the chosen attention kernel. Raise
        `PoliciesDiffer` if a GPU that shares the simulation has another value.
        """
        facts = {fact(policy) for policy in (self, *self.peers)}
        if len(facts) > 1:
            raise PoliciesDiffer(
                f"GPUs that are simulated together run different kernels: {sorted(map(str, facts))}."
            )
        return facts.pop()

    @property
    def attention_order(self) -> Sequence[str]:
        """Names of torch's attention kernels in the order in which `sdp_utils.cpp` tries them on this GPU."""
        return self._attention_kernels.order

    @property
    def _attention_kernels(self) -> attention_choice.FusedKernels:
        return attention_choice.kernels_on_cuda(self.capability)

    @property
    def decisions(self) -> Hashable:
        """Key that is equal for GPUs on which torch chooses the same kernels for all operands.

        The sizes of their workspaces and temporary buffers may differ.
        """
        return self._attention_kernels, self.capability[0] in _FUSING_GROUPS, self.sharing_key

    @property
    def sharing_key(self) -> Hashable:
        """Key that is equal for GPUs that may share one simulation (`peers`).

        Their kernels may differ only for heads wider than 128 and for grouped products.
        """
        return self.attention_order, self.uses_grouped_mm, self.softmax_saves_input

    @property
    def scratch_size(self) -> ScratchSize:
        """Properties of this GPU that determine the sizes of its kernels' temporary buffers."""
        workspaces = sum(nbytes for _, nbytes in self.workspaces("aten::addmm"))
        return ScratchSize(workspaces, self.resident_threads)

    @property
    def resident_threads(self) -> int:
        """Number of threads that the whole GPU can have resident at once."""
        return self.multiprocessors * self.threads_per_multiprocessor

    @property
    def uses_grouped_mm(self) -> bool:
        """True from Ampere on, as transformers decides in `_can_use_grouped_mm` (`integrations/moe.py`)."""
        return self.capability >= (8, 0)

    def fuses_groups(self, dtype: torch.dtype) -> bool:
        """Return True if a grouped matrix product (experts) is one kernel: for bfloat16 on sm_90 and sm_100.

        Otherwise the host reads the ends of the groups, and each group is a product of its own. Profiles of
        fp32 on an H200 show this. Other architectures are assumed to be equal; nothing was measured on them.
        """
        is_fused = str(dtype) == "torch.bfloat16"
        return self.common_choice(lambda policy: is_fused and policy.capability[0] in _FUSING_GROUPS)

    def scratch(self, operator: str, arguments: Sequence[Any], out: Any) -> Scratch:
        """Return the temporary buffers of this operator's kernel, such as those of reductions and attention:
        see `scratch.py`.
        """
        gpu = GpuSize(self.multiprocessors, self.threads_per_multiprocessor, self.capability)
        return cuda_scratch(operator, arguments, out, gpu)

    def workspaces(self, operator: str, arguments: Sequence[Any] = ()) -> tuple[Buffer, ...]:
        """Return the workspace of cuBLAS, and of cuBLASLt for products with a bias or in 8-bit floats.

        An added matrix is not a bias (`isInputCompliesAddmmCudaLt`, `native/cuda/Blas.cpp`). Without
        arguments, `addmm` counts as a product with a bias.
        """
        if operator not in _GEMMS:
            return ()
        # These are torch's defaults: 32 MiB from Hopper on, and before it `:4096:2:16:8` in KiB
        # (`CublasHandlePool.cpp`).
        cublas = Buffer("cuBLAS workspace", 33_554_432 if self.capability >= (9, 0) else 8_519_680)
        with_bias = operator == "aten::addmm" and not (arguments and _is_matrix(arguments[0]))
        if with_bias or operator == "aten::_scaled_mm":
            # The size is the default of `CUBLASLT_WORKSPACE_SIZE`.
            return (cublas, Buffer("cuBLASLt workspace", 1_048_576))
        return (cublas,)


@dataclass(frozen=True, kw_only=True)
class ComparedPolicy(CudaPolicy):
    """Policy of one GPU that also compares its kernels and temporary buffers with those of other GPUs.

    So one simulation serves all of them.
    """

    remembers_scratch = False

    compared: tuple[CudaPolicy, ...]
    """Policies of the other GPUs that may share the simulation (`sharing_key`)."""

    sizes: dict[CudaPolicy, dict[tuple[str, int], int] | None] = field(default_factory=dict, compare=False)
    """Bytes of each buffer on another GPU, by (name in a trace, bytes on this GPU).

    The value is None if the other GPU runs another kernel or has another number of buffers. It is None too if
    buffers of equal size here differ there.
    """

    @classmethod
    def of(cls, policy: CudaPolicy, policies: Sequence[CudaPolicy]) -> Self:
        """Return a copy of `policy` (one GPU's kernel choices) that compares its temporary buffers and
        kernels with those of `policies`.
        """
        same = {item.name: getattr(policy, item.name) for item in fields(policy)}
        noting = cls(**same, compared=tuple(policies))
        for other in policies:
            noting.sizes[other] = {}
            noting._note(other, "", policy.workspaces("aten::addmm"), other.workspaces("aten::addmm"))
        return noting

    def common_choice(self, fact: Callable[[CudaPolicy], _Choice]) -> _Choice:
        """Return the value of the function `fact` for this policy, such as the chosen attention kernel. Mark
        other GPUs with another value as different.
        """
        own = super().common_choice(fact)
        self.sizes.update({other: None for other in self.compared if fact(other) != own})
        return own

    def scratch(self, operator: str, arguments: Sequence[Any], out: Any) -> Scratch:
        """Return the temporary buffers of an operator's kernel on this GPU, and record those on the other
        GPUs.
        """
        scratch = super().scratch(operator, arguments, out)
        for other in self.compared:
            if self.sizes[other] is not None:
                self._note(other, f"{operator}: ", scratch, other.scratch(operator, arguments, out))
        return scratch

    @property
    def resident_threads(self) -> int:
        """Number of threads that the GPU can have resident at once. Other GPUs with another number are marked
        as different, since the caller allocates buffers of this size.
        """
        threads = super().resident_threads
        self.sizes.update({other: None for other in self.compared if other.resident_threads != threads})
        return threads

    def _note(self, other: CudaPolicy, prefix: str, own: Scratch, scratch: Scratch) -> None:
        sizes = self.sizes[other]
        if sizes is None or own == scratch == ():
            return
        # Buffers are paired by position. If their numbers differ, the GPUs count as different.
        pairs = [
            (prefix + buffer.name, buffer.nbytes, two.nbytes)
            for buffer, two in zip(own, scratch, strict=False)
        ]
        same_buffers = [(buffer.name, buffer.nbytes > 0) for buffer in own] == [
            (two.name, two.nbytes > 0) for two in scratch
        ]
        for name, nbytes, size in pairs:
            same_buffers = same_buffers and (nbytes <= 0 or sizes.setdefault((name, nbytes), size) == size)
        if not same_buffers:
            self.sizes[other] = None


@dataclass(frozen=True, kw_only=True)
class CpuPolicy(Policy):
    """The policy of the CPU: torch's choices on it, which mostly equal those of `meta`.

    Dropout is composed of a random mask and products. Buffers of the CPU's kernels are not modelled.
    """

    autocast = autocast_lists.CPU
    fuses_dropout = False
    softmax_upcasts_fp16 = False
    fuses_rms_norm = False
    runs_cudnn = False

    def choose_attention(self, operands: attention_choice.Operands) -> str:
        """Return flash attention for the CPU if it supports the operands, otherwise math."""
        return attention_choice.choose_on_cpu(operands)

    @property
    def uses_grouped_mm(self) -> bool:
        """True for torch 2.11 and later, which have `grouped_mm` on the CPU."""
        return True

    def fuses_groups(self, dtype: torch.dtype) -> bool:
        """Return True: on the CPU the product of experts' groups counts as one kernel."""
        return True

    def scratch(self, operator: str, arguments: Sequence[Any], out: Any) -> Scratch:
        """Return the temporary buffers of operators that torch composes from others."""
        return composed_scratch(operator, arguments, out)


_FUSING_GROUPS = (9, 10)
"""Major compute capabilities on which a grouped matrix product is one kernel."""

_GEMMS = MATRIX_PRODUCTS | {"aten::addmv", "aten::mv"}
"""Operators that run in cuBLAS."""


def _is_matrix(added: torch.Tensor) -> bool:
    """Return True if the first operand of `addmm` is a matrix with several rows, and not a bias."""
    return any(length > 1 for length in added.shape[:-1])


def _mask_first(outputs: Sequence[Any]) -> Sequence[Any]:
    return (outputs[1], outputs[0])


def _without_philox(outputs: Sequence[Any]) -> Sequence[Any]:
    """Return attention's outputs without seed and offset, which efficient attention stores on the host in
    eager mode.
    """
    return outputs[:2]


def _philox_first(outputs: Sequence[Any]) -> Sequence[Any]:
    """Return cuDNN attention's outputs in the order of allocation on an H200: seed and offset, then output
    and log-sum-exp.
    """
    return (outputs[6], outputs[7], outputs[0], outputs[1])


def _first_alone(outputs: Sequence[Any]) -> Sequence[Any]:
    """Return only the first of log-sigmoid's outputs, since CUDA's kernel allocates no second one."""
    return outputs[:1]


_OUTPUT_ORDER: dict[str, Callable[[Sequence[Any]], Sequence[Any]]] = {
    "aten::native_dropout": _mask_first,
    "aten::_scaled_dot_product_efficient_attention": _without_philox,
    "aten::_scaled_dot_product_cudnn_attention": _philox_first,
    "aten::log_sigmoid_forward": _first_alone,
}
