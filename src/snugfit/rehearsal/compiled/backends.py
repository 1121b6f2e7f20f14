"""Backends of `torch.compile` that run what was traced with torch's own kernels.

`eager` runs Dynamo's graph as it stands, under autograd. `aot_eager` has AOTAutograd trace both passes and
cut them in two where Inductor would (`min_cut_rematerialization_partition`); each graph then runs operator
by operator and drops what it needs no more. `cudagraphs` keeps for the backward pass whatever that uses
(AOT's default cut), and records both graphs. Sources: `torch/_dynamo/backends/debugging.py` and
`cudagraphs.py`, torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Run = Callable[[list[Any]], Any]
"""A program, which empties the list of its inputs."""

_ATTENTION = re.compile(r"_scaled_dot_product_(flash_attention_for_cpu|cudnn|flash|efficient)")
_CHOICES = {"flash_attention_for_cpu": "flash_for_cpu"}


@dataclass(frozen=True, kw_only=True)
class TracedPass:
    """A graph of a forward or of a backward pass, which runs operator by operator."""

    run: Run
    is_backward: bool
    attention: tuple[str, ...]
    """The attention kernels that it runs."""
    static: frozenset[int] = field(default_factory=frozenset)
    """Inputs that a CUDA graph takes where they are, by number; the others it copies."""
    recordable: bool = True
    """Whether CUDA graphs can be recorded of it."""


def attention_in(text: str) -> tuple[str, ...]:
    """The attention kernels that a program names, as the trace calls them."""
    names = dict.fromkeys(_ATTENTION.findall(text))
    return tuple(_CHOICES.get(name, name) for name in names)


def cut_in_two(graph: Any, inputs: Sequence[Any], wrap: Callable[[TracedPass], Run]) -> Any:
    """What the backend `aot_eager` makes of a graph; `wrap` gives what runs in a pass's place."""
    from torch._dynamo.backends.debugging import aot_eager

    def forward(traced: Any, given: Sequence[Any]) -> Run:
        return as_boxed(wrap(_pass_of(traced, given, is_backward=False)))

    def backward(traced: Any, given: Sequence[Any]) -> Run:
        return as_boxed(wrap(_pass_of(traced, given, is_backward=True)))

    return aot_eager(graph, list(inputs), fw_compiler=forward, bw_compiler=backward)


def made_to_be_recorded(graph: Any, inputs: Sequence[Any], wrap: Callable[[TracedPass], Run]) -> Any:
    """What the backend `cudagraphs` makes of a graph, likewise."""
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.utils import count_tangents, num_fw_fixed_arguments

    forward_recordable = True

    def forward(traced: Any, given: Sequence[Any]) -> Run:
        nonlocal forward_recordable
        fixed = num_fw_fixed_arguments(len(inputs), len(given))
        forward_recordable = _recordable(traced, fixed)
        return as_boxed(
            wrap(_pass_of(traced, given, is_backward=False, fixed=fixed, recordable=forward_recordable))
        )

    def backward(traced: Any, given: Sequence[Any]) -> Run:
        fixed = count_tangents(traced)
        recordable = forward_recordable and _recordable(traced, fixed)
        return as_boxed(wrap(_pass_of(traced, given, is_backward=True, fixed=fixed, recordable=recordable)))

    keeps = torch._dynamo.config.cudagraph_backend_keep_input_mutation
    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=forward,
        keep_inference_input_mutations=keeps,
    )
    return compiler(graph, list(inputs))


def _pass_of(
    traced: Any, given: Sequence[Any], *, is_backward: bool, fixed: int = 0, recordable: bool = True
) -> TracedPass:
    from torch._dynamo.backends.debugging import boxed_nop

    return TracedPass(
        run=boxed_nop(traced, list(given)),
        is_backward=is_backward,
        attention=attention_in(traced.code),
        static=frozenset(range(fixed)),
        recordable=recordable,
    )


def as_boxed(run: Run) -> Run:
    """The program, known to AOTAutograd as one that empties its list."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _recordable(traced: Any, fixed: int) -> bool:
    """Whether the backend would record this graph: all of it is on the GPU, and it writes to no input that a
    graph copies (`check_for_skip`)."""
    import torch
    from torch._dynamo.backends.cudagraphs import find_input_mutations

    values = (node.meta.get("val") for node in traced.graph.nodes)
    on_host = any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in values)
    return not on_host and _below(find_input_mutations(traced.graph), fixed)


def _below(numbers: Iterable[int], fixed: int) -> bool:
    return all(number < fixed for number in numbers)
