"""Run plain PyTorch code in place of compiled code and libraries' kernels, and warn.

Neither code from `torch.compile` nor libraries' kernels for a transformers model run on `meta`.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.rehearsal.device.attention import run_flex

if TYPE_CHECKING:
    from torch import nn

COMPILED = (
    "The model's code uses torch.compile. The prediction is for the uncompiled code. Compiled kernels "
    "need other memory, mostly less, and other times. To get both, measure the step: snugfit measure."
)

FLEX = (
    "flex_attention was predicted by the tensors that its compiled kernel takes, and with the seconds of "
    "flash attention over all positions. The kernel skips masked blocks. Uncompiled, it would store every "
    "score."
)

_FLEX = "torch.nn.attention.flex_attention"
"""Module of `flex_attention` and its block masks. transformers compiles these functions."""

_FALLBACK_MESSAGE = re.compile(
    r"`\w+` is falling back to its reference PyTorch implementation because `([^`]+)`"
)
"""Log message that transformers writes when it uses its own code instead of a hub kernel
(`use_kernel_func_from_hub_with_fallback`).
"""

_PACKAGE_CHECKS = {
    "is_ninja_available": "kernels",
    "is_mambapy_available": "mambapy",
    "is_xlstm_available": "xlstm",
}
"""Functions that a model's file calls to check if a package of kernels is installed, each with the package's
name.
"""


def replaced_by_eager(doubt: Callable[[str], None]) -> dict[Any, Any]:
    """Return a replacement for `torch.compile` that compiles nothing.

    A function that would be compiled adds a warning when it is called. Libraries compile functions at import
    that no step calls.
    """
    import torch

    # The compiler would trace the simulation's own overrides, which takes seconds. Its kernels also need a
    # GPU.
    def compile(model: Any = None, **keywords: Any) -> Any:
        if model is None:
            return compile
        if isinstance(model, torch.nn.Module):
            doubt(COMPILED)
            return model

        # transformers compiles flex_attention itself, and `_flex_attention` replaces that function below.
        if getattr(model, "__module__", "") == _FLEX:
            return _without_whole_mask(model) if model.__name__ == "create_block_mask" else model

        @functools.wraps(model)
        def run_eagerly(*arguments: Any, **keywords: Any) -> Any:
            doubt(COMPILED)
            return model(*arguments, **keywords)

        return run_eagerly

    return {torch.compile: compile}


@contextlib.contextmanager
def simulated_programs(doubt: Callable[[str], None]) -> Iterator[None]:
    """Context in which compiled code runs uncompiled and transformers' functions run their own PyTorch code,
    each with a warning."""
    from torch.nn.attention import flex_attention as flex  # or the first forward pass imports the original
    from transformers.integrations import hub_kernels
    from transformers.integrations.flex_attention import WrappedFlexAttention

    with contextlib.ExitStack() as undo:
        if (eval_frame := sys.modules.get("torch._dynamo.eval_frame")) is not None:
            import torch

            # Functions that were compiled before the simulation run uncompiled too.
            undo.enter_context(torch.compiler.set_stance("force_eager"))
            undo.enter_context(patch.object(eval_frame, "_callback_from_stance", _no_callback(doubt)))
        # `flex_attention` checks that its operands' device has a compiler.
        undo.enter_context(patch.object(flex, "_validate_device", lambda query, key, value: None))
        undo.enter_context(patch.object(flex, "flex_attention_hop", _flex_attention(doubt)))
        undo.enter_context(patch.object(WrappedFlexAttention, "_instance", None))  # caches a compiled one
        logger: Any = hub_kernels.logger
        warn = logger.warning_once

        # transformers logs this message when it replaces scans and convolutions by kernels of mamba-ssm and
        # others.
        def warn_of_fallback(message: str, *arguments: Any) -> None:
            if names := _FALLBACK_MESSAGE.match(message):
                doubt(without_package(names[1], installed=False))
            warn(message, *arguments)

        undo.enter_context(patch.object(logger, "warning_once", warn_of_fallback))
        # While Dynamo exports, transformers runs its own code: the packages' kernels do not support `meta`.
        if hasattr(hub_kernels, "is_torchdynamo_exporting"):

            def not_the_packages() -> bool:
                # Only a local variable of the caller has the package's name.
                package = str(sys._getframe(1).f_locals.get("package", "a package of kernels"))
                doubt(without_package(package, installed=True))
                return True

            undo.enter_context(patch.object(hub_kernels, "is_torchdynamo_exporting", not_the_packages))
        yield


def is_compiled(module: nn.Module) -> bool:
    """Return True if `compile()` was called on this module or a submodule. A copy of the module does not keep
    this mark."""
    return any(part._compiled_call_impl is not None for part in module.modules())


def missing_kernel_packages(model: nn.Module) -> Iterator[str]:
    """Yield a warning for each package of faster kernels that this model's source files look for."""
    from importlib.util import find_spec

    # Some models (RWKV, YOSO, MRA, xLSTM) load kernels of their own. Their checks for packages show this.
    files = {type(module).__module__ for module in model.modules()}
    names = {name for file in files for name in vars(sys.modules.get(file, object))}
    for function in sorted(_PACKAGE_CHECKS.keys() & names):
        package = _PACKAGE_CHECKS[function]
        yield without_package(package, installed=find_spec(package) is not None)


