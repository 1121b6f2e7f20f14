"""A policy put in force: for the time of a rehearsal, `meta` tensors behave as the policy's device would.

Two kinds of override, both taken back when the rehearsal ends:

1. At torch's dispatcher, kernels for the key AutogradMeta only, through the public `torch.library`: composite
   operators whose C++ body asks the device (dropout, attention, softmax, rms_norm), and autocast. CPU and
   CUDA tensors never pass these kernels, so other work of the process is unharmed.
2. In Python, functions that answer by a device's name. They are imported by name all over torch and
   transformers, also long before a rehearsal, so every loaded module's binding is replaced, and every
   binding is put back, those of modules imported meanwhile too.

An override that no longer takes hold, because a torch release moved something, would make every figure
quietly wrong. So after installing, `_probe` runs one small example of each and compares what came out.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.errors import RehearsalError
from snugfit.rehearsal import attention

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.policy import Policy

KEY = "AutogradMeta"
SWITCH = "cpu"
"""A rehearsal's autocast runs on the CPU's switch: it exists in every build, nests, and checkpointing saves
and restores it for the recomputation."""


class WeightCache:
    """Autocast's cache of cast weights: cast once per autocast region, dropped when the region ends.

    Which tensors are cached: `cached_cast` of `aten/src/ATen/autocast_mode.cpp`.
    """

    def __init__(self, on_cached: Callable[[torch.Tensor], None]) -> None:
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.on_cached = on_cached

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in `dtype`, from the cache where torch would take it from there."""
        import torch

        if not (
            tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        ):
            return tensor.to(dtype)
        found = self.held.get(id(tensor))
        if found is None:
            found = self.held[id(tensor)] = (tensor, tensor.to(dtype))
            self.on_cached(found[1])
        return found[1]


@contextlib.contextmanager
def in_force(
    policy: Policy, on_cached: Callable[[torch.Tensor], None] = lambda tensor: None
) -> Iterator[list[str]]:
    """Within it, meta tensors behave as the policy's device. Yields a list that collects the attention
    kernels that were chosen; `on_cached` is told each copy that autocast caches. Raises `RehearsalError`
    when an override does not take hold."""
    import torch

    if _ACTIVE:
        raise RehearsalError("A rehearsal is running already in this process; they do not nest.")
    chosen: list[str] = []
    cache = WeightCache(on_cached)
    with contextlib.ExitStack() as undo:
        undo.callback(_ACTIVE.clear)
        _ACTIVE.append(True)
        library = torch.library.Library("aten", "IMPL")
        undo.callback(library._destroy)
        with _quiet():
            composites = _composites(policy, chosen)
            for name, kernel in composites.items():
                library.impl(name, kernel, KEY)
            _register_autocast(library, policy, composites, cache)
        undo.enter_context(_bindings(cache))
        _probe(policy)
        chosen.clear()
        yield chosen


_ACTIVE: list[bool] = []


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel.*")
        yield


# ---- composites whose C++ body asks the device -------------------------------------------------------


def _composites(policy: Policy, chosen: list[str]) -> dict[str, Callable[..., Any]]:
    import torch

    aten = torch.ops.aten

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        grad = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        grouped = enable_gqa and query.size(-3) != key.size(-3)
        choice = policy.choose_attention(query, key, value, attn_mask, dropout_p, grouped, grad)
        chosen.append(choice)
        return attention.run_chosen(
            choice, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, grad
        )

    def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if train and 0 < p < 1 and input.numel():
            out: torch.Tensor = torch.native_dropout(input, p, train)[0]
            return out
        return input if p == 0 or not train or not input.numel() else input.mul(torch.zeros_like(input[:1]))

    def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if policy.softmax_saves_input and x.requires_grad and torch.is_grad_enabled():
            x = _kept_for_backward(x)
        if policy.softmax_widens and x.dtype == torch.float16 and dtype == torch.float32:
            return aten._softmax(x, dim, True)  # type: ignore[no-any-return]
        return aten._softmax(x if dtype is None else x.to(dtype), dim, False)  # type: ignore[no-any-return]

    def log_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if policy.softmax_widens and x.dtype == torch.float16 and dtype == torch.float32:
            return aten._log_softmax(x, dim, True)  # type: ignore[no-any-return]
        return aten._log_softmax(x if dtype is None else x.to(dtype), dim, False)  # type: ignore[no-any-return]

    def rms_norm(
        x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
    ) -> torch.Tensor:
        out: torch.Tensor = aten._fused_rms_norm(x, shape, weight, eps)[0]
        return out

    table: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": scaled_dot_product_attention,
        "softmax.int": softmax,
        "log_softmax.int": log_softmax,
    }
    if policy.fuses_dropout:
        table["dropout"] = dropout
    if policy.fuses_rms_norm:
        table["rms_norm"] = rms_norm
    return table


