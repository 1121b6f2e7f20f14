"""Simulate a model with many equal layers by two models with few layers.

The two models differ by one period: the smallest repeating group of layers. The events (allocations, frees,
kernels) of that period are repeated in the trace (`trace/deepen.py`). In the plain loop, the optimizer update
is simulated with all layers and joined. In other loops, the update is extended together with the forward and
backward passes. A model compiled as one program gains most, because Inductor takes one or two seconds per
layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.rehearsal.deep_stack import is_deep
from snugfit.rehearsal.rehearse import STEPS, record_steps
from snugfit.rehearsal.splice import Part, SharedBlock, rehearse_passes, rehearse_update, splice
from snugfit.rehearsal.trace.deepen import deepen, numbers_of
from snugfit.rehearsal.trace.depth import Depth, depth_of, periodic_setup
from snugfit.rehearsal.trace.grow import Entry, grow
from snugfit.rehearsal.trace.relative import RelativeTrace, without_layer_numbers
from snugfit.rehearsal.trace.repeat import repeat
from snugfit.techniques.registry import hooks
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import ranks_of

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.rehearsal.device.policy import Policy
    from snugfit.rehearsal.trace.trace import Trace

FEWEST_PERIODS = 3
"""Number of periods (repeated groups of layers) in the shallow model: a first, a last, and one between."""

DEEP = 28
"""Number of layers from which a model's simulation is extrapolated from models with few layers.

