"""Imitate CUDA's autocast on `meta` tensors: operators in CUDA's autocast lists get kernels that cast their
arguments first.

The CPU's autocast state turns them on. It exists in every build of torch, nests, and can be disabled inside a
region. Checkpointing saves and restores it for the recomputation. The kernels are registered for the key
AutogradMeta only, so a real CPU tensor under a real CPU autocast never reaches them.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.results.footprint import Kind

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.device.policy import Policy

KEY = "AutogradMeta"
"""Dispatch key of all operator overrides. They replace autograd's kernels for `meta` tensors only."""

SWITCH = "cpu"
"""Device type whose autocast state (on or off, dtype) a simulation uses."""


class _CachedCast(NamedTuple):
    """A weight and its copy in autocast's dtype. The weight must be alive while its id is a key
    of the cache.
    """

    weight: torch.Tensor
    cast: torch.Tensor


class _Arguments(NamedTuple):
    """Positional and keyword arguments of an operator call."""

    positional: Iterable[Any]
    named: dict[str, Any]


class WeightCache:
    """Autocast's cache of cast weights. Each weight is cast once per autocast region, and the copy is dropped
    at its end.

    `cached_cast` of `aten/src/ATen/autocast_mode.cpp` selects the cached tensors.
    """

    def __init__(self, claim: Callable[[torch.Tensor, str], None]) -> None:
        self.entries: dict[int, _CachedCast] = {}
        """Weights cast to the autocast dtype, by the id of the original weight."""
        self._claim = claim

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor in `dtype`, from the cache if torch would cache it."""
        import torch

        if not (
            tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        ):
            return tensor.to(dtype)
        entry = self.entries.get(id(tensor))
        if entry is None:
            # A pass without gradients leaves casts with gradients to later passes.
            with torch.enable_grad():
                entry = self.entries[id(tensor)] = _CachedCast(tensor, tensor.to(dtype))
            self._claim(entry.cast, Kind.CACHES)
        return entry.cast


class Autocasting:
    """CUDA's autocast for `meta` tensors: each operator of CUDA's lists gets a kernel that casts, then calls
    the previous kernel.

    Such a kernel costs time even while autocast is off. So the kernels are registered at the start of the
    first autocast region, if any. Operators that promote dtypes are registered from the beginning.
    `scatter_add` is one of them, and its measured reference counts (`accumulation.py`) depend on the
    registered kernels.
    """

    def __init__(
        self,
        library: torch.library.Library,
        policy: Policy,
        composites: dict[str, Callable[..., Any]],
        cache: WeightCache,
    ) -> None:
        self._library, self._lists = library, policy.autocast
        self._composites, self._cache = composites, cache
        self._begun = False
        self._register(self._lists.promote, _promoting)

    def begin(self) -> None:
        """Register the casting kernels when the first autocast region begins."""
        if not self._begun:
            self._begun = True
            self._register(self._lists.lower, functools.partial(_casting, self._lower))
            self._register(self._lists.fp32, functools.partial(_casting, lambda: _to_fp32))
            self._register(self._lists.fp32_result, _with_fp32_result)

    def _lower(self) -> Callable[[Any], Any]:
        import torch

        return functools.partial(_to_lower, self._cache, torch.get_autocast_dtype(SWITCH))

    def _register(self, names: Sequence[str], wrap: Callable[[Any], Callable[..., Any]]) -> None:
        with overriding():
            for name in self._lists.of_installed_torch(names):
                # A kernel that `composites.py` replaces must be called with cast operands too.
                before = self._composites.get(name)
                previous = _without_keyset(before) if before else _plain_kernel(name).call_boxed
                self._library.impl(name, wrap(previous), KEY, with_keyset=True, allow_override=True)


@functools.cache
def _plain_kernel(name: str) -> Any:
    """Return the kernel that torch itself registers for an operator; it is the same in every simulation."""
    import torch

    return torch.library.get_kernel(f"aten::{name}", KEY)


@contextlib.contextmanager
def overriding() -> Iterator[None]:
    """Context that suppresses torch's warning about replaced kernels."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel.*")
        yield


def _without_keyset(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return lambda keyset, *arguments, **keywords: kernel(*arguments, **keywords)


def _cast_all(cast: Callable[[Any], Any], value: Any) -> Any:
    return type(value)(cast(item) for item in value) if isinstance(value, (list, tuple)) else cast(value)


def _floats(value: Any) -> bool:
    """Return True if autocast may cast this argument of an operator: a floating-point tensor
    (`is_autocast_eligible`).
    """
    import torch

    return (
        isinstance(value, torch.Tensor)
        and value.is_meta
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _to_lower(cache: WeightCache, dtype: torch.dtype, value: Any) -> Any:
    return cache.cast(value, dtype) if _floats(value) and value.dtype != dtype else value


def _to_fp32(value: Any) -> Any:
    import torch

    return value.to(torch.float32) if _floats(value) and value.dtype != torch.float32 else value


def _switched_off(
    previous: Callable[..., Any], prepare: Callable[[Any, Any], _Arguments]
) -> Callable[..., Any]:
    """Return an operator's kernel that casts arguments by `prepare`, then calls the `previous` kernel with
    autocast off.

    While autocast is off, it only calls `previous`. Many operators of a simulation pass through such a
    kernel, so it must be fast.
    """
    import torch

    is_on, switch = torch.is_autocast_enabled, torch.set_autocast_enabled

    def kernel(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
        if not is_on(SWITCH):
            return previous(keyset, *arguments, **keywords)
        changed, named = prepare(arguments, keywords)
        # Operators inside the kernel must not be cast again: torch excludes autocast's key there.
        switch(SWITCH, False)
        try:
            return previous(keyset, *changed, **named)
        finally:
            switch(SWITCH, True)

    return kernel


def _casting(cast: Callable[[], Callable[[Any], Any]], previous: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(arguments: Any, keywords: Any) -> _Arguments:
        # C++ evaluates the wrapper's arguments from right to left, so the copies are allocated in this order.
        copy = cast()
        cast_arguments = [_cast_all(copy, value) for value in reversed(arguments)][::-1]
        return _Arguments(cast_arguments, {name: _cast_all(copy, value) for name, value in keywords.items()})

    return _switched_off(previous, prepare)


def _with_fp32_result(previous: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    halves = (torch.float16, torch.bfloat16)

    def prepare(arguments: Any, keywords: Any) -> _Arguments:
        x, *rest = arguments
        # A dtype given by the caller has priority over autocast's.
        given = keywords.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in rest)
        if _floats(x) and x.dtype in halves and not given:
            keywords = {**keywords, "dtype": torch.float32}
        return _Arguments(arguments, keywords)

    return _switched_off(previous, prepare)


def _promoting(previous: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    # Lists of tensors promote together with single ones.
    def prepare(arguments: Any, keywords: Any) -> _Arguments:
        flat = [item for a in arguments for item in (a if isinstance(a, (list, tuple)) else (a,))]
        dtypes = {item.dtype for item in flat if _floats(item)}
        if len(dtypes) > 1 and torch.float32 in dtypes:
            arguments = tuple(_cast_all(_to_fp32, value) for value in arguments)
        return _Arguments(arguments, keywords)

    return _switched_off(previous, prepare)
