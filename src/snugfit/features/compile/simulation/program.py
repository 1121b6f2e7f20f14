"""Execution of Inductor's Python program on `meta`: it allocates and frees the same buffers as on a GPU.

Only the function with the program is executed, not the rest of the generated text. Its kernels are replaced
by functions that record their launches. All else (allocations, views, torch's products and attention) runs on
`meta` and is recorded.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.rehearsal.trace.trace import POINTWISE, REDUCTION, WITH_FUNCTIONS, WITH_RANDOM

if TYPE_CHECKING:
    import torch

Run = Callable[[list[Any]], Any]
"""The type of a compiled program: a function of a list of inputs, which it empties."""

Launch = Callable[[str, Sequence[Any], Sequence[Any], str], None]
"""The type of a function that records a kernel. Its arguments are the kernel's name, the tensors that it
reads, those that it writes, and its layout."""

Choose = Callable[[str, Sequence[Any]], None]
"""The type of a function that is called before each launch of a kernel with several configurations. Its
arguments are the kernel's source and the tensors that it changes. The first launch of a process benchmarks
the configurations."""

_SIGNATURE = re.compile(r"'signature': \{(.*?)\}")
_PARAMETER = re.compile(r"'(\w+)': '(\*?)")

_LAYOUTS = (
    (re.compile(r"\btl\.rand(n|int64)?\("), WITH_RANDOM),
    (re.compile(r"\blibdevice\.(erf|tanh)\("), WITH_FUNCTIONS),
    (re.compile(r"@triton_heuristics\.\w*reduction\("), REDUCTION),
    (re.compile(r"@triton_heuristics\.pointwise\("), POINTWISE),
)
"""Patterns in a kernel's source, each with the layout (memory access pattern) that it indicates. The first
match decides."""


_ATTENTION = re.compile(r"_scaled_dot_product_(flash_attention_for_cpu|cudnn|flash|efficient)")
_CHOICES = {"flash_attention_for_cpu": "flash_for_cpu"}


def attention_in(text: str) -> tuple[str, ...]:
    """Return the attention kernels in a compiled program, by their names in a trace."""
    names = dict.fromkeys(_ATTENTION.findall(text))
    return tuple(_CHOICES.get(name, name) for name in names)


def as_boxed(run: Run) -> Run:
    """Mark a function as one that empties its list of inputs (`_boxed_call`), as AOTAutograd expects, and
    return it.
    """
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def load(text: str, launch: Launch, choose: Choose) -> Run:
    """Return a function that runs this compiled program on a list of inputs, which it empties."""
    tree = ast.parse(text)
    names = _namespace()
    program: list[ast.stmt] = []
    for statement in tree.body:
        # In generated code, a kernel is a top-level assignment of its source as a string.
        if isinstance(statement, ast.Assign) and (kernel := _kernel_of(statement)) is not None:
            name, source = kernel
            names[name] = _GeneratedKernel(name, source, launch, choose)
        # Helper classes and functions for benchmarks are left out, because they need a GPU.
        elif (
            isinstance(statement, (ast.ClassDef, ast.FunctionDef))
            and statement.name not in _SKIPPED_FUNCTIONS
        ):
            program.append(statement)  # the program is the remaining function or class
    exec(compile(ast.Module(body=program, type_ignores=[]), "<compiled layer>", "exec"), names)
    run: Run = names["Runner"](partitions=[]).call if "Runner" in names else names["call"]
    return run


_SKIPPED_FUNCTIONS = ("get_args", "benchmark_compiled_module")


def _kernel_of(statement: ast.Assign) -> tuple[str, str] | None:
    """Return name and source of the compiled kernel in a program's statement, or None for
    another statement.
    """
    call, target = statement.value, statement.targets[0]
    if not (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and isinstance(target, ast.Name)
    ):
        return None
    if not (isinstance(call.func.value, ast.Name) and call.func.value.id == "async_compile"):
        return None
    # The first argument is a CPU kernel's list of types, or a Triton kernel's name.
    if call.func.attr == "cpp_pybinding":
        return target.id, str(ast.literal_eval(call.args[0]))
    return target.id, str(ast.literal_eval(call.args[1]))


class _GeneratedKernel:
    """A replacement for a generated kernel that records launches instead of running."""

    def __init__(self, name: str, source: str, launch: Launch, choose: Choose) -> None:
        self.name, self._source, self._launch, self._choose = name, source, launch, choose
        self._has_settings = not source.startswith("[") and settings_of(source) > 1
        self._layout = next((layout for pattern, layout in _LAYOUTS if pattern.search(source)), "")
        # The source of a CPU kernel is its list of types, where `const` marks tensors that are only read.
        if source.startswith("["):
            types = ast.literal_eval(source)
            self._roles = ["in" if type_name.startswith("const") else "in_out" for type_name in types]
        else:
            signature = _SIGNATURE.search(source)
            assert signature is not None, source
            self._roles = [name for name, _ in _PARAMETER.findall(signature[1])]

    def run(self, *arguments: Any, stream: Any = None, **_: Any) -> None:
        """Record a launch of the kernel, without running it."""
        import torch

        reads, writes, changes = [], [], []
        # The tensors come first; the two sequences may differ in length after them.
        for role, argument in zip(self._roles, arguments, strict=False):
            if not isinstance(argument, torch.Tensor):
                continue
            if role.startswith("in"):
                reads.append(argument)
            if not role.startswith("in_ptr") and role != "in":
                writes.append(argument)
            if role.startswith("in_out"):
                changes.append(argument)
        # A kernel with a single configuration is launched without a benchmark.
        if self._has_settings:
            self._choose(self._source, changes)
        self._launch(self.name, reads, writes, self._layout)

    __call__ = run


def settings_of(source: str) -> int:
    """Return the number of configurations (sizes of blocks, numbers of warps) for this Triton kernel.

    Inductor benchmarks them at its first launch.
    """
    from torch._inductor.runtime import triton_heuristics

    tree = ast.parse(source)
    names: dict[str, Any] = {"__file__": "kernel.py"}
    imports: list[ast.stmt] = [
        statement for statement in tree.body if isinstance(statement, (ast.Import, ast.ImportFrom))
    ]
    # Only the imports and the decorator run. They create the configurations, without compiling.
    exec(compile(ast.Module(body=imports, type_ignores=[]), "<kernel>", "exec"), names)
    kernel = next(statement for statement in tree.body if isinstance(statement, ast.FunctionDef))
    counts = [1]

    def note(hints: Any, configs: Any, *arguments: Any, **keywords: Any) -> Any:
        counts.append(len(triton_heuristics.unique_configs(configs)))
        return lambda function: function

    with patch.object(triton_heuristics, "cached_autotune", note):
        eval(compile(ast.Expression(kernel.decorator_list[0]), "<kernel>", "eval"), names)
    return counts[-1]


_CHECKS = ("assert_size_stride", "assert_size_stride_grouped", "assert_tensor_metadata", "assert_alignment")
"""Names of a program's checks of its inputs and of operators' outputs. The second and third exist since torch
2.14."""


def _namespace() -> dict[str, Any]:
    """Return the globals for a compiled program's code, so that it runs on tensors on `meta`."""
    import math
    import random

    import torch

    meta = torch.device("meta")

    def empty(size: Any, stride: Any, dtype: Any) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=meta)

    guards: Any = torch._C._dynamo.guards
    return {
        "torch": _Torch(),
        "math": math,
        "random": random,
        "inf": math.inf,
        "nan": math.nan,
        "device": lambda *arguments, **keywords: meta,
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "prims": torch.ops.prims,
        "extern_kernels": _Library(),
        "empty_strided_cpu": empty,
        "empty_strided_cuda": empty,
        # The real function also works on `meta` tensors, and keeps their storage.
        "reinterpret_tensor": guards._reinterpret_tensor,
        **dict.fromkeys(_CHECKS, lambda *arguments: None),
        "get_raw_stream": lambda index: 0,
        "run_intermediate_hooks": lambda *arguments: None,
    }


