"""Comparison of ways to pad a dataset: peak bytes of each way, and its average seconds.

A run must not fail at its longest batch. So the peak memory is that of a step whose sequences all have the
greatest length. The seconds are a mean over random batches (`padding.py`), with a prediction for each length
(`length_profile.py`). `padding.py` combines them.

Truncated sequences change the learned model. Its results are shown separately on request, and it is never
proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from snugfit.errors import JobError, UsageError
from snugfit.features.lengths.dataset import Lengths
from snugfit.features.lengths.length_plan import Cut, LengthPlan
from snugfit.features.lengths.length_profile import LengthProfiler
from snugfit.features.lengths.padding import Way, Ways, seconds_of
from snugfit.features.lengths.sizes import sizes_of
from snugfit.job.gpu import Gpu, find_gpu
from snugfit.job.inputs import has_sequence, has_target
from snugfit.job.job import Job
from snugfit.planning.request import refuse_bad_request
from snugfit.prediction.device import doubts_about
from snugfit.prediction.headroom import headroom_of
from snugfit.prediction.profile import installed_versions
from snugfit.techniques.recipe import Recipe


def job_of(job: Job, lengths: Lengths) -> Job:
    """Return the job whose every batch is as long as the dataset's longest sample.

    Raises `JobError` for a task without sequences, and for a sample longer than the model's position
    embeddings.
    """
    if not has_sequence(job.task):
        raise JobError(
            f"Lengths are for sequences of tokens, but the task {job.task} has none. Leave the lengths "
            "out, or choose another task."
        )
    padding = 1 - lengths.mean / lengths.longest
    try:
        return replace(job, sequence_length=lengths.longest, padding=padding)
    except JobError as error:
        raise JobError(f"{error} The longest of {lengths.source} has {lengths.longest} tokens.") from None


def plan_lengths(
    job: Job,
    recipe: Recipe | str = "plain",
    *,
    lengths: Lengths,
    gpu: Gpu | str,
    memory_bytes: int | None = None,
    headroom: int | str | None = None,
    loop: str = "plain",
    cut: int | None = None,
    seed: int = 0,
    tell: Callable[[str], None] = lambda message: None,
) -> LengthPlan:
    """Return memory and step time of each way to pad the dataset's batches, under this recipe on this GPU.

    `headroom` (bytes, or text such as `2%`) is memory that should stay free, by default as in `plan`. `cut`
    adds results for sequences of at most this number of tokens. `seed` draws the batches, and `tell` receives
    messages on the progress. Raises `UsageError` for invalid arguments, `RehearsalError` for a step that
    cannot be simulated.
    """
    refuse_bad_request(job, memory_bytes=memory_bytes)
    if not isinstance(lengths, Lengths):
        raise UsageError(
            f"lengths is {type(lengths).__name__}; it must be a snugfit.Lengths: Lengths.of([12, 40, 7]), "
            "Lengths.of({128: 5000}), or Lengths.read(path)."
        )
    recipe, gpu = recipe if isinstance(recipe, Recipe) else Recipe.parse(recipe), find_gpu(gpu)
    _refuse_without_padding(recipe, lengths)
    _refuse_graphs(recipe)
    shorter = _shorter(lengths, cut)
    longest = job_of(job, lengths if shorter is None or _takes(job, lengths.longest) else shorter)
    warnings = recipe.check(longest, gpu.compute_capability)
    profiler = LengthProfiler(longest, recipe, gpu, loop, tell)
    of_all = Ways(profiler, lengths, seed)
    of_cut = Ways(profiler, shorter, seed) if shorter else None
    seconds = seconds_of(profiler, [ways for ways in (of_all, of_cut) if ways])
    ways = of_all.ways(seconds)
    widest_shape = (longest.sequence_length, longest.padding > 0)
    return LengthPlan(
        job=longest,
        recipe=recipe,
        gpu=gpu,
        loop=loop,
        memory_bytes=memory_bytes if memory_bytes is not None else gpu.memory_bytes,
        headroom_bytes=headroom_of(headroom, gpu, memory_bytes),
        lengths=lengths,
        ways=ways if any(way.needed_bytes for way in ways) else (),
        cut=_cut(lengths, shorter, of_cut.ways(seconds)) if shorter and of_cut else None,
        sizes=sizes_of(profiler, *widest_shape),
        bound=profiler.timing(*widest_shape).bound,
        steps=of_all.steps,
        rehearsed=profiler.rehearsal_count,
        off=profiler.off,
        versions=installed_versions(),
        doubts=(*warnings, *profiler.doubts, *doubts_about(gpu), *_doubts(profiler, lengths)),
    )


def _refuse_without_padding(recipe: Recipe, lengths: Lengths) -> None:
    if dropping := [technique for technique in recipe if technique.drops_padding]:
        share = 1 - lengths.mean / lengths.longest
        raise UsageError(
            f"{dropping[0]} drops all padding, so no way of padding is better than another. Predict it with "
            f"the padding that these lengths have on average: sequence_length {lengths.longest}, padding "
            f"{share:.3f}; or with padding 0, for the longest batch that can occur."
        )


def _refuse_graphs(recipe: Recipe) -> None:
    """Raise `UsageError` for CUDA graphs. Each batch shape would capture separate graphs, and their memory
    adds up.
    """
    wish = recipe.setup().lowering
    if wish is not None and wish.records_graphs:
        raise UsageError(
            f"{recipe} records CUDA graphs for each length of a batch, whose memory adds up, and that is not "
            "predicted. Pad all batches alike and predict that, or leave the mode or backend out of "
            "'compiled'."
        )


def _shorter(lengths: Lengths, cut: int | None) -> Lengths | None:
    if cut is None:
        return None
    shorter = lengths.cut(cut)
    if shorter.counts == lengths.counts:
        raise UsageError(
            f"Cutting at {cut} tokens changes nothing: the longest of {lengths.source} has "
            f"{lengths.longest}. Leave it out, or cut shorter."
        )
    return shorter


def _takes(job: Job, length: int) -> bool:
    try:
        replace(job, sequence_length=length)
    except JobError:
        return False
    return True


def _cut(lengths: Lengths, shorter: Lengths, ways: tuple[Way, ...]) -> Cut:
    cut = sum(samples for tokens, samples in lengths.counts if tokens > shorter.longest)
    return Cut(
        at=shorter.longest,
        samples=cut / lengths.samples,
        tokens=1 - shorter.tokens / lengths.tokens,
        ways=ways,
    )


def _doubts(profiler: LengthProfiler, lengths: Lengths) -> Iterable[str]:
    if not profiler.rates.measured:
        yield (
            f"For this GPU no rates were measured: seconds are {profiler.rates.source}. snugfit "
            "calibrate on such a GPU measures them."
        )
    if profiler.lines:
        yield (
            "Seconds: this model runs other kernels at other lengths, so seconds between the simulated "
            "lengths are interpolated linearly. snugfit measure shows them."
        )
    if lengths.shortest < lengths.longest and not profiler.recipe.setup().expandable_segments:
        yield (
            "Bytes are for a run in which every batch is the longest. Batches of many lengths fragment the "
            "memory, so a run can reserve more. Add 'expandable' to keep that low."
        )
    if has_target(profiler.job.task):
        yield (
            f"The lengths are those of the inputs; every target has {profiler.job.target_length} tokens. "
            "Set target_length for others."
        )
