"""Functions that torch compiles for any sizes: a second time, for other sizes than the first.

T5's decoder is one, whose layers share their code with its encoder's. Here each is compiled for its own
sizes, so that buffers are numbers. One thing differs that is allocated: AOTAutograd asks of the gradients of
a graph for any sizes that they are contiguous, and of any other graph's that they lie as its outputs do, and
copies those that do not (`MemoryFormatMeta.from_tensor`, `torch/_functorch/_aot_autograd/schemas.py`). torch
2.11 asks the same of both, unless its setting is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


class FirstSizes:
    """The sizes that functions were compiled for first, in one rehearsal."""

    def __init__(self) -> None:
        self._sizes: dict[int, Any] = {}  # of the first input that is no weight, by Dynamo's number

    @contextlib.contextmanager
    def ask(self, inputs: Sequence[Any]) -> Iterator[bool]:
        """Whether torch would compile the graph that Dynamo traced now, for these inputs, for any sizes.
        Within it AOTAutograd asks of gradients what it then does."""
        import torch
        from torch._functorch import config as functorch
        from torch._guards import CompileContext

        number = getattr(CompileContext.current_compile_id(), "frame_id", None)
        sizes = next((one.shape for one in inputs if isinstance(one, torch.Tensor) and not one.is_leaf), None)
        any_sizes = number is not None and self._sizes.setdefault(number, sizes) != sizes
        as_outputs = functorch.guess_tangent_strides_as_outputs and not any_sizes
        with functorch.patch(guess_tangent_strides_as_outputs=as_outputs):
            yield any_sizes
