"""Lowering (compilation to kernels) of a graph by Inductor, for a GPU that is not in this machine.

Dynamo and AOTAutograd trace and partition graphs on `meta` as on other devices. Later stages depend on the
device of the graph's tensors. Inductor's patterns ignore tensors on `meta`, and its fusion depends on the
real device. Each tensor of the graph is therefore labelled as the CPU's during graph passes, and as the
simulated device's during the lowering.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.hub_kernels import quiet
from snugfit.rehearsal.device.policy import CudaPolicy

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.device.policy import CudaPolicy, Policy


def lower(
    graph: Any, inputs: Sequence[Any], policy: Policy, report_strides: Callable[[Any], None], **options: Any
) -> str:
    """Return Inductor's Python program of this graph; `options` are those of `compile_fx_inner`."""
    import torch
    from torch._inductor import compile_fx, config
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.utils._python_dispatch import _disable_current_modes

    fx: Any = compile_fx
    on_gpu = isinstance(policy, CudaPolicy)
    target = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    with contextlib.ExitStack() as stack:
        # Lowering runs operators that are not part of the step, so the recorder is disabled.
        stack.enter_context(_disable_current_modes())
        # Nothing is compiled, so no processes and no benchmarks are needed.
        stack.enter_context(config.patch(compile_threads=1, max_autotune=False, fx_graph_cache=False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(quiet("torch._inductor.utils"))  # it warns of GPUs with few multiprocessors
        fx.view_to_reshape(graph)
        _describe_again(graph, inputs)
        # Graph passes read the device of tensors, and ignore patterns and constants on `meta`.
        fake = relabel(graph, torch.device("cpu"))
        _init_patterns()
        if isinstance(policy, CudaPolicy):
            stack.enter_context(describe_gpu(policy))
        stack.enter_context(V.set_fake_mode(fake))
        fx._recursive_record_original_output_strides(graph)
        fx._recursive_post_grad_passes(graph, is_inference=options.get("is_inference", False))
        # Fusion, reductions and library kernels depend on the real device.
        relabel(graph, target)
        values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        given = {
            "example_inputs": values,
            "shape_env": graph.shape_env if hasattr(graph, "shape_env") else None,
            **{name: options[name] for name in _PASSED_ON if name in options},
        }
        # The accepted arguments depend on torch's version.
        known = inspect.signature(GraphLowering).parameters
        # Padding of strides depends on the device, so it is decided for the target.
        stack.enter_context(fx.maybe_disable_comprehensive_padding(values))
        lowering = GraphLowering(graph, **{name: value for name, value in given.items() if name in known})
        lowering.freeze_runtime_asserts()
        stack.enter_context(V.set_graph_handler(lowering))
        stack.enter_context(V.set_debug_handler(DebugContext()))
        stack.enter_context(V.set_extern_kernel_nodes([]))
        lowering.run(*values)
        report_strides(lowering.graph_outputs)
        code = lowering.codegen()[0]
    # In some versions of torch, `code` is an object with the text in it.
    return str(getattr(code, "value", code))


def _describe_again(graph: Any, inputs: Sequence[Any]) -> None:
    """Recompute the metadata of the graph's tensors from its inputs, as Inductor does before the lowering.

    Inputs of a backward program have the strides of its forward program's outputs. Those of a convolution are
    channels last, although the graph was traced otherwise. Gradients of a fused attention that replaced an
    explicit one have its kernel's strides. Copies that only changed strides are then redundant.
    """
    import torch
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = relabel(graph, torch.device("meta"))
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    with mode:
        for node, input_ in zip(nodes, inputs, strict=True):
            value = node.meta.get("val")
            if not isinstance(input_, torch.Tensor) or not isinstance(value, torch.Tensor):
                continue
            # The compiled forward program may return other strides than the trace assumed.
            if value.stride() != input_.stride():
                node.meta["val"] = torch.empty_strided(
                    value.shape, input_.stride(), dtype=value.dtype, device="meta"
                ).requires_grad_(value.requires_grad)
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*(node.meta["val"] for node in nodes))


def computed_again(graph: Any) -> Counter[int]:
    """Count the matrix products that this backward graph recomputes from the forward pass, by their FLOPs."""
    import torch

    from snugfit.rehearsal.record.kernels import CONTRACTIONS, flops_of, group_of

    counts: Counter[int] = Counter()
    for node in graph.graph.nodes:
        # A forward node in a backward graph is a recomputed one.
        of_forward = node.meta.get("partitioner_tag") == "is_forward"
        if not of_forward or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if group_of(node.target._schema.name) == CONTRACTIONS:
            args, kwargs = torch.fx.node.map_arg(
                (node.args, node.kwargs), lambda node_argument: node_argument.meta["val"]
            )
            counts[flops_of(node.target, args, kwargs, node.meta["val"]) or 0] += 1
    return counts


_PASSED_ON = ("graph_id", "is_backward", "is_inference", "static_input_idxs", "get_decomp_fn")


def relabel(graph: Any, device: torch.device) -> Any:
    """Set the device of all tensors in this graph. Return the fake mode of its tensors."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    mode = None
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if value is not None:
            node.meta["val"] = torch.utils._pytree.tree_map(lambda leaf: _on(leaf, device), value)
            fakes = [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, FakeTensor)]
            # All tensors of a graph belong to one fake mode.
            mode = fakes[0].fake_mode if fakes else mode
        if node.op == "call_function":
            node.args = torch.fx.node.map_aggregate(node.args, lambda leaf: _device(leaf, device))
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, lambda leaf: _device(leaf, device))
    graph.recompile()
    return mode


def _device(value: Any, device: torch.device) -> Any:
    import torch

    return device if isinstance(value, torch.device) and value.type in ("meta", "cpu", "cuda") else value


def _on(value: Any, device: torch.device) -> Any:
    """Return a copy of a fake tensor whose attribute `device` is this device. It shares the storage, because
    graph passes compare storages.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(value, FakeTensor) or value.fake_device == device:
        return value
    # With the fake mode active, a new tensor would become another fake tensor.
    with torch._C._DisableTorchDispatch():
        shapes = torch.empty(0, dtype=value.dtype, device="meta")
        shapes.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        return FakeTensor(value.fake_mode, shapes.requires_grad_(value.requires_grad), device)


def _init_patterns() -> None:
    """Trace Inductor's patterns, while the current device is the CPU. Inductor traces them once."""
    from torch._inductor.fx_passes import post_grad

    post_grad.lazy_init()


REGISTERS = 65_536
"""Number of 32-bit registers of a multiprocessor, on every GPU since Kepler. The source is the CUDA C++
Programming Guide, table of technical specifications."""

WARP = 32
"""Number of threads in a warp of a GPU."""

TOOLKIT = "13.0"
"""CUDA version that the simulation reports to Inductor, which only checks that there is one."""

SHARED = 49_152
"""Bytes of shared memory that a thread block may use by default on a GPU."""


@contextlib.contextmanager
def describe_gpu(policy: CudaPolicy) -> Iterator[None]:
    """Context in which Inductor sees this GPU on a machine without it.

    Inductor chooses fusion, the split of reductions and library kernels by the device. It reads torch's
    device interfaces, `torch.cuda` and Triton's driver, which are patched during a lowering. Nothing is
    compiled, so it is enough that Triton can be imported.
    """
    import torch
    import triton
    from torch._dynamo import device_interface
    from torch._inductor import scheduler
    from torch._inductor.fx_passes import post_grad
    from torch._subclasses import fake_tensor

    interfaces = device_interface.device_interfaces
    # torch registers device interfaces once, and a later registration would replace the patch.
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
        # A build of torch with CUDA would open a context on a GPU, or fail without a GPU.
        undo.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        # The graph's tensors are labelled as the CPU's while graph passes run.
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
        """Replacement of torch's device interface, which describes a machine with this GPU."""

        Worker: Any = SimpleNamespace(  # read by processes that compile
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
    """A replacement for Triton's driver, with the methods that code generation uses."""

    def __init__(self, policy: CudaPolicy) -> None:
        self._capability = policy.capability[0] * 10 + policy.capability[1]

    def get_current_target(self) -> Any:
        """Return the GPU for which code is generated."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, WARP)

    def get_current_device(self) -> int:
        """Return 0, the index of the only device."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """Return the number of CUDA's default stream for generated code."""
        return 0

    def get_active_torch_device(self) -> Any:
        """Return torch's name of the only device, for generated code."""
        import torch

        return torch.device("cuda", 0)
