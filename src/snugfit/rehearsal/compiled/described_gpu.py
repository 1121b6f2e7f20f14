"""A GPU as Inductor sees one, described to it where there is none.

Inductor chooses by the device: which loops fuse, how a reduction is cut, what becomes a kernel of a library.
It asks through torch's device interfaces, `torch.cuda` and Triton's driver. For the time of a lowering these
answer for the policy's GPU. Nothing is compiled for it, so Triton need only be importable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from snugfit.rehearsal.device.policy import CudaPolicy

REGISTERS = 65_536
"""Of a multiprocessor, on every GPU since Kepler (CUDA C++ Programming Guide, table of technical
specifications)."""

WARP = 32
"""Threads of a warp."""

TOOLKIT = "13.0"
"""The version of CUDA that is named; Inductor asks only whether there is one."""

SHARED = 49_152
"""Bytes of shared memory that a block may take without asking for more."""


@contextlib.contextmanager
def describe_gpu(policy: CudaPolicy) -> Iterator[None]:
    """Within it, Inductor lowers for this GPU."""
    import torch
    import triton
    from torch._dynamo import device_interface
    from torch._inductor import scheduler
    from torch._inductor.fx_passes import post_grad
    from torch._subclasses import fake_tensor

    interfaces = device_interface.device_interfaces
    device_interface.init_device_reg()
    answers = _interface(policy)
    with contextlib.ExitStack() as undo:
        undo.enter_context(patch.dict(interfaces, {"cuda": answers, "cuda:0": answers}))
        for name, value in (
            ("is_available", lambda: True),
            ("get_device_properties", answers.get_device_properties),
            ("get_device_capability", lambda device=None: policy.capability),
            ("device_count", lambda: 1),
            ("current_device", lambda: 0),
        ):
            undo.enter_context(patch.object(torch.cuda, name, value))
        undo.enter_context(patch.object(torch.version, "cuda", torch.version.cuda or TOOLKIT))
        undo.enter_context(patch.object(scheduler, "has_triton", lambda: True))
        # a build with CUDA would open a context on a GPU for tensors without data, or fail where none is
        undo.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        # the graph's tensors say they are the CPU's while its passes run
        undo.enter_context(patch.object(post_grad, "is_gpu", lambda device: True))
        undo.enter_context(patch.object(triton.runtime.driver, "_active", _Driver(policy)))
        yield


def _interface(policy: CudaPolicy) -> Any:
    from torch._dynamo.device_interface import CudaInterface

    properties = SimpleNamespace(
        name="GPU",
        type="cuda",
        index=0,
        major=policy.capability[0],
        minor=policy.capability[1],
        multi_processor_count=policy.multiprocessors,
        max_threads_per_multi_processor=policy.threads_per_multiprocessor,
        regs_per_multiprocessor=REGISTERS,
        warp_size=WARP,
        shared_memory_per_block=SHARED,
        gcnArchName="",
    )

    class Described(CudaInterface):
        """What torch's interface would say on a machine with this GPU."""

        Worker: Any = SimpleNamespace(  # what a process that compiles asks
            set_device=lambda device: None,
            current_device=lambda: 0,
            get_device_properties=lambda device=None: properties,
        )

        current_device = staticmethod(lambda: 0)
        set_device = staticmethod(lambda device: None)
        device_count = staticmethod(lambda: 1)
        synchronize = staticmethod(lambda device=None: None)
        get_device_properties: Any = staticmethod(lambda device=None: properties)
        get_raw_stream = staticmethod(lambda device: 0)
        is_available = staticmethod(lambda: True)
        is_bf16_supported = staticmethod(lambda including_emulation=False: policy.capability >= (8, 0))
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)
        get_compute_capability = staticmethod(
            lambda device=None: policy.capability[0] * 10 + policy.capability[1]
        )

    return Described


class _Driver:
    """Triton's driver, as far as code that is only generated asks it."""

    def __init__(self, policy: CudaPolicy) -> None:
        self._capability = policy.capability[0] * 10 + policy.capability[1]

    def get_current_target(self) -> Any:
        """The GPU that code is generated for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, WARP)

    def get_current_device(self) -> int:
        """The only one has this number."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """The default stream of CUDA."""
        return 0

    def get_active_torch_device(self) -> Any:
        """The only one, by torch's name."""
        import torch

        return torch.device("cuda", 0)
