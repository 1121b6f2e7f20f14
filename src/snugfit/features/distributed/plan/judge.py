"""Prediction of a recipe's bytes and seconds on several GPUs, from models with few layers and few
micro-batches.

A step's bytes and seconds grow linearly with layers, so those of a deep model follow from two shallow ones.
Micro-batches of one size are alike from the second on. Their bytes are those of three, and each further one
takes as long as the second of three. Every answer is also simulated with all layers. Requests go to worker
processes, so each is plain data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from snugfit.errors import SnugfitError
from snugfit.features.distributed.fields import PARALLEL, ParallelWish
from snugfit.features.distributed.price.communication import communication_bytes, doubts_about_exchanges
from snugfit.features.distributed.price.few_stages import STEPS, StagesQuestion, few_layers
from snugfit.features.distributed.price.stages import FURTHER, IN_TURN
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.cost.periodic import later_starts
from snugfit.planning.cost.shallow import linear_extrapolate
from snugfit.prediction.allocator import replay
from snugfit.prediction.device import context_of, policy_for
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import Software
from snugfit.prediction.rates import rates_for
from snugfit.prediction.seconds import MODELS_OWN, step_seconds
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.depth import Depth, depth_of, periodic_setup
from snugfit.results.prediction import Prediction
from snugfit.results.step_seconds import StepSeconds
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import job_of_rank, on_gpus, ranks_of
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.trace import Kernel, Trace

FEW_PIECES = 3
"""Number of simulated micro-batches that represent any larger number: the first, the last, and one between.
"""

PIECES_IN_FULL = 2
"""Number of micro-batches to simulate with all layers. Further micro-batches take as many bytes as the
second, unless a pipeline splits the layers into stages.
"""


class Judged(NamedTuple):
    """Bytes and seconds of a step on each GPU, extrapolated from simulations of models with few layers."""

    needed_bytes: int
    """Bytes that must be free on each GPU."""
    step_seconds: float
    why_not: str = ""
    """Reason why the recipe cannot be simulated; empty if it can."""
    doubts: tuple[str, ...] = ()
    """Warnings about uncertain figures for the exchanges between GPUs."""
    model_seconds: float = 0.0
    """Total seconds of the kernels of forward and backward passes, without exchanges."""
    exposed_seconds: float = 0.0
    """Seconds by which exchanges between GPUs lengthen the step."""


class InFull(NamedTuple):
    """Bytes and seconds of a recipe on each GPU, simulated with all layers."""

    needed_bytes: int
    bound: str
    """Resource that bounds the step (`StepSeconds.bound`)."""
    doubts: tuple[str, ...]
    timing: StepSeconds | None
    """Timing of the whole step; None if not all of its micro-batches were simulated."""
    host_share: float = 0.0
    """Share of the step's seconds in which the host works."""


