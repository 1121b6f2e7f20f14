"""Replace the technique `auto` of a recipe by the least recomputing and offloading with which the recipe
fits.

    snugfit predict bert-large-uncased --batch-size 32 --gpu l4 --recipe "bf16 + auto"

`auto` depends on the GPU, so it is replaced before a recipe exists. Runs, checkpoints and files contain the
concrete recipe. These steps are tried in order, each with a whole prediction for the loop of the run:

1. Keep all activations.
2. Recompute the fewest layers, from the first, up to all of them. A part of their activations may wait on
   the host during other layers' computation. If this shortens the step, use such a mixture.
3. Recompute all layers, and let the inputs of the fewest wait on the host, up to all of them.

The first recipe that leaves the headroom is taken. If none does, the last one is taken, if it fits at all.
Bytes decrease nearly linearly with each further layer. The next number of layers is the intersection of the
limit with the line through the two nearest predictions. A plan may find a faster recipe, since it also tries
other techniques.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from snugfit.errors import NothingFits, SnugfitError, UsageError
from snugfit.job.gpu import find_gpu
from snugfit.planning.search.mixture import (
    MixtureTrial,
    RecomputingLine,
    find_mixture,
    grades_of,
    guess_between,
    is_valid,
    mixture_of,
)
from snugfit.prediction.predict import predict as predict_recipe
from snugfit.prediction.profile import INSTALLED
from snugfit.prediction.rates import link_of
from snugfit.techniques import roster
from snugfit.techniques.recipe import AUTO, AUTO_SLOTS, Recipe, without_auto
from snugfit.techniques.setup import EVERY_LAYER
from snugfit.techniques.technique import Slot
from snugfit.units import show_bytes

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.prediction.rates import Rates
    from snugfit.results.prediction import Prediction
    from snugfit.techniques.technique import Technique

NO_LIMIT = (
    f"{AUTO!r} in a recipe is the least recomputing that fits a GPU, and there is none here. Name one with "
    "--gpu, or write a technique in its place, such as 'every_layer'."
)


class ResolvedRecipe(NamedTuple):
    """Result of replacing `auto` in a recipe: a recipe with concrete settings, and the reason for them."""

    recipe: Recipe
    reason: str
    """Sentence that names the techniques in place of `auto`, and the reason for them."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `Resolved.from_json` reads."""
        return {"recipe": self.recipe.to_json(), "why": self.reason}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the recipe and reason that `to_json` wrote."""
        return cls(Recipe.parse(document["recipe"]), str(document["why"]))


AUTO_ALONE = "'auto' is for one GPU. Leave --gpus out, or name a technique, such as 'every_layer'."


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

    Recipe and GPU may be given as text. In a text recipe, `auto` means the least recomputing that fits. Its
    replacement is logged and part of the prediction's recipe. On several `gpus` the global batch stays the
    same, and each takes its share.

    `memory_bytes` limits the memory, if it is less than the GPU's. A recipe that fits but leaves less free
    than `headroom` (bytes, or text such as `2%`) is marked as tight. The default is 2 % of the GPU's memory,
    and more for uncertain bytes. `loop` is `plain`, `accelerate` or `trainer`. `trainer_class` is a subclass
    of `transformers.Trainer` to simulate instead. `rates` are by default this GPU's.

    Raises `UsageError` for invalid arguments and `RehearsalError` for a step that cannot be simulated. Raises
    `NothingFits` if no replacement of `auto` fits.
    """
    options: dict[str, Any] = {
        "gpu": gpu, "memory_bytes": memory_bytes, "headroom": headroom, "loop": loop, "software": software,
        "trainer_class": trainer_class, "rates": rates,
    }  # fmt: skip
    rest = without_auto(recipe) if isinstance(recipe, str) else None
    if rest is not None and gpus != 1:
        raise UsageError(AUTO_ALONE)
    if rest is not None:
        recipe, reason = resolve(job, rest, **options)
        logging.getLogger("snugfit").warning("%s", reason)
    return predict_recipe(job, recipe, gpus=gpus, **options)