class _Library:
    """Replacement for Inductor's `extern_kernels` (library kernels): torch's operators of the same names."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name, None) or getattr(torch.ops.aten, name)


class _Torch:
    """Replacement for the module `torch` in compiled code, which behaves as on a machine with the GPU."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return {"cuda": _Cuda(), "ops": _Operators()}.get(name) or getattr(torch, name)


class _Operators:
    """Replacement for torch's operators in a compiled program, including those that save the random state for
    a recomputation.
    """

    def __getattr__(self, name: str) -> Any:
        import torch

        return _WithRandomState if name == "higher_order" else getattr(torch.ops, name)


class _WithRandomState:
    """Replacement for operators that save the random state: the state is on the host, for any device."""

    @staticmethod
    def run_and_save_rng_state(operator: Any, *arguments: Any, **keywords: Any) -> Any:
        """Return the random state and the operator's output."""
        import torch

        # The random state is that of the host, because no GPU is needed.
        return torch.get_rng_state(), operator(*arguments, **keywords)

    @staticmethod
    def run_with_rng_state(state: Any, operator: Any, *arguments: Any, **keywords: Any) -> Any:
        """Return the operator's output, recomputed from a saved random state."""
        return operator(*arguments, **keywords)


class _Cuda:
    """Replacement for the functions of `torch.cuda` that a program uses."""

    @staticmethod
    def set_device(index: int) -> None:
        """Do nothing: the only simulated device is current already."""

    class _DeviceGuard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None: ...

        def __exit__(self, *error: Any) -> None: ...