class Judge:
    """Predicts bytes and seconds of recipes for one job on several GPUs, of one or several GPU models.

    GPU models in one call run the same kernels and share one simulation: that of the model whose kernels take
    the most temporary memory.
    """

    def __init__(self, job: Job, gpu: Gpu, *others: Gpu) -> None:
        self._job, self._gpu, self._software = job, gpu, Software()
        self._kinds = (gpu, *others)
        self._depths: dict[str, Depth | None] = {}

    def judge(self, gpus: int, recipe: Recipe) -> Judged:
        """Return bytes and seconds of a recipe on this number of GPUs. They are extrapolated from models of
        few layers where the job's model allows it.
        """
        return self.judge_kinds(gpus, recipe, (0,))[0]

    def judge_kinds(
        self, gpus: int, recipe: Recipe, kinds: Sequence[int], build_on: str | None = None
    ) -> list[Judged]:
        """Return bytes and seconds of a recipe for each of these GPU models, given by index.

        The indices follow the order of the constructor's arguments. The model is built on `build_on`, by
        default that of the job.
        """
        setup = on_gpus(recipe.setup(), gpus)
        part = replace(job_of_rank(self._job, setup), build_on=build_on or self._job.build_on)
        asked = tuple(self._kinds[kind] for kind in kinds)
        one = _OneQuestion(asked, self._software)
        try:
            if (PARALLEL.of(setup) or ParallelWish()).stages > 1:
                question = StagesQuestion(asked, self._software, one.policy, part, setup)
                steps = question.judge(self._depth(part, setup))
                return [
                    Judged(doubts=tuple(doubts), **step._asdict())
                    for step, doubts in zip(steps, question.doubts, strict=True)
                ]
            figures = self._by_layers(part, setup, one)
        except SnugfitError as refused:
            return [Judged(0, 0.0, str(refused))] * len(kinds)
        return [
            _to_judged(figure, setup.micro_batches, tuple(doubts))
            for figure, doubts in zip(figures, one.doubts, strict=True)
        ]

    def in_full(self, gpus: int, recipe: Recipe) -> InFull:
        """Return the bytes of a recipe with all layers, and with few micro-batches.

        With stages, the number of micro-batches slightly exceeds that of stages, and the bytes of each
        further one are added. Raises `SnugfitError` as `predict` does.
        """
        setup = on_gpus(recipe.setup(), gpus)
        most = _pieces_in_full(setup)
        few = setup.micro_batches > most
        prediction = (
            self._with_pieces(gpus, recipe, int(most))
            if few
            else predict(self._job, recipe, gpu=self._gpu, gpus=gpus)
        )
        needed = prediction.needed_bytes
        if few and most > PIECES_IN_FULL:
            fewer = self._with_pieces(gpus, recipe, int(most) - 1).footprint.allocated_bytes or 0
            further = max(0, (prediction.footprint.allocated_bytes or 0) - fewer)
            needed += (setup.micro_batches - int(most)) * further
        timing = prediction.timing
        return InFull(
            needed_bytes=needed,
            bound=timing.bound if timing else "",
            doubts=prediction.doubts,
            timing=None if few else timing,
            host_share=timing.host_seconds / timing.step_seconds if timing and timing.step_seconds else 0.0,
        )

    def _with_pieces(self, gpus: int, recipe: Recipe, pieces: int) -> Prediction:
        """Return the full prediction of a smaller batch with `pieces` micro-batches of the same size."""
        setup = on_gpus(recipe.setup(), gpus)
        job = replace(self._job, batch_size=self._job.batch_size // setup.micro_batches * pieces)
        settings = type(recipe[Slot.BATCHING]).settings(job_of_rank(job, setup))
        cut = next(one for one in settings if one.alone.micro_batches == pieces)
        return predict(job, recipe.with_(cut), gpu=self._gpu, gpus=gpus)

    def _by_layers(self, part: Job, setup: Setup, one: _OneQuestion) -> list[_FewPieces]:
        depth = self._depth(part, setup)
        points = few_layers(depth, setup)
        if depth is None or points == (0,):
            return _by_few_pieces(part, setup, one)
        asked = periodic_setup(setup, depth.layers).setup
        return _on_a_line(
            points, lambda layers: _by_few_pieces(depth.shallower(part, layers), asked, one), depth.layers
        )

    def _depth(self, part: Job, setup: Setup) -> Depth | None:
        if setup.attention not in self._depths:
            self._depths[setup.attention] = depth_of(part, setup)
        return self._depths[setup.attention]


def _pieces_in_full(setup: Setup) -> float:
    """Return the number of micro-batches to simulate with all layers: slightly more than pipeline stages;
    infinity (all of them) for interleaved schedules.
    """
    wish = PARALLEL.of(setup) or ParallelWish()
    if wish.stages == 1:
        return PIECES_IN_FULL
    return wish.stages + FURTHER + 1 if wish.schedule in IN_TURN else math.inf


class _FewPieces(NamedTuple):
    """Bytes and seconds of a step with at most `FEW_PIECES` micro-batches on one GPU model, and the increase
    for one micro-batch more. All fields but the first grow linearly with layers.
    """

    unused_bytes: float
    """Bytes that the allocator reserves without use, and bytes outside of the allocator. The larger value of
    two depths is used for all depths.
    """
    allocated_bytes: float
    step_seconds: float
    model_seconds: float
    exposed_seconds: float
    piece_seconds: float = 0.0
    piece_model_seconds: float = 0.0
    piece_exposed_seconds: float = 0.0


def _to_judged(figure: _FewPieces, pieces: int, doubts: tuple[str, ...]) -> Judged:
    """Return the bytes and seconds of a step with many micro-batches, extrapolated from those of few."""
    more = max(0, pieces - FEW_PIECES)
    return Judged(
        needed_bytes=int(figure.unused_bytes + figure.allocated_bytes),
        step_seconds=figure.step_seconds + more * figure.piece_seconds,
        doubts=doubts,
        model_seconds=figure.model_seconds + more * figure.piece_model_seconds,
        exposed_seconds=max(0.0, figure.exposed_seconds + more * figure.piece_exposed_seconds),
    )


def _by_few_pieces(part: Job, setup: Setup, one: _OneQuestion) -> list[_FewPieces]:
    """Simulate few micro-batches of one GPU's job (`part`), and return bytes and seconds on each model of
    GPU.
    """
    pieces = min(setup.micro_batches, FEW_PIECES)
    samples = part.batch_size // setup.micro_batches * pieces
    return one.simulate(replace(part, batch_size=samples), replace(setup, micro_batches=pieces))


class _OneQuestion:
    """The prediction of one step for several GPU models that run the same kernels. It collects the warnings
    for each model.
    """

    def __init__(self, kinds: Sequence[Gpu], software: Software) -> None:
        self._kinds, self._software = kinds, software
        policies = [policy_for(gpu, software) for gpu in kinds]
        self.policy = max(policies, key=lambda policy: policy.scratch_size)
        self.doubts: list[dict[str, None]] = [{} for _ in kinds]

    def simulate(self, part: Job, setup: Setup) -> list[_FewPieces]:
        """Simulate a step once, and return its bytes and seconds on each model of GPU."""
        trace = rehearse(part, setup, self.policy, steps=STEPS)
        after = replay(trace, expandable=setup.expandable_segments)
        gpus = ranks_of(setup)
        group = communication_bytes(trace, gpus)
        longer = with_a_further_piece(trace) if setup.micro_batches > 1 else None
        figures: list[_FewPieces] = []
        for gpu, doubts in zip(self._kinds, self.doubts, strict=True):
            context, _ = context_of(gpu, self._software, trace, group=group)
            rates = rates_for(gpu, gpus)
            timed = partial(
                step_seconds, gpu=gpu, batch_size=part.batch_size, rates=rates, workers=setup.loader.workers
            )
            known = _seconds_of(timed(trace))
            further = (
                [late - early for early, late in zip(known, _seconds_of(timed(longer)), strict=True)]
                if longer is not None
                else [0.0] * len(known)
            )
            doubts.update(dict.fromkeys(doubts_about_exchanges(trace, gpu, rates)))
            unused = context + after.reserved_peak - after.allocated_peak
            figures.append(_FewPieces(unused, after.allocated_peak, *known, *further))
        return figures


def _seconds_of(timing: StepSeconds) -> tuple[float, float, float]:
    """Return three sums of seconds of a step: the whole step, kernels of forward and backward passes, and
    collectives without overlap.
    """
    model = sum(one.device_seconds for one in timing.phases if one.phase in MODELS_OWN)
    return timing.step_seconds, model, timing.exposed_communication_seconds


def _on_a_line(points: Sequence[int], of: Callable[[int], list[_FewPieces]], at: int) -> list[_FewPieces]:
    """Extrapolate the bytes and seconds of each GPU model linearly to `at` layers, from those at two smaller
    numbers of layers.
    """
    return [
        _FewPieces(
            max(unused), *[linear_extrapolate(points, values, at) for values in zip(*growing, strict=True)]
        )
        for on_kind in zip(*map(of, points), strict=True)
        for unused, growing in [([one[0] for one in on_kind], [one[1:] for one in on_kind])]
    ]


def with_a_further_piece(trace: Trace) -> Trace | None:
    """Return this trace (the recorded kernels) with its last step extended by one micro-batch.

    The added micro-batch is a copy of one between the first and the last. This is exact even if collectives
    in other streams reach from one micro-batch into the next. Memory blocks and events stay unchanged. Return
    None if the step has no micro-batch between a first and a last.
    """
    starts = later_starts(trace)
    if len(starts) != 2:
        return None
    second, third = starts
    length = third - second
    again = [_later(kernel, length, 0) for kernel in trace.kernels[second:third]]
    rest = [_later(kernel, length, second) for kernel in trace.kernels[third:]]
    waits = [wait for wait in trace.waits if wait < third]
    waits += [wait + length for wait in trace.waits if wait >= second]
    return replace(trace, kernels=(*trace.kernels[:third], *again, *rest), waits=tuple(waits))


def _later(kernel: Kernel, numbers: int, since: int) -> Kernel:
    """Return a copy of a kernel whose waits refer to kernels `numbers` later. Waits for kernels before index
    `since` stay unchanged.
    """
    if not kernel.after:
        return kernel
    after = tuple(other + numbers if other >= since else other for other in kernel.after)
    return kernel._replace(after=after)