def _kept_for_backward(x: torch.Tensor) -> torch.Tensor:
    """`x`, which stays alive until the backward pass has passed here."""
    import torch

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(value)
            return value.view_as(value)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    kept: torch.Tensor = Keeps.apply(x)  # type: ignore[no-untyped-call]
    return kept


# ---- autocast -------------------------------------------------------------------------------------------


def _register_autocast(
    library: torch.library.Library,
    policy: Policy,
    composites: dict[str, Callable[..., Any]],
    cache: WeightCache,
) -> None:
    """For each operator of the policy's lists: cast, then call the kernel that was there."""
    import torch

    lists = policy.autocast
    castings: tuple[tuple[Sequence[str], Callable[[Any], Callable[..., Any]]], ...] = (
        (lists.lower, functools.partial(_casting, functools.partial(_to_lower, cache))),
        (lists.fp32, functools.partial(_casting, _to_fp32)),
        (lists.fp32_result, _with_fp32_result),
        (lists.promote, _promoting),
    )
    for names, wrap in castings:
        for name in names:
            before = composites.get(name)
            if before is not None:
                previous = _without_keyset(before)
            else:
                try:
                    previous = torch.library.get_kernel(f"aten::{name}", KEY).call_boxed
                except RuntimeError:
                    continue  # an operator that this torch does not have
            library.impl(name, wrap(previous), KEY, with_keyset=True, allow_override=True)


