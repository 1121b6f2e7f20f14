"""Interpolation of a training step's CUDA kernels at any sequence length, from those of three lengths.

A step at another sequence length runs the same list of operators; only their sizes change. Each operand size
is linear in the length (samples x length, length, or neither). A kernel's work and traffic are at most
quadratic (attention's scores are length x length). The kernels of three simulated lengths therefore determine
those of any other, tile by tile and wave by wave. An interpolation of seconds would instead miss the jumps at
full tiles and waves.

A model whose operators change with the length raises `NotInterpolable`. Sizes with internal rounding, such as
the rows of eight in which a mask is stored, are slightly wrong between the lengths. The caller simulates a
fourth length to measure this error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from snugfit.rehearsal.trace.trace import Kernel, Trace


class NotInterpolable(Exception):
    """Error for two sequence lengths whose steps differ in more than kernel sizes, so that no interpolation
    is possible.
    """


class LengthSample(NamedTuple):
    """The simulated kernels of a training step at one sequence length."""

    length: int
    """Number of tokens in each sequence."""

    kernels: tuple[Kernel, ...]
    """Simulated kernels of the steady step (equal to all later ones)."""

    waits: tuple[int, ...]
    """Indices of the kernels before which the host waits for the device."""


class KernelInterpolator:
    """Interpolates the kernels of a later training step (without first-step work) at any sequence length."""

    def __init__(self, samples: Sequence[LengthSample]) -> None:
        """Prepare the interpolation between three lengths, the shortest first. Raises `NotInterpolable` if
        their kernels differ in more than sizes.
        """
        if len({(len(sample.kernels), sample.waits) for sample in samples}) != 1:
            raise NotInterpolable
        self.waits = samples[0].waits
        self._lengths = [sample.length for sample in samples]
        laws: dict[tuple[Kernel, ...], int] = {}
        self._order = [
            laws.setdefault(tuple(kernel._replace(module="") for kernel in same), len(laws))
            for same in zip(*(sample.kernels for sample in samples), strict=True)
        ]
        self._laws = list(laws)
        if not all(_differ_only_in_size(law) for law in self._laws):
            raise NotInterpolable

    def at(self, length: int) -> Trace:
        """Return the simulated trace of a step at this sequence length. It has kernels and waits, but no
        allocations.
        """
        weights = _lagrange(self._lengths, length)
        kernels = [_kernel_at(law, weights) for law in self._laws]
        return Trace((), (), (), tuple(kernels[number] for number in self._order), self.waits, ())


def _differ_only_in_size(kernels: Sequence[Kernel]) -> bool:
    """Return True if these kernels, one for each simulated length, differ only in sizes."""
    plain = {kernel._replace(module="", shapes=(), flops=0, nbytes=0, leading=()) for kernel in kernels}
    return len(plain) == 1 and len({tuple(map(len, kernel.shapes)) for kernel in kernels}) == 1


def _lagrange(known: Sequence[int], at: int) -> list[float]:
    """Return the weights of three known values for quadratic (Lagrange) interpolation at the length `at`."""
    weights = []
    for node in known:
        weight = 1.0
        for other in known:
            if other != node:
                weight *= (at - other) / (node - other)
        weights.append(weight)
    return weights


def _kernel_at(law: Sequence[Kernel], weights: Sequence[float]) -> Kernel:
    def through(values: Sequence[int]) -> int:
        # Equal sizes stay exact, without a rounding error.
        if values[0] == values[1] == values[2]:
            return values[0]
        return max(0, round(sum(weight * value for weight, value in zip(weights, values, strict=True))))

    shapes = tuple(
        tuple(through(sizes) for sizes in zip(*same, strict=True))
        for same in zip(*(kernel.shapes for kernel in law), strict=True)
    )
    return law[0]._replace(
        shapes=shapes,
        leading=tuple(through(lengths) for lengths in zip(*(kernel.leading for kernel in law), strict=True)),
        flops=through([kernel.flops for kernel in law]),
        nbytes=through([kernel.nbytes for kernel in law]),
    )
