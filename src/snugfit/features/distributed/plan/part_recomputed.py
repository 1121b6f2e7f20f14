"""Search for the fewest layers to recompute on several GPUs, for results of a plan that recompute every
layer.

The search compares recipes that recompute no layer, or each. There are as many settings in between as a model
has layers. Models of few layers give no information on them, so each setting is simulated with all layers.
Bytes and seconds are linear between the two ends: each recomputed layer frees its activations, and adds its
forward pass.

For the same layout and micro-batches, the fewest layers follow from the ends. They are simulated with all
layers, and the result corrects them once or twice. If gathered weights are kept, this is repeated without
keeping them, which may leave memory for more layers. Stages are left out: the largest stage changes with the
recomputed layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from snugfit.features.distributed.plan.candidates import is_valid, of_slot, recomputings
from snugfit.features.distributed.plan.fastest import Screened
from snugfit.features.distributed.plan.judge import Judged
from snugfit.planning.search.simpler import AS_FAST
from snugfit.techniques import roster
from snugfit.techniques.setup import EVERY_LAYER
from snugfit.techniques.technique import Slot
from snugfit.units import show_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from snugfit.features.distributed.plan.fastest import Judging
    from snugfit.features.distributed.plan.plan import OnGpus
    from snugfit.job.job import Job
    from snugfit.planning.keep import Kept
    from snugfit.techniques.setup import CheckpointWish
    from snugfit.techniques.technique import Technique

ROUNDS = 3
"""Largest number of full simulations (all layers) for one number of GPUs (chosen)."""


def recomputes_layers(one: Screened) -> bool:
    """Return True if the recipe recomputes layers and has no pipeline stages, so that fewer could be
    recomputed.
    """
    return not one.shared.recomputing.plain and one.shared.stages == 1


class FewestRecomputed:
    """Search for the fewest recomputed layers with which each of several recipes still fits. `judge` predicts
    recipes with few layers, and `in_full` with all layers; a failed prediction is None.
    """

    def __init__(
        self,
        job: Job,
        fixed: Kept,
        bound: int,
        judge: Judging,
        in_full: Callable[[list[Screened]], list[OnGpus | None]],
    ) -> None:
        self._job, self._fixed, self._bound = job, fixed, bound
        self._judge, self._in_full = judge, in_full

    def run(self, chosen: Sequence[tuple[OnGpus, Screened]]) -> dict[int, OnGpus]:
        """Return faster recipes, by number of GPUs, which recompute fewer layers than the recipes in
        `chosen`.
        """
        lines = list(self._lines(chosen))
        best = {line.answer.gpus: line.answer for line in lines}
        for _ in range(ROUNDS):
            asked: dict[int, tuple[_LayersLine, Screened]] = {}
            for line in lines:
                gpus = line.answer.gpus
                question = line.next(best[gpus].step_seconds)
                if question is not None and (
                    gpus not in asked or _seconds(question) < _seconds(asked[gpus][1])
                ):
                    asked[gpus] = line, question
            full = self._in_full([question for _, question in asked.values()])
            for (gpus, (line, question)), answer in zip(asked.items(), full, strict=True):
                line.hear(question, answer)
                if answer is not None and answer.fits and answer.step_seconds < best[gpus].step_seconds:
                    best[gpus] = replace(answer, why=line.why(question, answer))
        return {line.answer.gpus: best[line.answer.gpus] for line in lines}

    def _lines(self, chosen: Sequence[tuple[OnGpus, Screened]]) -> Iterator[_LayersLine]:
        """Yield a search (`_LayersLine`) for each recipe that recomputes layers, unless the user fixed the
        recomputation, or layers are in pipeline stages. Also yield searches with weights gathered more often,
        which frees memory.
        """
        slot = Slot.CHECKPOINTING
        kinds = [
            one for one in roster.techniques() if one.slot is slot and not one.planning_objection(self._job)
        ]
        graded = (one.grades(self._job) for one in kinds if not one.lowered)
        some = next(filter(None, graded), ())
        every = next(
            (one for one in recomputings(self._job, self._fixed) if _wish_of(one) == EVERY_LAYER), None
        )
        if slot in self._fixed.slots or not some or every is None:
            return
        fewer = [
            (answer, one, sharing)
            for answer, one in chosen
            if recomputes_layers(one)
            for sharing in self._sharings(one)
            if is_valid(self._job, one.recipe.with_(sharing).with_(some[0]), answer.gpus)
        ]
        ends = [
            (answer.gpus, one.recipe.with_(sharing).with_(end))
            for answer, one, sharing in fewer
            for end in (roster.plain(slot), every)
        ]
        judged = iter(self._judge(ends))
        for answer, one, sharing in fewer:
            yield _LayersLine(answer, one, sharing, some, next(judged), next(judged), self._bound)

    def _sharings(self, one: Screened) -> Iterator[Technique]:
        """Yield the recipe's data-parallel technique, and its settings that keep fewer gathered weights in
        memory.
        """
        slot, shared = Slot.SHARDING, one.shared
        yield shared.recipe[slot]
        for other in of_slot(self._job, slot, self._fixed):
            if type(other) is type(shared.recipe[slot]) and other != shared.recipe[slot]:
                leaner = replace(shared, recipe=shared.recipe.with_(other))
                if is_valid(self._job, one.recipe.with_(other), shared.gpus) and leaner.holds_no_more_than(
                    shared
                ):
                    yield other


def _seconds(one: Screened) -> float:
    return one.judged.step_seconds


def _wish_of(technique: Technique) -> CheckpointWish | None:
    return technique.alone.checkpoint


@dataclass
class _LayersLine:
    """Copies of one recipe that differ only in the number of recomputed layers, from none to all."""

    answer: OnGpus
    one: Screened
    """The recipe that recomputes every layer, with figures from models of few layers."""
    sharing: Technique
    some: Sequence[Technique]
    """Checkpointing techniques that recompute the first layer, the first two, and so on up to all but one."""
    none: Judged
    every: Judged
    bound: int
    """Usable bytes of each GPU."""
    _fits: dict[int, int] = field(default_factory=dict)
    """Predicted bytes of full simulations that fit, by the number of recomputed layers."""
    _misses: dict[int, int] = field(default_factory=dict)
    """Predicted bytes of full simulations that do not fit, by the number of recomputed layers."""

    @property
    def layers(self) -> int:
        """Number of layers that may be recomputed."""
        return len(self.some) + 1

    def next(self, fastest: float) -> Screened | None:
        """Return the next recipe to simulate, with its interpolated bytes and seconds. Return None if no
        recipe may fit and clearly take less than `fastest` seconds.
        """
        low, high = max(self._misses, default=-1), min(self._fits, default=self.layers)
        layers = max(self._just_enough(), low + 1)
        if layers >= high or (judged := self._on_line(layers)).step_seconds > fastest * (1 - AS_FAST):
            return None
        some = self.some[layers - 1] if layers else roster.plain(Slot.CHECKPOINTING)
        recipe, shared = self.one.recipe.with_(self.sharing).with_(some), self.one.shared
        shared = replace(shared, recipe=shared.recipe.with_(self.sharing).with_(some))
        return Screened(recipe, judged, shared, self.one.size)

    def hear(self, question: Screened, answer: OnGpus | None) -> None:
        """Store the bytes and seconds of the recipe `question`, which was simulated with all layers; None
        after a failure.
        """
        if answer is None:
            self._misses[self.layers] = 0  # other numbers of recomputed layers cannot be simulated either
            return
        known = self._fits if answer.fits else self._misses
        known[self._layers_of(question)] = answer.needed_bytes

    def _layers_of(self, question: Screened) -> int:
        """Return the number of layers that a recipe recomputes."""
        technique = question.shared.recomputing
        return 0 if technique.plain else self.some.index(technique) + 1

    def _just_enough(self) -> int:
        """Return the fewest recomputed layers that should fit into memory, interpolated between simulated
        recipes.

        It is corrected by the error of the extrapolation from few layers. If no number is enough, return all
        layers.
        """
        a_layer = (self.none.needed_bytes - self.every.needed_bytes) / self.layers
        if a_layer <= 0 or self.none.why_not or self.every.why_not:
            return self.layers
        off = self.answer.needed_bytes - self.one.judged.needed_bytes
        known = min(self._fits.items(), default=None) or max(self._misses.items(), default=None)
        layers, needed = known or (0, self.none.needed_bytes + off)
        return layers + math.ceil((needed - self.bound) / a_layer)

    def _on_line(self, layers: int) -> Judged:
        share = layers / self.layers
        none, every = self.none, self.every
        return none._replace(
            needed_bytes=int(none.needed_bytes + share * (every.needed_bytes - none.needed_bytes)),
            step_seconds=none.step_seconds + share * (every.step_seconds - none.step_seconds),
            model_seconds=none.model_seconds + share * (every.model_seconds - none.model_seconds),
            exposed_seconds=none.exposed_seconds + share * (every.exposed_seconds - none.exposed_seconds),
        )

    def why(self, question: Screened, answer: OnGpus) -> str:
        """Return the sentences that explain a recipe's groups of GPUs and its number of recomputed layers,
        for a report.
        """
        before, more = self.answer.why, self.answer.step_seconds / answer.step_seconds - 1
        layers = self._layers_of(question)
        if not layers:
            return before
        which = "layer is" if layers == 1 else f"{layers} layers are"
        techniques = (self.one.shared.recomputing, self.one.shared.recipe[Slot.SHARDING])
        named = " + ".join(str(one) for one in techniques if one not in question.recipe.techniques)
        why = (
            f"the first {which} recomputed, of {self.layers}. With none a step needs about "
            f"{show_bytes(self.none.needed_bytes)} of each GPU, of which {show_bytes(self.bound)} may be "
            f"used. With {named} it takes {100 * more:.1f} % longer."
        )
        return f"{before} {why[0].upper()}{why[1:]}" if before else why
