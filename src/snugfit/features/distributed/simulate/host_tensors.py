"""Simulate the host's memory for a step with weights and states on the host.

A simulation of a model with three billion weights must not need the 50 GB that its optimizer has on the host.
So tensors on the host use untouched pages, which the system does not allocate, and nothing is written to
them. An operator that would only write is skipped. An operator that returns a new tensor returns one of
untouched pages. Only sizes are counted: the bytes of tensors, and the bytes that the host would read and
write.

The recorder receives every operator first. It uses this class to find copies between host and device.
"""

from __future__ import annotations

import mmap
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from snugfit.step.host_link import MetaLink

if TYPE_CHECKING:
    from snugfit.rehearsal.record.recorder import Recorder

aten = torch.ops.aten

NOT_HANDED_OUT = 0x4000
"""Linux's flag `MAP_NORESERVE`, which the module `mmap` lacks. It maps host memory without reserving it."""

FACTORIES = frozenset(
    {
        aten.empty.memory_format,
        aten.zeros.default,
        aten.ones.default,
        aten.full.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_zeros.default,
        aten.zeros_like.default,
        aten.empty_like.default,
        aten.ones_like.default,
    }
)
"""Operators that create tensors without reading an operand."""

QUESTIONS = frozenset({aten.is_pinned.default})
"""Operators that read no data of their operands."""

OVERWRITING = frozenset({aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor})
"""Operators that overwrite an operand without reading it."""

LEAST = 1 << 10
"""Size in bytes from which a host tensor is mapped without physical memory. A smaller one may contain real
numbers.
"""


