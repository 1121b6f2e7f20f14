"""Predict a training step: simulate it, replay its trace through the allocator, and add bytes outside
PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from snugfit.deferred_imports import are_put_off, complete_imports
from snugfit.errors import GpuError, UsageError
from snugfit.job.gpu import Gpu, find_gpu
from snugfit.job.job import refuse_what_is_no_job
from snugfit.prediction.allocator import replay
from snugfit.prediction.anatomy import anatomy, by_kind
from snugfit.prediction.device import context_of, doubts_about, policy_for
from snugfit.prediction.exchanges import DifferingRanks, ForeseenRank, exchanges
from snugfit.prediction.headroom import headroom_of
from snugfit.prediction.pinned import host_state_bytes, managed_bytes, pinned_bytes
from snugfit.prediction.profile import INSTALLED, Software, find_software, installed_versions
from snugfit.prediction.rates import Rates, rates_for
from snugfit.prediction.seconds import step_seconds
from snugfit.prediction.startup import count_in_programs, distinct_kernels, startup
from snugfit.prediction.timeline import phase_spans, run_in_streams, time_kernels
from snugfit.rehearsal.few_layers import rehearse_from_few_layers
from snugfit.rehearsal.rehearse import rehearse
from snugfit.results.footprint import Footprint, Kind, Moment, Startup
from snugfit.results.prediction import Prediction
from snugfit.results.step_seconds import PhaseSpan, StepSeconds
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.registry import hooks
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import job_of_rank, on_gpus, ranks_of
from snugfit.techniques.wish import used_wishes
from snugfit.units import MIB

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.rehearsal.trace.trace import Trace

PROCESS_BYTES = 1500 * MIB
"""Resident host bytes of a process that has imported torch and transformers and has a CUDA context.

It was between 1,326 and 1,828 MiB in 16 randomly drawn runs on an H200 (2026-11-20, torch 2.11).
"""

IMPORTED_BYTES = 930 * MIB
"""Resident host bytes of a process without CUDA context that has imported torch and transformers, without its
weights. The HF Trainer took 2,207 MiB with BERT-large, 1,279 of them for weights (2026-11-20).
"""

WORKER_BYTES = 450 * MIB
"""Resident host bytes that a DataLoader's worker process does not share with its parent process."""

PREFETCHED_BATCHES = 2
"""Number of batches that each loader worker prepares ahead (DataLoader's `prefetch_factor`)."""


RETRIED = (
    "While the model is built the allocator runs out of memory and releases its cached memory. On a larger "
    "GPU it reserves more."
)


def predict(
    job: Job,
    recipe: Recipe | str = "plain",
    *,
    gpu: Gpu | str | None = None,
    gpus: int = 1,
    memory_bytes: int | None = None,
    headroom: int | str | None = None,
    loop: str = "plain",
    software: str = INSTALLED,
    trainer_class: type[Any] | None = None,
    rates: Rates | None = None,
) -> Prediction:
    """Return the prediction for `job` under `recipe` on `gpu`, computed without a GPU.

    Recipe and GPU may be text. Several `gpus` of this kind share the global batch.

    `memory_bytes` is the usable memory, if it is less than the GPU's. A step that fits but leaves less of it
    free than `headroom` (bytes, or text such as `2%`) is marked as tight. The default is 2 % of the GPU's
    memory, and more if the bytes are uncertain. `loop` is `plain`, `accelerate` or `trainer`. `trainer_class`
    is a subclass of `transformers.Trainer` to simulate instead. `rates` (speeds of kernels) are by default
    this GPU's. Raises `UsageError` for invalid arguments, and `RehearsalError` for a step that cannot be
    simulated.
    """
    _refuse(job, memory_bytes)
    gpu, profile = None if gpu is None else find_gpu(gpu), find_software(software)
    headroom_bytes = headroom_of(headroom, gpu, memory_bytes)
    recipe = profile.with_defaults(recipe if isinstance(recipe, Recipe) else Recipe.parse(recipe))
    setup = on_gpus(profile.setup(recipe), gpus)
    part = job_of_rank(job, setup)
    warnings = recipe.check(part, gpu.compute_capability if gpu else None)
    available = memory_bytes if memory_bytes is not None else gpu.memory_bytes if gpu else None
    several = exchanges().ranks_to_rehearse(part, setup)
    traces = {rank: _rehearse(part, setup, gpu, profile, loop, trainer_class, rank) for rank in several}
    ranks = [_predict_rank(*arguments, gpu, profile, setup, loop, rates) for arguments in traces.items()]
    shown = max(ranks, key=attrgetter("needed_bytes"))
    trace, peak = shown.trace, shown.trace.peak().position
    differing = exchanges().differing(ranks, part, setup, gpu)
    timing, timeline, about_seconds = _seconds(shown, gpu, job, setup, rates, differing)
    host = _host_bytes(part, setup, shown, ranks, loop)
    return Prediction(
        job=job,
        recipe=recipe,
        loop=loop,
        gpu=gpu,
        memory_bytes=available,
        headroom_bytes=headroom_bytes,
        footprint=_footprint(shown, peak, host, available),
        anatomy=anatomy(trace, peak, shown.after.reserved, part, setup),
        versions=installed_versions(),
        doubts=(*warnings, *_about_bytes(shown, peak, setup, available, gpu, profile), *about_seconds),
        timing=timing,
        startup=_startup(trace, job, setup, timing) if loop == "plain" else None,
        software=software,
        timeline=timeline,
        gpus=gpus,
        rank=shown.rank,
        ranks=differing.predictions() if differing else (),
    )