def _without_keyset(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return lambda keyset, *arguments, **keywords: kernel(*arguments, **keywords)


def _on() -> bool:
    import torch

    return torch.is_autocast_enabled(SWITCH)


@contextlib.contextmanager
def _switched_off() -> Iterator[None]:
    import torch

    torch.set_autocast_enabled(SWITCH, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(SWITCH, True)


def _floats(value: Any) -> bool:
    """Whether autocast may cast this argument (`is_autocast_eligible`)."""
    import torch

    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "meta"
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _to_lower(cache: WeightCache, value: Any) -> Any:
    import torch

    dtype = torch.get_autocast_dtype(SWITCH)
    return cache.cast(value, dtype) if _floats(value) and value.dtype != dtype else value


def _to_fp32(value: Any) -> Any:
    import torch

    return value.to(torch.float32) if _floats(value) and value.dtype != torch.float32 else value


def _each(cast: Callable[[Any], Any], value: Any) -> Any:
    return type(value)(cast(item) for item in value) if isinstance(value, (list, tuple)) else cast(value)


def _casting(cast: Callable[[Any], Any], previous: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
        if not _on():
            return previous(keyset, *arguments, **keywords)
        # C++ evaluates the wrapper's arguments from right to left, and so do the births of the copies.
        cast_arguments = [_each(cast, value) for value in reversed(arguments)][::-1]
        cast_keywords = {name: _each(cast, value) for name, value in keywords.items()}
        with _switched_off():
            return previous(keyset, *cast_arguments, **cast_keywords)

    return kernel


def _with_fp32_result(previous: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    halves = (torch.float16, torch.bfloat16)

    def kernel(keyset: Any, x: Any, *arguments: Any, **keywords: Any) -> Any:
        if not _on():
            return previous(keyset, x, *arguments, **keywords)
        given = keywords.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in arguments)
        if _floats(x) and x.dtype in halves and not given:
            keywords["dtype"] = torch.float32
        with _switched_off():
            return previous(keyset, x, *arguments, **keywords)

    return kernel


def _promoting(previous: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def kernel(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
        if not _on():
            return previous(keyset, *arguments, **keywords)
        flat = [item for a in arguments for item in (a if isinstance(a, (list, tuple)) else (a,))]
        dtypes = {item.dtype for item in flat if _floats(item)}
        if len(dtypes) > 1 and torch.float32 in dtypes:
            arguments = tuple(_each(_to_fp32, value) for value in arguments)
        with _switched_off():
            return previous(keyset, *arguments, **keywords)

    return kernel


# ---- Python functions that answer by a device's name ------------------------------------------------------


@contextlib.contextmanager
def _bindings(cache: WeightCache) -> Iterator[None]:
    """Every loaded module's binding of the functions below replaced; all put back at the end."""
    import torch
    import torch.optim.optimizer
    import torch.utils._foreach_utils as foreach
    import transformers.utils.generic as generic

    maybe_autocast = generic.maybe_autocast
    clear = torch.clear_autocast_cache
    autocast_init = torch.autocast.__init__

    def clear_both() -> None:
        cache.held.clear()
        clear()

    def on_the_switch(self: Any, device_type: str, *arguments: Any, **keywords: Any) -> None:
        name = SWITCH if device_type in ("meta", "cuda") else device_type
        autocast_init(self, name, *arguments, **keywords)

    def maybe_on_the_switch(device_type: str, *arguments: Any, **keywords: Any) -> Any:
        return maybe_autocast(SWITCH if device_type == "meta" else device_type, *arguments, **keywords)

    replaced: dict[Any, Any] = {
        maybe_autocast: maybe_on_the_switch,
        foreach._get_foreach_kernels_supported_devices: lambda: ["cuda", "xpu", "meta"],
        foreach._get_fused_kernels_supported_devices: lambda: ["cuda", "xpu", "mps", "cpu", "meta"],
    }
    torch.clear_autocast_cache = clear_both
    torch.autocast.__init__ = on_the_switch  # type: ignore[method-assign]
    _rebind(replaced)
    try:
        yield
    finally:
        _rebind({new: old for old, new in replaced.items()})
        torch.autocast.__init__ = autocast_init  # type: ignore[method-assign]
        torch.clear_autocast_cache = clear


def _rebind(replacements: dict[Any, Any]) -> None:
    """In every loaded module, each name bound to a key of `replacements` is bound to its value."""
    by_id = {id(old): new for old, new in replacements.items()}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if names is None:
            continue
        for name, value in list(names.items()):
            if id(value) in by_id:
                names[name] = by_id[id(value)]


# ---- the probe -----------------------------------------------------------------------------------------------


def _probe(policy: Policy) -> None:
    """One small example of each override; raises `RehearsalError` when one does not take hold."""
    import torch
    from torch.optim.optimizer import _default_to_fused_or_foreach

    x = torch.empty(2, 2, 8, 8, device="meta", requires_grad=True)
    weight = torch.empty(8, 8, device="meta", requires_grad=True)
    if policy.fuses_dropout:
        _expect("dropout", "NativeDropoutBackward" in str(torch.dropout(x, 0.5, True).grad_fn))
    choice = policy.choose_attention(x, x, x, None, 0.0, False, True)
    name = str(torch.nn.functional.scaled_dot_product_attention(x, x, x).grad_fn).lower()
    _expect("attention", choice == "math" or choice.split("_")[0] in name)
    with torch.autocast("meta", torch.bfloat16):
        low = torch.nn.functional.linear(x, weight)
        _expect("autocast", low.dtype == torch.bfloat16)
        if "softmax.int" in policy.autocast.fp32_result:
            _expect("autocast of softmax", torch.softmax(low, -1).dtype == torch.float32)
    _expect("autocast outside its region", torch.nn.functional.linear(x, weight).dtype == torch.float32)
    _, foreach = _default_to_fused_or_foreach([weight], differentiable=False)
    _expect("foreach optimizers", foreach)


def _expect(what: str, holds: bool) -> None:
    if not holds:
        import torch

        raise RehearsalError(
            f"torch {torch.__version__} does not take the rehearsal's override of {what}, so a prediction "
            "would be wrong. snugfit is tested with torch 2.11 to 2.15."
        )