With fewer layers, writing the trace takes as long as the simulation. Models that are compiled as a whole have
no such limit.
"""

WRITTEN_SHARE = 0.5
"""Seconds to write the trace of one layer, as a share of the seconds to simulate it (chosen)."""

# If the distance were odd, the last layer's buffers would be at the other of the two places.
ALTERNATING_LAYERS = 2
"""Number of consecutive layers whose buffers alternate between the same addresses."""


RecordPasses = Callable[["Job", Setup, "Policy"], Part]
"""Type of a function that simulates the forward and backward passes of a job and returns their recording."""


class _ShallowPasses(NamedTuple):
    """Recorded forward and backward passes of a model with few layers, and Inductor's choices for its
    compiled code.
    """

    part: Part
    decisions: list[Any]


def rehearse_from_few_layers(job: Job, setup: Setup, policy: Policy, *, loop: str = "plain") -> Trace | None:
    """Return the trace of three steps of a model with many layers, from simulations of models with few. It
    equals that of `rehearse`.

    Return None if equality is not certain, or if shallow models save no work.
    """
    is_one_program = _is_one_program(setup)
    if not is_one_program and not is_deep(job, DEEP):
        return None
    if loop != "plain":
        return _whole_steps_from_few_layers(job, setup, policy, loop)
    passes = passes_from_few_layers(job, setup, policy)
    if passes is None:
        return None
    # The update depends only on the gradients, and its simulation is cheap at full depth.
    update = rehearse_update(job, setup, policy, passes.gradients, passes.shared)
    run = splice(passes, update, micro_batches=setup.micro_batches)
    return None if run is None else run.trace()


def _whole_steps_from_few_layers(job: Job, setup: Setup, policy: Policy, loop: str) -> Trace | None:
    """Return the trace of three steps of a loop other than the plain one. Whole steps are extended to all
    layers. Return None if that is not possible.
    """

    def record(job: Job, setup: Setup, policy: Policy) -> Part:
        recording = record_steps(job, setup, policy, loop)
        return Part(RelativeTrace.of(recording.trace, recording.marks), (), recording.varies)

    # Several processes exchange gradients in buckets, whose number is not linear in the depth.
    steps = passes_from_few_layers(job, setup, policy, record) if ranks_of(setup) == 1 else None
    run = steps and repeat(steps.trace, steps=STEPS, micro_batches=setup.micro_batches)
    return run.trace() if run else None


def _is_one_program(setup: Setup) -> bool:
    lowering = setup.lowering
    return lowering is not None and lowering.is_one_program


def passes_from_few_layers(
    job: Job, setup: Setup, policy: Policy, record: RecordPasses = rehearse_passes
) -> Part | None:
    """Return the forward and backward passes of a model with many layers, computed from simulations of models
    with few. They equal those of `record`.

    Return None if equality is not certain, or if shallow models save no work.
    """
    if not _repeats_layers(setup):
        return None
    depth = depth_of(job, setup) if job.trains else None
    if depth is None:
        return None
    periodic, repeats, _ = periodic_setup(setup, depth.layers)
    # Checkpointing must repeat together with the layer types.
    period = math.lcm(depth.period, repeats)
    layers = _shallow_layers(depth.layers, period)
    is_one_program = _is_one_program(setup)
    written = 0 if is_one_program else depth.layers * WRITTEN_SHARE
    # Two shallow models must cost less than the deep one, including the time to write its trace.
    if 2 * layers + period + written >= depth.layers:
        return None
    shallow, deeper = (
        _rehearse(depth, job, periodic, policy, few, record) for few in (layers, layers + period)
    )
    periods = (depth.layers - layers) // period - 1
    return _deepen_passes(shallow, deeper, periods, compiled=is_one_program)


def _repeats_layers(setup: Setup) -> bool:
    """Return True if a simulation with few layers can represent a deep model. The settings then record no
    CUDA graphs and treat all layers alike.
    """
    if setup.records_graphs:
        return False
    return all(are_alike(setup) for are_alike in hooks("treats_layers_alike"))


def _shallow_layers(layers: int, period: int) -> int:
    """Return the number of layers of the small model that is simulated in place of one with `layers` layers.

    The small model plus one period differs from the full model by a multiple of `ALTERNATING_LAYERS` periods.
    """
    fewest = FEWEST_PERIODS * period
    return fewest + (layers - fewest - period) % (ALTERNATING_LAYERS * period)


def _rehearse(
    depth: Depth, job: Job, setup: Setup, policy: Policy, layers: int, record: RecordPasses
) -> _ShallowPasses:
    with ExitStack() as stack:
        noted = [stack.enter_context(decisions()) for decisions in hooks("program_decisions")]
        part = record(depth.shallower(job, layers), setup, policy)
    return _ShallowPasses(part, list(chain(*noted)))


def _deepen_passes(
    shallow: _ShallowPasses, deeper: _ShallowPasses, periods: int, *, compiled: bool
) -> Part | None:
    # Warnings may contain layer numbers, which cannot be extrapolated in a sentence.
    if shallow.part.trace.doubts != deeper.part.trace.doubts:
        return None
    # A micro-batch that depends on values may differ at full depth, and so may other choices of a compiler.
    if shallow.part.varies or deeper.part.varies or not _decide_alike(shallow, deeper, periods):
        return None
    gradients = grow(_trained_parameters(shallow.part), _trained_parameters(deeper.part), periods)
    shared = _grow_shared_blocks(shallow.part, deeper.part, periods)
    trace = deepen(shallow.part.trace, deeper.part.trace, periods, compiled=compiled)
    if gradients is None or shared is None or trace is None:
        return None
    have = [deeper.part.has_gradient(gradient.like) for gradient in gradients]
    return Part(trace, tuple(number for number, has in enumerate(have) if has), shared=shared)


def _decide_alike(shallow: _ShallowPasses, deeper: _ShallowPasses, periods: int) -> bool:
    """Return True if Inductor chooses the same kernels for these two small models, so that the choices hold
    for the full model.
    """
    few, more = ({id(decision): decision for decision in model.decisions} for model in (shallow, deeper))
    # If both models have the same objects, their programs are those of single layers.
    if few.keys() == more.keys():
        return True
    if len(shallow.decisions) != len(deeper.decisions):
        return False
    pairs = {
        (id(decision), id(other)): (decision, other)
        for decision, other in zip(shallow.decisions, deeper.decisions)
    }
    return all(decision.are_alike(other, periods) for decision, other in pairs.values())


def _grow_shared_blocks(shallow: Part, deeper: Part, periods: int) -> tuple[SharedBlock, ...] | None:
    """Return the full model's memory blocks that hold several gradients, extended from a small model's; None
    if they do not repeat.
    """

    def entries(part: Part) -> list[Entry]:
        return [
            Entry(
                (block.elements, *(view._replace(number=0) for view in block.views)),
                tuple(view.number for view in block.views),
            )
            for block in part.shared
        ]

    grown = grow(entries(shallow), entries(deeper), periods)
    if grown is None:
        return None
    blocks = ((deeper.shared[entry.like], entry.numbers) for entry in grown)
    return tuple(
        block._replace(
            views=tuple(view._replace(number=at) for view, at in zip(block.views, numbers, strict=True))
        )
        for block, numbers in blocks
    )


def _trained_parameters(part: Part) -> list[Entry]:
    """Return the trainable parameters of a small model as entries that `grow` extends to more layers."""
    return [
        Entry((without_layer_numbers(name), part.has_gradient(number)), numbers_of(name))
        for number, name in enumerate(part.trained)
    ]