def _about_bytes(
    shown: ForeseenRank, peak: int, setup: Setup, available: int | None, gpu: Gpu | None, profile: Software
) -> Iterator[str]:
    """Yield warnings about the accuracy of the predicted bytes: assumptions of the simulation, memory at the
    peak, and uncertain bytes of this GPU.
    """
    missing = max(0, shown.needed_bytes - (available or shown.needed_bytes))
    alive = [shown.trace.blocks[index] for index in shown.trace.alive_at(peak)]
    yield from shown.trace.doubts
    for further in hooks("doubts_on_bytes"):
        yield from further(setup, alive, missing)
    yield from (*shown.doubts, *doubts_about(gpu, profile))


def _predict_rank(
    rank: int,
    trace: Trace,
    gpu: Gpu | None,
    profile: Software,
    setup: Setup,
    loop: str,
    rates: Rates | None,
) -> ForeseenRank:
    communication = exchanges().communication_bytes(trace, ranks_of(setup))
    group = exchanges().group_bytes(setup, loop) + communication
    # The CUDA context is outside of the allocator.
    context, about_context = context_of(gpu, profile, trace, group=group)
    limit = gpu.memory_bytes - context if gpu and gpu.memory_bytes else math.inf
    late = exchanges().late_frees(trace, gpu, setup, rates)
    after = replay(trace, expandable=setup.expandable_segments, limit=limit, late=late)
    # Above the limit the step does not fit anyway, and this warning would mislead.
    if after.retries and after.reserved_peak <= limit:
        about_context.append(RETRIED)
    return ForeseenRank(rank, trace, after, context, communication, about_context)


def rehearse_again(prediction: Prediction) -> Trace:
    """Simulate a prediction's step again and return the trace, which the prediction does not contain. It does
    not support a subclass of Trainer."""
    profile = find_software(prediction.software)
    setup = on_gpus(profile.setup(prediction.recipe), prediction.gpus)
    part = job_of_rank(prediction.job, setup)
    return _rehearse(part, setup, prediction.gpu, profile, prediction.loop, None, prediction.rank)


def _rehearse(
    job: Job,
    setup: Setup,
    gpu: Gpu | None,
    profile: Software,
    loop: str,
    trainer_class: type[Any] | None,
    rank: int,
) -> Trace:
    # The compiler, or a library that imports it, may change the trace of a step that imports it midway.
    if loop != "plain" or not all(wish.needs_no_compiler for wish in used_wishes(setup)):
        complete_imports()
    put_off = are_put_off()
    trace = _rehearse_once(job, setup, gpu, profile, loop, trainer_class, rank)
    if put_off and not are_put_off():  # imports in the middle of a step may change its trace
        trace = _rehearse_once(job, setup, gpu, profile, loop, trainer_class, rank)
    return trace


def _rehearse_once(
    job: Job,
    setup: Setup,
    gpu: Gpu | None,
    profile: Software,
    loop: str,
    trainer_class: type[Any] | None,
    rank: int,
) -> Trace:
    policy = policy_for(gpu, profile)
    older = profile.keep_gradients or profile.always_mask
    # A user's own Trainer may count layers, and older software is not extrapolated from few layers.
    if not older and trainer_class is None:
        trace = rehearse_from_few_layers(job, setup, policy, loop=loop)
        if trace is not None:
            return trace
    return rehearse(
        job,
        setup,
        policy,
        loop=loop,
        keep_gradients=profile.keep_gradients,
        always_mask=profile.always_mask,
        trainer_class=trainer_class,
        rank=rank or None,  # stages differ by number, other ranks by the sizes of their shards
    )