def resolve(
    job: Job,
    fixed: Recipe | str,
    *,
    gpu: Gpu | str | None = None,
    memory_bytes: int | None = None,
    **options: Any,
) -> ResolvedRecipe:
    """Return the recipe `fixed` with the least recomputing and offloading with which it fits, and the reason.

    `options` is passed to `predict`. Raises `UsageError` without a limit, and `NothingFits` if nothing fits.
    """
    if gpu is None and memory_bytes is None:
        raise UsageError(NO_LIMIT)
    gpu = find_gpu(gpu) if gpu is not None else None
    base = fixed if isinstance(fixed, Recipe) else Recipe.parse(fixed)
    search = _AutoSearch(job, {"gpu": gpu, "memory_bytes": memory_bytes, **options})
    if search.leaves_headroom(base):
        return _resolve_to(base, "all activations fit", search)
    recomputing = [*grades_of(Slot.CHECKPOINTING, job), *_each_layer(job)]
    again = [recipe for technique in recomputing if is_valid(recipe := base.with_(technique), job)]
    last = base
    # A model may have no layers to recompute, so the last of these is predicted first.
    if again and search.is_known(again[-1]):
        last = again[-1]
        if search.leaves_headroom(last):
            least = search.least([base, *again])
            mixed = _faster_mixture(search, base, last, again.index(least) + 1, gpu)
            needed = show_bytes(search.needed_bytes(base))
            because = f"it does not fit with fewer recomputed layers: without any it needs {needed}"
            if mixed is not None:
                because += ", and copying in the background takes less time than computing again"
            return _resolve_to(mixed or least, because, search)
    hosts = [*grades_of(Slot.ACTIVATION_OFFLOAD, job), *_all_on_host()]
    # Activations are sent to the host only in addition to recomputation.
    sent = [recipe for technique in hosts if is_valid(recipe := last.with_(technique), job)]
    if sent and search.is_known(sent[-1]):
        if search.leaves_headroom(sent[-1]):
            least = search.least([last, *sent])
            needed = show_bytes(search.needed_bytes(last))
            because = f"recomputing every layer is not enough: it still needs {needed}"
            return _resolve_to(least, because, search)
        last = sent[-1]
    if search.needed_bytes(last) <= search.memory:
        return _resolve_to(
            last, "less recomputing does not fit, and this leaves less than the headroom", search
        )
    lacking = show_bytes(search.needed_bytes(last) - search.memory)
    raise NothingFits(
        f"auto: even {last} needs {show_bytes(search.needed_bytes(last))}, {lacking} more than there is. "
        "snugfit plan looks at every other technique too; or try micro_batches, or a larger GPU."
    )


def _faster_mixture(
    search: _AutoSearch, base: Recipe, full: Recipe, gone: int, gpu: Gpu | None
) -> Recipe | None:
    """Return a faster recipe that frees the activations of `gone` layers, some of them by offloading. Return
    None if no recipe is clearly faster, by more than `AS_FAST`.
    """
    mixture = mixture_of(search.job, link_of(gpu))
    if mixture is None or gone >= mixture.layers:
        return None

    def look(recipe: Recipe) -> MixtureTrial | None:
        known = search.is_known(recipe)
        return MixtureTrial(recipe, search.lacking(recipe), search.seconds(recipe)) if known else None

    line = RecomputingLine(
        search.needed_bytes(base), search.seconds(base), search.needed_bytes(full), search.seconds(full)
    )
    most = search.seconds(mixture.with_recomputing(base, gone))
    return find_mixture(mixture, line, base, gone, most, look)


