"""CUDA's autocast on meta tensors: for each operator of the policy's lists, cast, then call what was there.

The switch is the CPU's: it exists in every build, nests, can be turned off inside, and checkpointing saves
and restores it for the recomputation. Registered for the key AutogradMeta only, so a real CPU tensor under a
real CPU autocast never passes here.
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
"""The dispatch key of all overrides: above autograd's kernels of meta tensors, and of no others."""

SWITCH = "cpu"
"""Whose autocast state a rehearsal uses."""


class _CachedCast(NamedTuple):
    """A weight, which must live as long as it is found by its id, and its cast copy."""

    weight: torch.Tensor
    cast: torch.Tensor


class _Arguments(NamedTuple):
    """What an operator is called with."""

    positional: Iterable[Any]
    named: dict[str, Any]


class WeightCache:
    """Autocast's cache of cast weights: cast once per autocast region, dropped when the region ends.

    Which tensors are cached: `cached_cast` of `aten/src/ATen/autocast_mode.cpp`.
    """

    def __init__(self, claim: Callable[[torch.Tensor, str], None]) -> None:
        self.entries: dict[int, _CachedCast] = {}
        """By the weight's id."""
        self._claim = claim

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
        entry = self.entries.get(id(tensor))
        if entry is None:
            entry = self.entries[id(tensor)] = _CachedCast(tensor, tensor.to(dtype))
            self._claim(entry.cast, Kind.CACHES)
        return entry.cast


class Autocasting:
    """Autocast's kernels: for each operator of the policy's lists, cast, then call the kernel that was there.

    An operator pays for such a kernel also where autocast is off. So they are registered when the first
    region begins, and never where there is none. Operators that promote are there from the beginning:
    scattering is one of them, and how many hold its operands (`accumulation.py`) depends on the kernels on
    the way.
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
        """Registers the kernels when the first region begins."""
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
                before = self._composites.get(name)
                previous = _without_keyset(before) if before else _plain_kernel(name).call_boxed
                self._library.impl(name, wrap(previous), KEY, with_keyset=True, allow_override=True)


@functools.cache
def _plain_kernel(name: str) -> Any:
    """torch's own kernel of an operator that has no other here: the same in every rehearsal."""
    import torch

    return torch.library.get_kernel(f"aten::{name}", KEY)


@contextlib.contextmanager
def overriding() -> Iterator[None]:
    """Within it torch does not warn of kernels that are registered in the place of others."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel.*")
        yield


def _without_keyset(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return lambda keyset, *arguments, **keywords: kernel(*arguments, **keywords)


def _cast_all(cast: Callable[[Any], Any], value: Any) -> Any:
    return type(value)(cast(item) for item in value) if isinstance(value, (list, tuple)) else cast(value)


def _floats(value: Any) -> bool:
    """Whether autocast may cast this argument (`is_autocast_eligible`)."""
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
    """A kernel that, while the switch is on, prepares its arguments and then calls `previous` with the switch
    off. Every operator of a rehearsal goes through one, so it does no more than that."""
    import torch

    is_on, switch = torch.is_autocast_enabled, torch.set_autocast_enabled

    def kernel(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
        if not is_on(SWITCH):
            return previous(keyset, *arguments, **keywords)
        changed, named = prepare(arguments, keywords)
        switch(SWITCH, False)
        try:
            return previous(keyset, *changed, **named)
        finally:
            switch(SWITCH, True)

    return kernel


def _casting(cast: Callable[[], Callable[[Any], Any]], previous: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(arguments: Any, keywords: Any) -> _Arguments:
        # C++ evaluates the wrapper's arguments from right to left, and so are the copies allocated.
        one = cast()
        cast_arguments = [_cast_all(one, value) for value in reversed(arguments)][::-1]
        return _Arguments(cast_arguments, {name: _cast_all(one, value) for name, value in keywords.items()})

    return _switched_off(previous, prepare)


def _with_fp32_result(previous: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    halves = (torch.float16, torch.bfloat16)

    def prepare(arguments: Any, keywords: Any) -> _Arguments:
        x, *rest = arguments
        given = keywords.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in rest)
        if _floats(x) and x.dtype in halves and not given:
            keywords = {**keywords, "dtype": torch.float32}
        return _Arguments(arguments, keywords)

    return _switched_off(previous, prepare)


def _promoting(previous: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def prepare(arguments: Any, keywords: Any) -> _Arguments:
        flat = [item for a in arguments for item in (a if isinstance(a, (list, tuple)) else (a,))]
        dtypes = {item.dtype for item in flat if _floats(item)}
        if len(dtypes) > 1 and torch.float32 in dtypes:
            arguments = tuple(_cast_all(_to_fp32, value) for value in arguments)
        return _Arguments(arguments, keywords)

    return _switched_off(previous, prepare)
