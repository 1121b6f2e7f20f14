"""The kernels of a step that compiling layers leaves unchanged, and plans that simulate compiled layers only
if their result may change the plan.
"""

from __future__ import annotations

import random

import pytest

from in_roster import needs_techniques
from snugfit.planning.cost.lowered import uncompiled_work
from snugfit.planning.search.search import search
from snugfit.planning.search.state import SearchState
from snugfit.prediction.worker_pool import WorkerPool
from snugfit.rehearsal.trace.trace import Kernel, Work
from test_planning import recomputed, space_of_rounds, told_of

LAYER = "bert.encoder.layer.3.output"


def kernel(operator: str, module: str) -> Kernel:
    return Kernel(operator, module, "forward", 1, 8, ((2, 2),), "torch.float32", 1)


def test_products_and_attention_stay_and_whatever_is_outside_layers() -> None:
    left = [
        kernel("aten::addmm", LAYER),
        kernel("aten::_scaled_dot_product_flash_attention", LAYER),
        kernel("aten::gelu", "classifier"),
    ]
    gone = [kernel("aten::gelu", LAYER), kernel("aten::bmm", LAYER), kernel("aten::native_layer_norm", LAYER)]
    assert uncompiled_work(Work((*gone, *left), (1,))) == Work(tuple(left), ())


@pytest.mark.parametrize("slow", [False, True])
def test_compiled_layers_are_lowered_only_where_they_may_matter(slow: bool) -> None:
    needs_techniques("captured")  # the seed is for the space of the whole roster
    rng = random.Random(0)
    space = space_of_rounds()
    told = recomputed(told_of(space, rng), space, rng)
    if slow:  # the remaining kernels take longer than the whole step, and more bytes
        most = max(bound.needed_bytes for bound in told.bounds)
        told.bounds = [
            bound if one.setup.lowering else bound._replace(compiled_bytes=2 * most, compiled_seconds=1e6)
            for bound, one in zip(told.bounds, space.candidates, strict=True)
        ]
    state = SearchState(space)
    search(state, WorkerPool([told]))  # type: ignore[list-item]
    lowered = {number for number in state.bounds if space.candidates[number].setup.lowering}
    assert bool(lowered) != slow
