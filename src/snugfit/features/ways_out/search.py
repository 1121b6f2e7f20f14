"""Search for the cheapest changes of a recipe with which a step fits, after a prediction that it does not.

A plan searches all recipes, which takes minutes. Ways out change as little as possible, in this order:

1. One technique of a slot that the recipe leaves plain. Graded techniques have the fewest layers that fit.
2. Two such techniques, each too large alone.
3. As many as are needed, without those that turn out to be unnecessary. If some changes are found already,
   these are alternatives to them.
4. The same with techniques of another fidelity, which are listed last.

Each stage ends as soon as enough are found. The second and third are skipped if the weights, states and
gradients are too large with all techniques together. Lower bounds (`Parts.screen`) exclude most recipes and
give the order of the rest. Exact figures (`Parts.evaluate`) decide in that order. For a loop other than the
plain one, an offered recipe is predicted too. Named techniques stay. If nothing fits, the smallest GPU that
does is listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError, UsageError
from snugfit.features.ways_out.lighter import LighterRecipes, timer_of
from snugfit.job.gpu import all_gpus
from snugfit.planning.keep import Keep, techniques_named
from snugfit.planning.search.simpler import AS_FAST
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import INSTALLED
from snugfit.results.ways_out import LargerGpu, WayOut, WaysOut
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.results.prediction import Prediction

OFFERED = 3
"""Number of changes that a result suggests."""

MAX_SIMULATED = 16
"""Number of simulated recipes after which the search ends if some fit (chosen)."""

LARGER_GPUS = 8
"""Greatest number of larger GPUs on which the step is predicted."""


def ways_out(
    prediction: Prediction,
    *,
    keep: Keep = None,
    beyond: Fidelity | None = None,
    workers: int = 1,
    tell: Callable[[str], None] = lambda message: None,
) -> WaysOut:
    """Return the cheapest changes with which a step fits; none if it fits, or for several GPUs.

    Slots of the techniques in `keep` stay, by default those of all techniques of the recipe that are not
    plain. Techniques up to the fidelity `beyond` are not tried, since a plan found nothing with them. With
    several `workers`, each is a process. `tell` receives messages on the progress. Raises `UsageError` for a
    prediction without a memory limit.
    """
    if prediction.memory_bytes is None:
        raise UsageError(
            "ways_out needs a prediction with a memory limit. Predict with gpu='h100', or with memory_bytes."
        )
    if prediction.fits or prediction.gpus > 1:
        return WaysOut()
    from snugfit.planning.cost.parts_pool import load_ahead, parts_pool

    job, gpu = prediction.job, prediction.gpu
    timer = timer_of(gpu)
    load_ahead(job, [gpu], timer, workers)
    named = (
        {technique.slot for technique in prediction.recipe if not technique.plain}
        if keep is None
        else techniques_named(keep)
    )
    least = list(Fidelity).index(beyond) + 1 if beyond else 1
    degrees = list(Fidelity)[max(1, least) :]
    offers: dict[Recipe, WayOut] = {}
    with parts_pool(job, [gpu], timer, workers=workers, shallow=True) as pool:
        lighter = LighterRecipes(
            job,
            prediction.recipe,
            gpu=gpu,
            loop=prediction.loop,
            memory_bytes=prediction.memory_bytes,
            headroom_bytes=prediction.headroom_bytes,
            free=[slot for slot in Slot if slot not in named],
            pool=pool,
        )
        for recipes in _stages(lighter, degrees, offers, tell):
            # As many as are missing are predicted concurrently, one in each worker.
            while (missing := OFFERED - len(offers)) and (batch := [*islice(recipes, missing)]):
                offers |= _offers(prediction, batch, lighter)
            if not missing:
                break
    ways = tuple(sorted(offers.values(), key=_rank))
    larger = None if ways else _larger_gpu(prediction, lighter.smallest, tell)
    return WaysOut(ways=ways, larger_gpu=larger)


def _stages(
    lighter: LighterRecipes,
    degrees: Sequence[Fidelity],
    offers: dict[Recipe, WayOut],
    tell: Callable[[str], None],
) -> Iterator[Iterator[Recipe]]:
    """Yield, for each stage of the search, an iterator over recipes that fit. The changes of one stage are
    complete before the next. Each alternative to a found change leaves one of its slots at the plain
    technique. Once changes are found, only single techniques that change the algorithm are tried.
    """

    def report(message: str) -> None:
        tell(f"trying {message} more; {len(offers)} found so far")

    for fidelity in degrees:
        report("one technique")
        yield lighter.singles(fidelity)
        if offers and (fidelity is Fidelity.LEARNS or lighter.evaluations > MAX_SIMULATED):
            return
        if not lighter.may_fit_together(fidelity):
            continue
        report("two techniques")
        yield lighter.pairs(fidelity)
        report("as many techniques as needed")
        if not offers:
            yield lighter.many_at_once(fidelity)
            continue
        for slot in lighter.slots(next(iter(offers))):
            if lighter.evaluations > MAX_SIMULATED:
                return
            yield (recipe for recipe in lighter.many_at_once(fidelity, without=slot) if recipe not in offers)


def _offers(
    prediction: Prediction, recipes: Sequence[Recipe], lighter: LighterRecipes
) -> dict[Recipe, WayOut]:
    """Return the proposed changes for these recipes, without those that do not fit after all. The bytes of
    the search are those of the plain loop and the installed packages. For others, the workers predict the
    recipes.
    """
    costs: Iterable[tuple[float, float | None] | None] = map(lighter.cost, recipes)
    if prediction.loop != "plain" or prediction.software != INSTALLED:
        predicted = lighter.costs.predict(
            recipes,
            memory_bytes=prediction.memory_bytes,
            loop=prediction.loop,
            software=prediction.software,
        )
        # None means a recipe that this loop or the installed software does not support.
        costs = (
            None if candidate is None else (candidate.needed_bytes, _seconds(candidate))
            for candidate in predicted
        )
    return {
        recipe: offer
        for recipe, cost in zip(recipes, costs, strict=True)
        if cost and (offer := _offer(prediction, recipe, *cost))
    }


def _offer(
    prediction: Prediction, recipe: Recipe, needed_bytes: float, seconds: float | None
) -> WayOut | None:
    """Return the proposed change for a recipe of these bytes and seconds; None if it does not fit."""
    needed, before = int(needed_bytes), _seconds(prediction)
    seconds = None if before is None else seconds
    spare = (prediction.memory_bytes or 0) - needed
    if spare < 0:
        return None
    changed = [
        technique for technique, old in zip(recipe, prediction.recipe, strict=True) if technique != old
    ]
    return WayOut(
        recipe=str(recipe),
        changes=tuple(map(str, changed)),
        needed_bytes=needed,
        spare_bytes=spare,
        step_seconds=seconds,
        slowdown=seconds / before - 1 if seconds and before else None,
        fidelity=max(
            (technique.fidelity_for(prediction.job) for technique in changed), key=list(Fidelity).index
        ).value,
        tight=spare < prediction.headroom_bytes,
    )


def _seconds(prediction: Prediction) -> float | None:
    """Return the seconds of a predicted step; None if they are not predicted."""
    return prediction.timing.step_seconds if prediction.timing else None


def _rank(way: WayOut) -> tuple[bool, int, int, bool, int]:
    """Return the sort key of a change: its fidelity, slowdown up to a tolerance, number of changes, and the
    rest."""
    slowdown = round((way.slowdown or 0.0) / AS_FAST)
    learns = way.fidelity == Fidelity.LEARNS.value
    return learns, slowdown, len(way.changes), way.tight, way.needed_bytes


def _larger_gpu(prediction: Prediction, smallest: Recipe, tell: Callable[[str], None]) -> LargerGpu | None:
    """Return the smallest GPU that the recipe fits, or else the smallest recipe, with the prediction for it;
    None without such a GPU.
    """
    for recipe in dict.fromkeys((prediction.recipe, smallest)):
        tell(f"searching the smallest GPU for {recipe}")
        if larger := _smallest_gpu_for(prediction, recipe):
            return larger
    return None


def _smallest_gpu_for(prediction: Prediction, recipe: Recipe) -> LargerGpu | None:
    """Return the GPU with the least memory that this recipe fits and leaves its headroom."""
    job = prediction.job
    options: dict[str, Any] = {"loop": prediction.loop, "software": prediction.software}
    needed = prediction.needed_bytes
    if recipe != prediction.recipe:
        needed = predict(job, recipe, gpu=prediction.gpu, **options).needed_bytes
    for gpu in [gpu for gpu in _by_memory() if (gpu.memory_bytes or 0) >= needed][:LARGER_GPUS]:
        try:
            predicted = predict(job, recipe, gpu=gpu, **options)
        except SnugfitError:  # an older GPU may not support a technique
            continue
        if predicted.fits and not predicted.tight:
            return LargerGpu(
                gpu=gpu.key,
                memory_bytes=gpu.memory_bytes or 0,
                recipe=str(recipe),
                needed_bytes=predicted.needed_bytes,
                step_seconds=_seconds(predicted),
            )
    return None


def _by_memory() -> list[Gpu]:
    """Return the GPUs that predictions support, the smallest first, and newer ones first among equal ones."""
    usable = [gpu for gpu in all_gpus() if gpu.compute_capability and gpu.memory_bytes]
    return sorted(usable, key=lambda gpu: (gpu.marketed_gb or 0, -(gpu.release_year or 0), gpu.key))