class HostTensors(TorchDispatchMode):
    """Dispatch mode that simulates tensors on the host and counts their bytes.

    The given function `convert(tensor, dtype)` casts a device tensor.
    """

    def __init__(self, convert: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._convert = convert
        self._storages: set[int] = set()
        self.nbytes = self.most = 0
        """Bytes of tensors in host memory, now and at the peak."""
        self.pinned = 0
        """Bytes of page-locked host memory."""
        self._lent: dict[int, int] = {}  # page-locked bytes in use, by the address of a storage
        self._unused: Counter[int] = Counter()  # number of free page-locked blocks, by their size in bytes

    @classmethod
    def beside(cls, recorder: Recorder) -> Self:
        """Return the host memory of a recorded run. A cast on the device is an operator of the step."""
        return cls(
            lambda tensor, dtype: recorder.__torch_dispatch__(
                aten._to_copy.default, (), (tensor,), {"dtype": dtype}
            )
        )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, since Dynamo compiles nothing under this mode, and the check costs time per
        operator.
        """
        return False

    # ---- copies between host and device ------------------------------------------------------------------

    def copy_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of an operator that copies to the host, or NotImplemented for any other.

        A copy without a wait converts dtypes on the device (`native/cuda/Copy.cu`).
        """
        if func is aten.copy_.default and self.holds(args[0]) and args[1].is_meta:
            to, source = args[:2]
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            if not waits and source.dtype is not to.dtype:
                source = self._convert(source, to.dtype)
            MetaLink.observer.stage_out(source.nbytes)
            return to
        if copies_out(func, args, kwargs):
            # The output's shape is computed without recording an operator.
            with _disable_current_modes():
                shaped = torch.empty_like(args[0], dtype=kwargs.get("dtype") or args[0].dtype)
            # A small tensor may contain numbers that later code reads.
            if shaped.nbytes < LEAST:
                return NotImplemented
            MetaLink.observer.stage_out(args[0].nbytes)
            return self.take(shaped)
        return NotImplemented

    def copies_back(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if an operator copies from the host to the device."""
        if func is aten.copy_.default:
            return args[0].is_meta and self.holds(args[1])
        if func is not aten._to_copy.default or not self.holds(args[0]):
            return False
        return kwargs.get("device") is not None and not _is_host(kwargs["device"])

    # ---- memory ------------------------------------------------------------------------------------------

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return a new host tensor of this shape and dtype in untouched memory, and count its bytes."""
        nbytes = like.untyped_storage().nbytes()
        # The system refuses a map without any bytes.
        memory = mmap.mmap(
            -1, max(nbytes, like.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NOT_HANDED_OUT
        )
        with _disable_current_modes():
            tensor = torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())
        key = tensor.untyped_storage()._cdata
        self._storages.add(key)
        self._grow(nbytes)
        weakref.finalize(memory, self._give_back, key, nbytes)
        return tensor

    def pin(self, tensor: torch.Tensor) -> None:
        """Count the tensor's bytes as page-locked for the rest of the run.

        torch rounds the bytes up to a power of two, and never releases them (`CachingHostAllocator`).
        """
        nbytes = tensor.untyped_storage().nbytes()
        taken = 1 << max(0, nbytes - 1).bit_length()
        self.pinned += taken
        self._grow(taken - nbytes)

    def lend(self, tensor: torch.Tensor) -> None:
        """Count the tensor's bytes as page-locked while it is alive; a later tensor of this size reuses
        them."""
        storage = tensor.untyped_storage()
        taken = 1 << max(0, storage.nbytes() - 1).bit_length()
        self._lent[storage._cdata] = taken
        if self._unused[taken]:
            # The bytes of the reused block are counted already.
            self._unused[taken] -= 1
            self.nbytes -= storage.nbytes()
        else:
            self.pinned += taken
            self._grow(taken - storage.nbytes())

    def lock(self, tensor: torch.Tensor) -> None:
        """Count exactly the tensor's bytes as page-locked (`posix_memalign` and `mlock`)."""
        self.pinned += tensor.untyped_storage().nbytes()

    def _grow(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.most = max(self.most, self.nbytes)

    def _give_back(self, key: int, nbytes: int) -> None:
        self._storages.discard(key)
        if taken := self._lent.pop(key, 0):
            # torch keeps freed page-locked blocks, so their bytes stay counted.
            self._unused[taken] += 1
        else:
            self.nbytes -= nbytes

    def holds(self, value: Any) -> bool:
        """Return True if the value is a tensor in simulated host memory."""
        return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self._storages

    def _any_held(self, args: tuple[Any, ...]) -> bool:
        """Return True if an operand, or an element of a list operand, is a tensor in simulated host
        memory.
        """
        return any(
            any(map(self.holds, one)) if isinstance(one, (tuple, list)) else self.holds(one) for one in args
        )

    # ---- operators ---------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # torch only computes shapes here, and the operators do not run.
        if asks_for_shapes():
            return func(*args, **kwargs)
        if func in FACTORIES:
            return self._make(func, args, kwargs)
        if func.is_view or not self._any_held(args):
            return func(*args, **kwargs)
        if self.copies_back(func, args, kwargs):
            # The device's tensor has no data, so nothing is copied.
            return args[0] if func is aten.copy_.default else func(*_on_meta(args), **kwargs)
        return self._skip(func, args, kwargs)

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the tensor that a factory operator creates. A large host tensor is in untouched memory."""
        operand = next((one for one in args if isinstance(one, torch.Tensor)), None)
        device = kwargs.get("device") or (operand.device if operand is not None else "cpu")
        if not _is_host(device):
            return func(*args, **kwargs)
        with _disable_current_modes():
            shaped = func(*_on_meta(args), **{**_on_meta(kwargs), "device": "meta", "pin_memory": False})
        return func(*args, **kwargs) if shaped.nbytes < LEAST else self.take(shaped)

    def _skip(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a host operator without its work, and record the bytes that it would read and
        write.

        An operator that modifies its operand reads and writes it.
        """
        if func in QUESTIONS:
            return func(*args, **kwargs)
        MetaLink.observer.work_on_host(_nbytes((args, kwargs)))
        if func._schema.is_mutable:
            # The sum above counts one pass over the operand. Modifying it takes a read and a write.
            if func not in OVERWRITING and isinstance(args[0], torch.Tensor):
                MetaLink.observer.work_on_host(args[0].nbytes)
            return args[0] if func._schema.returns else None
        # With `meta` tensors, a device in the arguments would be the host again.
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        with _disable_current_modes():
            out = func(*_on_meta(args), **_on_meta(kwargs))
        MetaLink.observer.work_on_host(_nbytes(out))
        return tree_map(lambda one: self.take(one) if isinstance(one, torch.Tensor) else one, out)


def asks_for_shapes() -> bool:
    """Return True if the current operator runs on torch's fake tensors, only to compute shapes.

    DTensor does so. torch 2.11 passes no device to such operators, which would otherwise mean the host.
    """
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def copies_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an operator returns a copy on the host of a device tensor."""
    return func is aten._to_copy.default and args[0].is_meta and _is_host(kwargs.get("device"))


def _is_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _on_meta(value: Any) -> Any:
    return tree_map(lambda one: one.to("meta") if isinstance(one, torch.Tensor) else one, value)


def _nbytes(value: Any) -> int:
    """Return the total bytes of the tensors in a value (a tensor, or a list or tuple of them)."""
    return sum(one.nbytes for one in tree_leaves(value) if isinstance(one, torch.Tensor))