@dataclass
class _AutoSearch:
    """Cache of the predictions of one job's recipes, while `auto` is replaced."""

    job: Job
    options: Mapping[str, Any]
    predictions: dict[Recipe, Prediction | SnugfitError] = field(default_factory=dict)

    def of(self, recipe: Recipe) -> Prediction:
        """Return the prediction of a recipe. Raises `SnugfitError` if it is impossible."""
        if recipe not in self.predictions:
            try:
                self.predictions[recipe] = predict_recipe(self.job, recipe, **self.options)
            except SnugfitError as refused:
                self.predictions[recipe] = refused
        answer = self.predictions[recipe]
        if isinstance(answer, SnugfitError):
            raise answer
        return answer

    def is_known(self, recipe: Recipe) -> bool:
        """Return True if the recipe can be predicted. For example, a model may have no layers to
        recompute."""
        try:
            self.of(recipe)
        except SnugfitError:
            return False
        return True

    @property
    def memory(self) -> int:
        """Bytes of GPU memory that may be used."""
        # All predictions have the same memory limit, by default the GPU's memory.
        first = next(
            figures for figures in self.predictions.values() if not isinstance(figures, SnugfitError)
        )
        return first.memory_bytes or 0

    def needed_bytes(self, recipe: Recipe) -> int:
        """Return the bytes of GPU memory that must be free for a recipe."""
        return self.memory - (self.of(recipe).spare_bytes or 0)

    def seconds(self, recipe: Recipe) -> float:
        """Return the predicted seconds per step of a recipe; 0 if they are unknown."""
        timing = self.of(recipe).timing
        return timing.step_seconds if timing else 0.0

    def lacking(self, recipe: Recipe) -> int:
        """Return the bytes that a recipe lacks to leave the requested free memory (headroom); negative if it
        leaves more.
        """
        return self.of(recipe).headroom_bytes - (self.of(recipe).spare_bytes or 0)

    def leaves_headroom(self, recipe: Recipe) -> bool:
        """Return True if the recipe fits and leaves the requested free memory."""
        return self.lacking(recipe) <= 0

    def least(self, recipes: Sequence[Recipe]) -> Recipe:
        """Return the first recipe that leaves the headroom, from recipes in the order of decreasing bytes.

        The first of all must not fit, and the last must.
        """
        low, high, rounds = 0, len(recipes) - 1, 0
        while high - low > 1:
            above, below = self.lacking(recipes[low]), self.lacking(recipes[high])
            # Each third guess is the middle, in case the bytes are far from linear.
            on_line = guess_between(low, high, above, below, 0)
            middle = on_line if rounds % 3 < 2 else (low + high + 1) // 2
            if self.leaves_headroom(recipes[middle]):
                high = middle
            else:
                low = middle
            rounds += 1
        return recipes[high]


def _resolve_to(recipe: Recipe, cause: str, search: _AutoSearch) -> ResolvedRecipe:
    words = " + ".join(str(recipe[slot]) for slot in AUTO_SLOTS if not recipe[slot].plain)
    words = words or str(recipe[Slot.CHECKPOINTING])
    needs = f"it needs {show_bytes(search.needed_bytes(recipe))} of {show_bytes(search.memory)}"
    return ResolvedRecipe(recipe, f"auto: {words}, because {cause}; {needs}")


def _each_layer(job: Job) -> list[Technique]:
    """Return a list with the technique that recomputes each layer; empty if there is none."""
    kinds = [kind for kind in roster.techniques() if kind.slot is Slot.CHECKPOINTING]
    settings = [technique for kind in kinds for technique in kind.settings(job)]
    return [technique for technique in settings if technique.value == EVERY_LAYER][:1]


def _all_on_host() -> list[Technique]:
    """Return the techniques that offload as many activations as possible to the host."""
    kinds = [kind for kind in roster.techniques() if kind.slot is Slot.ACTIVATION_OFFLOAD]
    return [Recipe.parse(kind.last_resort)[kind.slot] for kind in kinds if kind.last_resort]