def _host_bytes(job: Job, setup: Setup, shown: ForeseenRank, ranks: Sequence[ForeseenRank], loop: str) -> int:
    """Return the peak resident bytes of the training process and its loader workers, to within 400 MiB.

    Most of them are Python, torch and CUDA's libraries. Before training, a model that is built on the host
    adds its weights. During training, the loader's batches, offloaded activations and optimizer states add
    theirs.
    """
    trace = shown.trace
    batch = sum(block.nbytes for block in trace.blocks if block.kind == Kind.INPUTS and block.step == 0)
    workers = setup.loader.workers
    training = (
        PROCESS_BYTES
        # Each worker also has its prefetched batches.
        + workers * (WORKER_BYTES + PREFETCHED_BATCHES * batch)
        + (2 * batch if setup.loader.pinned else 0)
        + pinned_bytes(trace.kernels)
        + host_state_bytes(trace.kernels)
    )
    weights = exchanges().weights_on_host(job, setup, [rank.trace for rank in ranks], loop)
    # A model that is built on the host is in memory before CUDA's context, and freed before training.
    return max(training, IMPORTED_BYTES + weights)


def _footprint(shown: ForeseenRank, peak: int, host: int, memory: int | None) -> Footprint:
    trace, after, context, communication = shown.trace, shown.after, shown.context, shown.communication
    taken = context + after.reserved_peak
    managed = managed_bytes(trace.kernels)
    if memory is not None:
        # Managed memory pages that do not fit on the GPU stay on the host.
        managed = min(managed, max(0, memory - taken))
    return Footprint(
        requested_bytes=after.requested_peak,
        allocated_bytes=after.allocated_peak,
        reserved_bytes=after.reserved_peak,
        nvml_bytes=taken + managed,
        context_bytes=context - communication,
        communication_bytes=communication,
        managed_bytes=managed,
        host_bytes=host,
        pinned_bytes=pinned_bytes(trace.kernels),
        at=_moment(trace, peak),
        kinds=by_kind(trace, peak),
        retries=after.retries,
    )


def _seconds(
    shown: ForeseenRank,
    gpu: Gpu | None,
    job: Job,
    setup: Setup,
    rates: Rates | None,
    differing: DifferingRanks | None,
) -> tuple[StepSeconds | None, tuple[PhaseSpan, ...], tuple[str, ...]]:
    """Return the seconds of a step on this GPU (without first-step costs), its timeline, and warnings about
    their accuracy.
    """
    if gpu is None:
        return None, (), ()
    try:
        rates = rates or rates_for(gpu, ranks_of(setup))
    # Without rates the bytes are still predicted.
    except GpuError as unknown:
        return None, (), (str(unknown),)
    doubts = (
        ()
        if rates.measured
        else (
            f"For this GPU no rates were measured: seconds are {rates.source}. "
            "snugfit calibrate on such a GPU measures them.",
        )
    )
    doubts += tuple(sentence for further in hooks("timing_doubts") for sentence in further(setup))
    trace, workers = shown.trace, setup.loader.workers
    doubts = (*doubts, *exchanges().doubts(trace, gpu, rates))
    # Ranks that differ wait for each other, so only the feature can compute their seconds.
    if differing is not None:
        return differing.seconds(shown.rank, job.batch_size, rates), (), doubts
    connected = exchanges().link(gpu, rates)
    streams = run_in_streams(trace, rates, connected, workers=workers)
    timing = step_seconds(
        trace, gpu, batch_size=job.batch_size, rates=rates, workers=workers, streams=streams
    )
    timed = time_kernels(trace, rates, connected, workers=workers, streams=streams)
    return timing, phase_spans(timed), doubts


def _startup(trace: Trace, job: Job, setup: Setup, timing: StepSeconds | None) -> Startup | None:
    """Return the predicted seconds from process start until steps reach their final speed; None without a
    predicted step time. The host is assumed to be like that of the measured H200.
    """
    if timing is None:
        return None
    kernels, pinned = distinct_kernels(trace.kernels), pinned_bytes(trace.kernels)
    return startup(
        job,
        setup,
        kernels,
        step_seconds=timing.step_seconds,
        pinned_bytes=pinned,
        in_programs=count_in_programs(trace.kernels, setup),
    )


def _refuse(job: object, memory_bytes: object) -> None:
    """Raise `UsageError` if `job` is not a `Job` or `memory_bytes` is not a number of bytes."""
    refuse_what_is_no_job(job)
    if memory_bytes is None or (type(memory_bytes) is int and memory_bytes > 0):
        return
    raise UsageError(
        f"memory_bytes is {memory_bytes!r}; it must be a whole number of bytes above 0, such as 24 * "
        "2**30, or None for all of the GPU's memory."
    )


def _moment(trace: Trace, peak: int) -> Moment:
    block = trace.blocks[abs(trace.events[peak]) - 1]
    return Moment(phase=block.phase, module=block.module, operator=block.operator, step=block.step + 1)