def without_package(package: str, *, installed: bool) -> str:
    """Return the warning that the model has kernels of this package, `installed` or not, and the simulation
    runs PyTorch code."""
    state = "is installed here, but does not run without data" if installed else "is not installed here"
    return (
        f"The model has faster kernels in {package}, which {state}. The prediction is for the PyTorch "
        "code. With the faster kernels a GPU needs other memory, mostly less, and other times. To get "
        "both, measure the step: snugfit measure."
    )


def _flex_attention(doubt: Callable[[str], None]) -> Callable[..., Any]:
    """Return a replacement for `flex_attention`, which returns output, log-sum-exp and largest score of each
    row."""

    def run_fused(query: Any, key: Any, value: Any, *others: Any, **keywords: Any) -> tuple[Any, ...]:
        doubt(FLEX)
        return run_flex(query, key, value)

    return run_fused


def _without_whole_mask(create_block_mask: Any) -> Callable[..., Any]:
    """Return a replacement for `create_block_mask` that creates the blocks without the whole mask."""
    import torch
    from torch.nn.attention import flex_attention as flex

    def create_mask(
        function: Any, batch: int | None, heads: int | None, rows: int, columns: int, device: Any, *_: Any
    ) -> Any:
        # A compiled function creates the blocks without the whole mask, so one element with the mask's shape
        # represents it.
        scalar = torch.empty(1, dtype=torch.bool, device=device)
        return scalar.expand(batch or 1, heads or 1, rows, columns)

    def convert(mask: Any, Q_BLOCK_SIZE: int = 128, KV_BLOCK_SIZE: int = 128, *_: Any, **__: Any) -> Any:
        blocks = -(-mask.size(2) // Q_BLOCK_SIZE), -(-mask.size(3) // KV_BLOCK_SIZE)
        return tuple(mask.new_empty((*mask.shape[:2], *blocks), dtype=torch.int8) for _ in range(2))

    def run_eagerly(*arguments: Any, **keywords: Any) -> Any:
        with (
            patch.object(flex, "create_mask", create_mask),
            patch.object(flex, "_convert_mask_to_block_mask", convert),
        ):
            return create_block_mask(*arguments, **keywords)

    return run_eagerly


def _no_callback(doubt: Callable[[str], None]) -> Callable[[Any], None]:
    """Return a replacement for Dynamo's lookup of a compiled function's callback; it finds no callback."""

    def callback_from_stance(callback: Any) -> None:
        if callback not in (None, False):
            doubt(COMPILED)

    return callback_from_stance
